"""Where a sidecar's cold tier comes from: its URL, and the secret that its records are sealed under."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from ..tiers.cold import ColdTier
from ..tiers.cold_url import open_cold_tier, public_url

__all__ = ["ColdSource"]


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
