"""Conversations between two requests: this engine's own, and those that the cold tier has a record of.

Records are looked for in threads of their own, so that a cold tier that is slow to answer keeps nobody
waiting but the conversation that is looked for.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..kvstore.session import SessionRecord, SleepingSequence
from ..kvstore.store import TieredStore
from ..tiers.cold import ColdTier, is_open
from ..tiers.errors import ClosedError, RecordError

__all__ = ["SessionLookup", "Sessions"]

_log = logging.getLogger(__name__)

_LOOKUPS: Final = 4
"""Threads that ask the cold tier."""
_CHECK_SECONDS: Final = 1.0


class SessionLookup:
    """The length at which a conversation slept, on its way from the cold tier.

    Args:
        found: its record, or None where there is none.
        tokens: int32, the prompt that may go on from there.
        seconds: how long it is worth waiting.
    """

    def __init__(
        self, found: Future[SessionRecord | None], tokens: npt.NDArray[np.int32], seconds: float
    ) -> None:
        self._found = found
        self._tokens = tokens
        self._until = time.monotonic() + seconds

    def done(self) -> bool:
        """Whether waiting is over: it is there, or no longer worth it."""
        return self._found.done() or time.monotonic() >= self._until

    def wait(self, seconds: float) -> None:
        """Wait until it is there, `seconds` at most."""
        wait([self._found], timeout=seconds)

    def slept_at(self) -> int | None:
        """The length; None where the prompt does not go on from there, or nothing came in time.

        Raises:
            Exception: what the lookup failed with.
        """
        if self._found.cancel() or not self._found.done():
            return None
        record = self._found.result()
        return None if record is None else _common_length(record.tokens, record.length, self._tokens)

    def end(self) -> None:
        """Nobody waits for it any more."""
        self._found.cancel()


@dataclass(frozen=True)
class _Session:
    """A conversation that is between two requests."""

    tokens: npt.NDArray[np.int32]
    sleeping: SleepingSequence


class Sessions:
    """The conversations of one engine.

    Args:
        store: where their KV sleeps.
        cold: the engine's own cold tier, or None.
        lookup_seconds: how long a request waits for a record.
        has_cold: whether there may be a cold tier that keeps records of them: its own, or a sidecar's.
    """

    def __init__(
        self, store: TieredStore, cold: ColdTier | None, lookup_seconds: float, *, has_cold: bool
    ) -> None:
        self._store = store
        self._cold = cold
        self._has_cold = has_cold
        self._seconds = lookup_seconds
        self._known: dict[str, _Session] = {}
        self._lookups = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="kvpager-session")
        self._check_at = 0.0
        self._told_closed = False

    def keep(self, name: str, tokens: npt.NDArray[np.int32], sleeping: SleepingSequence) -> None:
        """A request of this conversation is over; its KV sleeps."""
        self._known[name] = _Session(tokens, sleeping)

    def look_up(
        self, name: str, tokens: npt.NDArray[np.int32], root: bytes
    ) -> tuple[int | None, SessionLookup | None]:
        """The length at which a conversation slept, if `tokens` go on from there; or how to learn it."""
        session = self._known.get(name)
        if session is not None:
            return _common_length(session.tokens, session.sleeping.length, tokens), None
        if not self._has_cold or self._told_closed:
            return None, None
        found = self._lookups.submit(self._find, name, root)
        return None, SessionLookup(found, tokens, self._seconds)

    def tokens(self, name: str) -> npt.NDArray[np.int32] | None:
        """int32, a conversation's tokens so far: from this engine, or from the cold tier; or None."""
        session = self._known.get(name)
        if session is not None:
            return session.tokens
        record = self._find(name, self._store.root)
        return record.tokens if record is not None else None

    @property
    def names(self) -> tuple[str, ...]:
        """The conversations of this engine, between two requests."""
        return tuple(self._known)

    def sleeping(self, name: str) -> SleepingSequence | None:
        """The KV of a conversation of this engine between two requests; None where it is not known."""
        session = self._known.get(name)
        return None if session is None else session.sleeping

    def end(self, name: str) -> bool:
        """Forget a conversation; False if it was not known."""
        return self._known.pop(name, None) is not None

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()

    def save(self) -> int:
        """Keep in the cold tier what another process needs to go on with each; returns how many were kept.

        Raises:
            ClosedError: the cold tier was closed.
        """
        return sum(
            self._store.save_session(name, session.sleeping, session.tokens)
            for name, session in self._known.items()
        )

    def check_cold(self) -> None:
        """Look now and then, in the background, whether the cold tier was closed; say so if it was."""
        now = time.monotonic()
        if self._cold is not None and not self._told_closed and now >= self._check_at:
            self._check_at = now + _CHECK_SECONDS
            self._lookups.submit(self._tell_if_closed, self._cold)

    def close(self) -> None:
        """Wait for what is being looked for; no more is."""
        self._lookups.shutdown(cancel_futures=True)

    # In a thread of its own

    def _find(self, name: str, root: bytes) -> SessionRecord | None:
        """A session's record in the cold tier; one that cannot be read is as good as none."""
        try:
            return self._store.find_session(name, root=root)
        except RecordError as error:
            _log.warning("session %r begins anew: %s", name, error)
        except ClosedError:
            self._tell_closed()
        return None

    def _tell_if_closed(self, cold: ColdTier) -> None:
        if not is_open(cold):
            self._tell_closed()

    def _tell_closed(self) -> None:
        if not self._told_closed:
            self._told_closed = True
            # Without a cold tier of its own it has that of a connection, or of a store that others closed.
            what = "connection or host store" if self._cold is None else "cold tier"
            _log.warning("the %s was closed under its engine: nothing more is found or kept there", what)


def _common_length(known: npt.NDArray[np.int32], length: int, tokens: npt.NDArray[np.int32]) -> int | None:
    """The length of what slept, if `tokens` begin with it."""
    return length if np.array_equal(tokens[:length], known[:length]) else None
