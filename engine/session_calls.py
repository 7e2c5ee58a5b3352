"""What callers ask of conversations: where they are, to sleep, to wake, to be brought up ahead of a turn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ..kvstore.policy import Retention
from ..kvstore.session import SleepingSequence
from ..kvstore.store import TieredStore
from ..tiers.errors import RequestError
from ..tiers.settings import expect_seconds, expect_text, expect_type
from .scheduler import Scheduler
from .sequence import Sequence
from .sessions import Sessions

__all__ = ["Prefetched", "SessionCalls", "SessionInfo"]

Driving = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class SessionInfo:
    """A conversation as it is now.

    Attributes:
        name: its id.
        state: ``idle`` between two requests; ``held`` asleep until `SessionCalls.wake`; else the state of its
            request (`SequenceState`).
        tokens: whose KV was computed.
        bytes: of this KV.
        device_bytes: of these, in the device tier; shared blocks count for everybody who has them.
        host_bytes: of these, in host memory alone; None where that is a sidecar's, which does not say. What
            is in neither is in the cold tier, or is computed again.
    """

    name: str
    state: str
    tokens: int
    bytes: int
    device_bytes: int
    host_bytes: int | None


@dataclass(frozen=True)
class Prefetched:
    """What a hint set going, in blocks.

    Attributes:
        host: its leading ones that are in host memory already, or are looked for in the cold tier to be
            brought up to it.
        device: being copied to the device tier, where these were free.
    """

    host: int
    device: int


class SessionCalls:
    """The conversations of one engine. Between steps, by the thread that drives it.

    Every call raises `ClosedError` when the engine is closed, and `RequestError` for a conversation that it
    does not know, or while another thread is in a step.

    Args:
        store, scheduler, sessions: the engine's.
        driving: keeps steps away meanwhile; raises `RequestError` where one is being made.
    """

    def __init__(
        self, store: TieredStore, scheduler: Scheduler, sessions: Sessions, driving: Driving
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._sessions = sessions
        self._driving = driving

    def __len__(self) -> int:
        return len(self._names())

    def list(self) -> list[SessionInfo]:
        """All of them, those first that have a request."""
        with self._driving("sessions are listed"):
            return [self._info(name, running) for name, running in self._names().items()]

    def info(self, name: str) -> SessionInfo:
        """One of them."""
        with self._driving("a session is looked at"):
            return self._info(name, self._running(name))

    def sleep(self, name: str) -> None:
        """Have its request give up its VRAM until `wake`. Between requests there is nothing to give up, and
        nothing changes: the next one runs at once."""
        with self._driving("a session is put to sleep"):
            running = self._running(name)
            if running is not None:
                self._scheduler.hold(running)

    def wake(self, name: str) -> None:
        """Let its request go on, when there is room; where it has none, bring its blocks up (`prefetch`)."""
        with self._driving("a session is woken"):
            running = self._running(name)
            if running is None:
                self._prefetch(name, None)
            elif self._scheduler.holds(running):
                self._scheduler.let_go_on(running)

    def prefetch(self, name: str) -> Prefetched:
        """Its user is typing: bring its blocks up before the request comes.

        What the cold tier has comes up to host memory, in the background; what is in host memory is copied to
        device blocks that are free, and takes none from anybody. Called again later it finds more in host
        memory.
        """
        with self._driving("a session is prefetched"):
            return self._prefetch(name, self._running(name))

    def expect(self, name: str, seconds: float | None) -> int:
        """Its next turn will come in about so many seconds: keep its blocks for that, rather than others'.

        Args:
            seconds: None: it will not come; its blocks may go first.

        Returns:
            how many blocks this is tried for at once. While a request of it is not finished it counts from
            the end of that, too, and is thought of when somebody is to be put to sleep (`retain`).
        """
        advice = None if seconds is None else Retention(will_return=expect_seconds("seconds", seconds))
        with self._driving("a session's return is told"):
            return self._advise(name, advice)

    def retain(self, name: str, retention: Retention) -> int:
        """Advice on how long its blocks are worth keeping, and on whether its request is put to sleep.

        Args:
            retention: in place of what was told before. Of a request that is not finished `priority` makes
                its sleep dearer or cheaper beside others of the same priority, ten more twice as dear;
                `about_to_finish` says that it ends in a few tokens: it goes only where all others are about
                to finish too, until it has gone on for longer than that; `will_return` counts from its end,
                and makes its sleep dearer, too, by so much as the next turn is to come soon.

        Returns:
            as `expect`.

        Raises:
            ConfigError: it is no `Retention`.
        """
        retention = expect_type("retention", retention, Retention, "a Retention")
        with self._driving("a session is advised on"):
            return self._advise(name, retention)

    def ended(self, sequence: Sequence) -> None:
        """A request of a conversation has ended, and its KV sleeps."""
        if not sequence.returns and sequence.sleeping is not None:
            self._unwanted(sequence.sleeping)

    # Inside

    def _advise(self, name: str, retention: Retention | None) -> int:
        """What is known of a conversation, None: that it will not come again; as `expect`."""
        running = self._running(name)
        if running is not None:
            running.returns = retention is not None
            self._scheduler.advise(running, retention)
        sleeping = self._asleep(name, running)
        if sleeping is None or (running is not None and retention is None):
            return 0
        return (
            self._unwanted(sleeping) if retention is None else self._store.retain(sleeping.names, retention)
        )

    def _unwanted(self, sleeping: SleepingSequence) -> int:
        host = self._store.host
        return host.hint(sleeping.names, wanted=False) if host is not None and sleeping.names else 0

    def _names(self) -> dict[str, Sequence | None]:
        running = {one.session: one for one in self._scheduler.unfinished if one.session is not None}
        idle = {name: None for name in self._sessions.names if name not in running}
        return {**running, **idle}

    def _running(self, name: str) -> Sequence | None:
        """Its request that is not finished.

        Raises:
            RequestError: there is no such conversation.
        """
        expect_text("name", name)
        running = next((one for one in self._scheduler.unfinished if one.session == name), None)
        if running is None and self._sessions.sleeping(name) is None:
            raise RequestError(f"this engine has no session {name!r}")
        return running

    def _asleep(self, name: str, running: Sequence | None) -> SleepingSequence | None:
        """Its KV where it has no row: that of its request, or of the turn before."""
        if running is not None and running.row is not None:
            return None
        if running is not None and running.sleeping is not None:
            return running.sleeping
        return self._sessions.sleeping(name)

    def _prefetch(self, name: str, running: Sequence | None) -> Prefetched:
        sleeping = self._asleep(name, running)
        host = self._store.host
        if sleeping is None or host is None:
            return Prefetched(0, 0)
        asked = host.hint(sleeping.names, wanted=True)
        return Prefetched(asked, self._store.prefetch(sleeping))

    def _info(self, name: str, running: Sequence | None) -> SessionInfo:
        layout = self._store.layout
        state = "idle"
        if running is not None:
            state = "held" if self._scheduler.holds(running) else running.state.value
        if running is not None and running.row is not None:
            tokens = int(self._store.lengths[running.row])
            far = self._store.far_blocks(running.row)
            near = layout.blocks_for(tokens) - far
            return self._counted(name, state, tokens, near, far)
        sleeping = self._asleep(name, running)
        if sleeping is None:
            return self._counted(name, state, 0, 0, 0)
        names = sleeping.names
        near = sum(one in self._store.pool.index for one in names)
        below = [one for one in names if one not in self._store.pool.index]
        resident: int | None = 0
        if below and self._store.host is not None:
            resident = self._store.host.count_resident(below)
        return self._counted(name, state, sleeping.length, near, resident)

    def _counted(self, name: str, state: str, tokens: int, near: int, far: int | None) -> SessionInfo:
        size = self._store.layout.block_bytes
        blocks = self._store.layout.blocks_for(tokens)
        return SessionInfo(
            name, state, tokens, blocks * size, near * size, None if far is None else far * size
        )
