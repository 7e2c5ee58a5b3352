"""Work in a process of its own that ends with this one, and signals that let a command clean up."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Final

from ..tiers.errors import KVPagerError

__all__ = ["Interruptions"]

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
        # Threads that spin while they wait would take the time of the ones that compute, on a shared machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send_result, args=(sender, work, arguments), daemon=True)
        # Its first start lets SIGINT through again, which is not wanted below.
        resource_tracker.ensure_running()
        try:
            with self.put_off(), _deaf_to_ctrl_c():
                process.start()
            sender.close()
            result = receiver.recv()
        except EOFError:
            process.join()
            raise KVPagerError(
                f"the process of {work.__name__} ended without a word, exit code {process.exitcode}"
            ) from None
        finally:
            # Where this process is asked to end, the other must not compute on.
            if process.pid is not None:
                process.kill()
                process.join()
            receiver.close()
        if isinstance(result, BaseException):
            raise result
        return result


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


def _send_result(sender: Connection, work: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    try:
        sender.send(work(*arguments))
    except KVPagerError as error:
        sender.send(error)
    finally:
        sender.close()
