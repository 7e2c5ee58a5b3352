"""What a user sets in ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ....tiers.errors import ConfigError
from ....tiers.settings import expect_choice, expect_seconds, expect_text, shown_url
from ...listening import default_socket_path
from ..link import is_local

__all__ = ["ConnectorSettings"]


@dataclass(frozen=True)
class ConnectorSettings:
    """Settings of the connector.

    Args:
        url: of a sidecar on this machine, ``unix:///path``; empty: where ``kvpager serve`` listens by itself.
        tenant: whose the blocks are; quotas go by it.
        lookup_seconds: how long a request waits at most to hear what the sidecar has of it, its cold tier
            included. Then it is computed.
        store: ``all`` keeps prompts and what was generated, ``prompt`` prompts alone, ``none`` nothing new.

    Raises:
        ConfigError: a value is of a wrong type or out of range, or the sidecar is not one of this machine.
    """

    url: str = ""
    tenant: str = ""
    lookup_seconds: float = 1.0
    store: str = "all"

    def __post_init__(self) -> None:
        url = expect_text("url", self.url, empty=True) or f"unix://{default_socket_path()}"
        if not is_local(url):
            raise ConfigError(
                "url",
                f"must be unix:///path, a sidecar of this machine, got {shown_url(url)}: blocks are copied "
                "in memory that vLLM and the sidecar have both mapped, which no network gives. Start "
                "`kvpager serve` on this machine, in the same container or with its socket and /dev/shm "
                "shared; machines share blocks through one Redis: `kvpager serve --cold redis://HOST:6379`",
            )
        object.__setattr__(self, "url", url)
        expect_text("tenant", self.tenant, empty=True)
        expect_seconds("lookup_seconds", self.lookup_seconds, above=True)
        expect_choice("store", self.store, ("all", "prompt", "none"))

    @classmethod
    def of(cls, values: Mapping[str, object]) -> ConnectorSettings:
        """From vLLM's ``kv_connector_extra_config``.

        Raises:
            ConfigError: it has a key that is none of these, or as above.
        """
        known = {field.name for field in fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(
                    key, f"is no setting of KVPagerConnector, which has {', '.join(sorted(known))}"
                )
        return cls(**values)  # type: ignore[arg-type]  # values are checked above
