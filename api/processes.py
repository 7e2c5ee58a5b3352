"""Work in a process of its own that ends with this one, and signals that let a command clean up."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any, Final

from ..tiers.errors import KVPagerError

__all__ = ["Interruptions"]

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAFE_PATH: Final = "PYTHONSAFEPATH"


class Interruptions:
    """Lets SIGTERM and SIGHUP end a command as Ctrl-C does, by KeyboardInterrupt: what it made is removed.

    While a process is being started the interrupt is put off: a half started one would be left behind, and
    complain. To be made and used in the main thread, by ``with``.
    """

    def __init__(self) -> None:
        self._held = False
        self._came = False

    def __enter__(self) -> Interruptions:
        # What is ignored stays so: a command in the background, or under nohup.
        heard = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._held:
            raise KeyboardInterrupt
        self._came = True

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """What comes meanwhile interrupts at the end."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._came:
            raise KeyboardInterrupt

    def run_apart(self, work: Callable[..., Any], *arguments: object) -> Any:
        """Run `work` in a fresh process and return what it returns; its errors are raised here.

        Raises:
            KVPagerError: the process ended without a word.
        """
        return self.run_all_apart(work, [arguments])[0]

    def run_all_apart(
        self, work: Callable[..., Any], calls: Sequence[tuple[object, ...]], *shared: object
    ) -> list[Any]:
        """Run `work` in several fresh processes at once, and return what each returns.

        Args:
            calls: the arguments of each.
            shared: what follows them in all processes, and can only be had from birth, as shared memory. Not
                for data: it is handed over where nothing can interrupt.

        Raises:
            KVPagerError: a process ended without a word.
        """
        # Threads that spin while they wait would take the time of the ones that compute, on a shared machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        with ExitStack() as ending:
            # Where this process is asked to end, the others must not compute on.
            with _safe_path():
                # Its first start lets SIGINT through again, which is not wanted below.
                resource_tracker.ensure_running()
                started = [self._start(shared, ending) for _ in calls]
            for (connection, _), arguments in zip(started, calls, strict=True):
                _hand_over(connection, work, arguments)
            return [_result(work, connection, process) for connection, process in started]

    def _start(self, shared: tuple[object, ...], ending: ExitStack) -> tuple[Connection, SpawnProcess]:
        """A process that waits for its work at the other end of the connection.

        The work does not go with its start: that writes to a pipe whose reading end is open here as well, and
        would wait for ever for a process that is gone.
        """
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        ending.callback(connection.close)
        process = context.Process(target=_do_work, args=(theirs, *shared), daemon=True)
        with theirs, self.put_off(), _deaf_to_ctrl_c():
            ending.callback(_end, process)
            process.start()
        return connection, process


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """A process that is started in here is deaf to Ctrl-C, which reaches every process of the terminal.

    Its parent hears it, and ends it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _safe_path() -> Iterator[None]:
    """A process that is started in here imports nothing from the current folder before it has our path."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def _hand_over(connection: Connection, work: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    # Of a process that is gone its result tells.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.send((work, arguments))


def _result(work: Callable[..., Any], connection: Connection, process: SpawnProcess) -> Any:
    try:
        result = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        raise KVPagerError(
            f"the process of {work.__name__} ended without a word, exit code {process.exitcode}"
        ) from None
    if isinstance(result, BaseException):
        raise result
    return result


def _end(process: SpawnProcess) -> None:
    if process.pid is not None:
        process.kill()
        process.join()


def _end_with_parent() -> None:
    """Nobody waits for what a process computes whose parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do_work(connection: Connection, *shared: object) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with connection:
        try:
            given = connection.recv_bytes()
        except (EOFError, OSError):
            return  # who has the work is gone
        work, arguments = pickle.loads(given)
        try:
            connection.send(work(*arguments, *shared))
        except KVPagerError as error:
            connection.send(error)
