"""Where a sidecar's cold tier comes from: its URL, and the secret that its records are sealed under."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from ..tiers.cold import ColdStatus, ColdTier
from ..tiers.cold_url import open_cold_tier, public_url
from ..tiers.errors import ColdTierUnavailableError, ConfigError

__all__ = ["ColdSource"]

_PING_SECONDS: Final = 5.0
_WHY_NOT: Final = {
    ColdStatus.LATE: "the cold tier there does not answer in time",
    ColdStatus.UNAVAILABLE: "the cold tier there cannot be reached, or refuses",
}


@dataclass(frozen=True)
class ColdSource:
    """What opens a sidecar's cold tiers.

    Args:
        url: of the one that there is; None: there is none.
        secret: what records are sealed under; None: they are not. Never told to anybody.
    """

    url: str | None = None
    secret: bytes | None = field(default=None, repr=False)

    def open(self, capacity_bytes: int | None) -> ColdTier | None:
        """The tier of the URL; None where there is none. See `open_cold_tier`."""
        if self.url is None:
            return None
        return open_cold_tier(self.url, capacity_bytes=capacity_bytes, secret=self.secret)

    def open_reachable(self, capacity_bytes: int | None) -> ColdTier:
        """The tier of the URL, if it answers.

        Raises:
            ConfigError: there is no URL, it or another setting is refused, or there is no answer.
        """
        try:
            cold = self.open(capacity_bytes)
        except ColdTierUnavailableError as error:
            raise ConfigError("cold.url", str(error)) from error
        if cold is None:
            raise ConfigError("cold.url", "names no cold tier")
        if (status := cold.ping(_PING_SECONDS)) is not ColdStatus.OK:
            cold.close()
            raise ConfigError("cold.url", _WHY_NOT.get(status, str(status)))
        return cold

    @property
    def name(self) -> str:
        """Names the tier and its key: what was written under another one is not found under this."""
        if self.url is None:
            return ""
        if self.secret is None:
            return self.url
        return f"{self.url} {hashlib.blake2b(self.secret, digest_size=16).hexdigest()}"

    @property
    def public_url(self) -> str:
        """The URL without what is secret in it; empty where there is none."""
        return "" if self.url is None else public_url(self.url)
