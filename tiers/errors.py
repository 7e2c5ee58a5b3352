"""Every error that kvpager raises on purpose, in one tree.

::

    KVPagerError
    ├── ConfigError            a setting has a wrong value; the message names the setting
    ├── LayoutError            bytes of one KV layout meant for another
    ├── CapacityError          a tier has no room for what was asked
    │   └── QuotaError                 there is room, but not within the tenant's quota
    ├── MemoryUnavailableError memory for an arena is not to be had on this machine
    ├── StaleHandleError       a slot was granted again since the handle was made
    ├── ClosedError            used after close()
    ├── IntegrityError         check_integrity() found a broken invariant
    ├── ColdTierError          the cold tier did not do what was asked
    │   ├── ColdTierUnavailableError   it cannot be reached, or not in time
    │   ├── ColdTierFullError          it has no room
    │   └── RecordError                a stored record does not verify
    ├── ServiceError           the sidecar did not do what was asked
    │   ├── ServiceUnavailableError    it cannot be reached, or did not answer in time
    │   ├── AccessDeniedError          it does not let this client in
    │   ├── CommandError               an engine behind it did not do what it was told
    │   └── ProtocolError              bytes that are no frame of the protocol, or another version's
    ├── KernelError            arguments that a kernel cannot run on
    ├── ModelError             a model that cannot be read, or is of an unknown kind
    └── RequestError           a request that the engine cannot serve

A miss is not an error: what a tier does not have, or has in a form that does not
verify, is counted and reported as absent.
"""

from __future__ import annotations

__all__ = [
    "AccessDeniedError",
    "CapacityError",
    "ClosedError",
    "ColdTierError",
    "ColdTierFullError",
    "ColdTierUnavailableError",
    "CommandError",
    "ConfigError",
    "IntegrityError",
    "KVPagerError",
    "KernelError",
    "LayoutError",
    "MemoryUnavailableError",
    "ModelError",
    "NotInPlaceError",
    "ProtocolError",
    "QuotaError",
    "RecordError",
    "RequestError",
    "ServiceError",
    "ServiceUnavailableError",
    "StaleHandleError",
    "TLSError",
]


class KVPagerError(Exception):
    """The base of every error in this tree."""


class ConfigError(KVPagerError):
    """A setting has a wrong value."""

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(f"{setting}: {problem}")
        self.setting = setting
        self.problem = problem

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        return type(self), (self.setting, self.problem)


class LayoutError(KVPagerError):
    """Bytes of one KV layout were offered where another is kept."""


class CapacityError(KVPagerError):
    """A tier has no room for what was asked."""


class QuotaError(CapacityError):
    """A tenant's quota has no room for what was asked, and nothing of the tenant's own may go for it."""


class MemoryUnavailableError(KVPagerError):
    """Memory for an arena is not to be had; the message says what to change."""


class StaleHandleError(KVPagerError):
    """A handle names a slot that was granted to somebody else since."""


class ClosedError(KVPagerError):
    """A store, tier or engine was used after it was closed."""


class IntegrityError(KVPagerError):
    """An invariant does not hold. This is a bug in kvpager, or memory was overwritten."""


class ColdTierError(KVPagerError):
    """The cold tier did not do what was asked of it."""


class ColdTierUnavailableError(ColdTierError):
    """The cold tier cannot be reached, or did not answer within the deadline."""


class ColdTierFullError(ColdTierError):
    """The cold tier has no room for another record."""


class RecordError(ColdTierError):
    """A stored record is truncated, altered, or of another version, space or key."""


class ServiceError(KVPagerError):
    """The sidecar did not do what was asked of it."""


class ServiceUnavailableError(ServiceError):
    """The sidecar cannot be reached, or did not answer within the deadline."""


class AccessDeniedError(ServiceError):
    """The sidecar does not let this client in."""


class CommandError(ServiceError):
    """No engine holds the session that a command is about, or it refused, or did not answer in time."""


class ProtocolError(ServiceError):
    """Bytes that are no frame of the wire protocol, or a version of it that is not spoken."""


class TLSError(ServiceError):
    """TLS with the sidecar did not come about: a certificate is not trusted, or one side speaks no TLS."""


class NotInPlaceError(ServiceError):
    """The sidecar was reached over TCP: its memory is not in this process, and blocks are copies."""


class KernelError(KVPagerError):
    """A kernel was given a wrong dtype, shape, device, alignment or address."""


class ModelError(KVPagerError):
    """A model cannot be read, or its architecture is not one the engine runs."""


class RequestError(KVPagerError):
    """A request that the engine cannot serve: too long, empty, or contradictory."""
