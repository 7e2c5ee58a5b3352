"""What operators see of an engine on a sidecar, and what they have it do between two steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from ..kvstore.calls import ControlCalls, EngineCommand
from ..kvstore.control import ENGINE_COUNTS, MOST_SESSIONS, CommandKind, EngineReport
from ..kvstore.session import SleepingSequence
from ..kvstore.store import TieredStore
from ..tiers.errors import ClosedError, KVPagerError, RequestError
from .scheduler import Scheduler
from .sequence import Sequence
from .sessions import Sessions

__all__ = ["Control"]

_REPORT_SECONDS: Final = 0.5
_MOST_NAME: Final = 256


class Control:
    """Reports how an engine is, and obeys commands, from the thread that drives it.

    Args:
        host: takes reports, and tells of commands.
        store, scheduler, sessions: the engine's.
    """

    def __init__(
        self, host: ControlCalls, store: TieredStore, scheduler: Scheduler, sessions: Sessions
    ) -> None:
        self._host = host
        self._store = store
        self._scheduler = scheduler
        self._sessions = sessions
        self._commands: deque[EngineCommand] = deque()
        """Come, in another thread, and not obeyed yet."""
        self._report_at = 0.0
        self._moved_at = time.monotonic()
        self._moved = self._blocks_moved()
        self._end: Callable[[], None] = host.on_command(self._commands.append)

    def between_steps(self) -> None:
        """Obey what was asked since the last step, and report, if it is time."""
        while self._commands:
            self._obey(self._commands.popleft())
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + _REPORT_SECONDS
            try:
                self._host.report(self._report(now))
            except ClosedError:
                self._report_at = float("inf")  # the connection was closed under the engine

    def close(self) -> None:
        """Obey nothing any more. What was asked and not begun is refused."""
        self._end()
        while self._commands:
            self._commands.popleft().refuse("the engine is closed")

    # Inside

    def _obey(self, command: EngineCommand) -> None:
        try:
            command.done(self._do(command))
        except KVPagerError as error:
            command.refuse(str(error) or type(error).__name__)

    def _do(self, command: EngineCommand) -> int:
        """Returns how many blocks it was done to."""
        running = self._running(command.session)
        size = self._store.layout.block_size
        match command.kind:
            case CommandKind.SLEEP if running is not None:
                self._scheduler.hold(running)
                return len(self._scheduler.tokens_of(running)) // size
            case CommandKind.WAKE if running is not None and self._scheduler.holds(running):
                self._scheduler.let_go_on(running)
                return len(running.tokens) // size
            case CommandKind.PROMOTE if running is not None and running.row is not None:
                return self._store.promote(running.row, self._store.available_blocks)
            case CommandKind.SLEEP:
                self._known(command.session)
                return 0  # between two requests it has nothing of the device to itself
            case CommandKind.WAKE | CommandKind.PROMOTE:
                return self._bring_up(command, running)
        raise RequestError(f"this engine knows no command {command.kind}")

    def _bring_up(self, command: EngineCommand, running: Sequence | None) -> int:
        """Have the blocks of a session that sleeps brought up to host memory."""
        hashes = list(command.hashes)
        sleeping = running.sleeping if running is not None else self._known(command.session)
        if sleeping is not None:
            own = [*sleeping.hashes, *([] if sleeping.partial is None else [sleeping.partial])]
            wanted = set(hashes)
            hashes = [name for name in own if not hashes or name in wanted]
        host = self._store.host
        return host.hint(hashes, wanted=True) if host is not None and hashes else 0

    def _known(self, name: str) -> SleepingSequence:
        sleeping = self._sessions.sleeping(name)
        if sleeping is None:
            raise RequestError(f"this engine has no session {name!r} any more")
        return sleeping

    def _running(self, name: str) -> Sequence | None:
        """The request of a session that is not finished."""
        return next((one for one in self._scheduler.unfinished if one.session == name), None)

    def _report(self, now: float) -> EngineReport:
        sessions = dict.fromkeys(self._sessions.names, "idle")
        for sequence in self._scheduler.unfinished:
            if sequence.session is not None:
                held = self._scheduler.holds(sequence)
                sessions[sequence.session] = "held" if held else sequence.state.value
        # The newest ones, if there are more than a report may have.
        names = [name for name in sessions if len(name) <= _MOST_NAME][-MOST_SESSIONS:]
        up, down = self._blocks_moved()
        seconds = max(now - self._moved_at, 1e-3)
        before, self._moved, self._moved_at = self._moved, (up, down), now
        counts = self._store.stats.snapshot()
        pool, nbytes = self._store.pool, self._store.layout.block_bytes
        return EngineReport(
            {name: sessions[name] for name in names},
            nbytes,
            pool.capacity,
            pool.capacity - self._store.available_blocks,
            (up - before[0]) * nbytes / seconds,
            (down - before[1]) * nbytes / seconds,
            self._store.space,
            self._store.costs.model,
            {name: counts[name] for name in ENGINE_COUNTS},
        )

    def _blocks_moved(self) -> tuple[int, int]:
        """Blocks that were copied to the device, and from it, so far."""
        stats = self._store.stats
        return stats.promoted, stats.written_back
