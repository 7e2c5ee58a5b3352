"""What a user sets in ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from ....tiers.errors import ConfigError
from ....tiers.settings import expect_seconds, expect_text, shown_url
from ...listening import default_socket_path
from ..link import is_local

__all__ = ["BackendSettings"]

_PREFIX: Final = "kvpager_"


@dataclass(frozen=True)
class BackendSettings:
    """Settings of the backend: keys of the map that begin with ``kvpager_``.

    Args:
        url: of a sidecar on this machine, ``unix:///path``; empty: where ``kvpager serve`` listens by itself.
        tenant: whose the pages are: quotas go by it, and ``clear`` removes all of it.
        lookup_seconds: how long a call waits at most for the sidecar, its cold tier included.
        model: folder, file or Hugging Face name of the weights; empty: that of the engine.

    Raises:
        ConfigError: a value is of a wrong type or out of range, or the sidecar is not one of this machine.
    """

    url: str = ""
    tenant: str = "sglang"
    lookup_seconds: float = 1.0
    model: str = ""

    def __post_init__(self) -> None:
        url = expect_text("kvpager_url", self.url, empty=True) or f"unix://{default_socket_path()}"
        if not is_local(url):
            raise ConfigError(
                "kvpager_url", f"must be unix:///path, a sidecar of this machine, got {shown_url(url)}"
            )
        object.__setattr__(self, "url", url)
        expect_text("kvpager_tenant", self.tenant)
        expect_seconds("kvpager_lookup_seconds", self.lookup_seconds, above=True)
        expect_text("kvpager_model", self.model, empty=True)

    @classmethod
    def of(cls, values: Mapping[str, object] | None) -> BackendSettings:
        """From SGLang's map, whose other keys are SGLang's.

        Raises:
            ConfigError: it has a key that begins so and is none of these, or as above.
        """
        known = {field.name for field in fields(cls)}
        given: dict[str, object] = {}
        for key, value in (values or {}).items():
            if key.startswith(_PREFIX):
                name = key.removeprefix(_PREFIX)
                if name not in known:
                    names = ", ".join(f"{_PREFIX}{one}" for one in sorted(known))
                    raise ConfigError(key, f"is no setting of KVPagerHiCache, which has {names}")
                given[name] = value
        return cls(**given)  # type: ignore[arg-type]  # values are checked above
