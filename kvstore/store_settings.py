"""What of a host store can be set while it serves, checked whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from ..tiers.settings import expect_number, expect_seconds
from .policy import DEFAULT_POLICY, EvictionPolicy, Losses, check_weights, make_policy
from .tenants import ANY_OTHER, check_quotas

__all__ = ["RETENTION_TTL", "StoreSettings"]

RETENTION_TTL: Final = 600.0
"""Seconds that advice on how long to keep blocks holds, where nobody says otherwise."""


@dataclass(frozen=True)
class StoreSettings:
    """Settings of a host store.

    Args:
        policy: name of the eviction policy (`kvstore.policy.policy_names`).
        clean_ahead: share of host memory that is kept copied to the cold tier ahead of eviction.
        cold_deadline: seconds that one background read or write of the cold tier may take.
        quotas: bytes that the blocks of each tenant may take; ``*``: of each that is not named. None or
            empty: all there are.
        policy_weights: those of the policy's weights that are other than its own, by name. None: none are.
        retention_ttl: seconds that advice on how long to keep blocks holds, where it does not say that.

    Raises:
        ConfigError: a value is of a wrong type or out of range.
    """

    policy: str = DEFAULT_POLICY
    clean_ahead: float = 0.25
    cold_deadline: float = 5.0
    quotas: Mapping[str, int] | None = field(default_factory=dict)
    policy_weights: Mapping[str, float] | None = field(default_factory=dict)
    retention_ttl: float = RETENTION_TTL

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "clean_ahead": expect_number("clean_ahead", self.clean_ahead, 0.0, 1.0),
            "cold_deadline": expect_seconds("cold_deadline", self.cold_deadline, above=True),
            "quotas": check_quotas("quotas", self.quotas),
            "policy_weights": check_weights(self.policy, self.policy_weights),
            "retention_ttl": expect_seconds("retention_ttl", self.retention_ttl, above=True),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self.make_policy()

    def make_policy(self, losses: Losses | None = None) -> EvictionPolicy:
        """One that ranks the blocks of a space by these settings.

        Args:
            losses: what losing blocks of the space costs; None: all alike.
        """
        return make_policy(self.policy, 0, losses=losses, weights=self.policy_weights)

    def quota_of(self, tenant: str) -> int | None:
        """Bytes that a tenant's blocks may take; None: all there are."""
        quotas = self.quotas or {}
        return quotas.get(tenant, quotas.get(ANY_OTHER))

    def differences(self, other: StoreSettings) -> dict[str, tuple[Any, Any]]:
        """What is set in another way in the other: here, and there."""
        pairs = {one.name: (getattr(self, one.name), getattr(other, one.name)) for one in fields(self)}
        return {name: (before, after) for name, (before, after) in pairs.items() if before != after}
