"""Commands as a client's program sees them, and the requests of operators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..kvstore.calls import EngineCommand
from ..kvstore.control import CommandKind, EngineReport
from ..kvstore.hashing import HASH_BYTES
from ..tiers.errors import ConfigError, KVPagerError
from ..tiers.settings import (
    expect_byte_strings,
    expect_choice,
    expect_seconds,
    expect_text,
    expect_type,
    shown,
)
from .client_calls import Ask, expect
from .client_core import GivenCommand
from .messages import Clients, Command, CommandDone, GetClients, Report

__all__ = [
    "CommandListener",
    "CommandListeners",
    "ReceivedCommand",
    "clients_ask",
    "command_ask",
    "report_of",
]

_log = logging.getLogger(__name__)

CommandListener = Callable[[EngineCommand], object]


class ReceivedCommand:
    """A command to this engine, to be answered once by `done` or `refuse`, from any thread, soon.

    Args:
        given: what came.
        answer: sends the answer: how many, and what was wrong, if something was.

    Attributes:
        kind: what is to be done.
        session: the id of the session.
        hashes: of which of its blocks; none: of all.
        deadline: seconds, from when it came, that somebody waits for the answer.
    """

    def __init__(self, given: GivenCommand, answer: Callable[[GivenCommand, int, str], None]) -> None:
        self.kind = CommandKind(given.given.kind)
        self.session = given.given.session
        self.hashes: Sequence[bytes] = given.given.hashes
        self.deadline = given.given.deadline
        self._given = given
        self._answer: Callable[[GivenCommand, int, str], None] | None = answer

    def done(self, count: int = 0) -> None:
        """It was done. Only the first answer counts."""
        self._say(count, "")

    def refuse(self, why: str) -> None:
        """It will not be done. Only the first answer counts."""
        self._say(0, expect_text("why", why))

    def _say(self, count: int, problem: str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer(self._given, count, problem)


class CommandListeners:
    """Who obeys the commands that come; without anybody they are refused.

    Args:
        answer: sends an answer.
    """

    def __init__(self, answer: Callable[[GivenCommand, int, str], None]) -> None:
        self._answer = answer
        self._listener: CommandListener | None = None

    def listen(self, listener: CommandListener) -> Callable[[], None]:
        """Call this with every command from now on, and nobody else; returns how to end it.

        Raises:
            ConfigError: it cannot be called.
        """
        if not callable(listener):
            raise ConfigError("listener", f"must be a function of a command, got {shown(listener)}")
        self._listener = listener

        def end() -> None:
            if self._listener is listener:
                self._listener = None

        return end

    def tell(self, commands: Sequence[GivenCommand]) -> None:
        """Commands came."""
        for given in commands:
            try:
                command = ReceivedCommand(given, self._answer)
            except ValueError:  # a newer sidecar's
                self._answer(given, 0, f"this client knows no command {given.given.kind}")
                continue
            if self._listener is None:
                command.refuse("the client does not take commands")
                continue
            try:
                self._listener(command)
            except KVPagerError as error:
                command.refuse(str(error) or type(error).__name__)
            except Exception:  # noqa: BLE001  a listener's fault must not stop the connection
                _log.exception("a listener of commands failed on %s", command.kind)
                command.refuse("a fault of the engine, which its log tells of")


def report_of(report: EngineReport) -> Report:
    """The message that says how an engine is.

    Raises:
        ConfigError: it is no report.
    """
    report = expect_type("report", report, EngineReport, "an EngineReport")
    return Report(
        dict(report.sessions),
        report.block_bytes,
        report.device_blocks,
        report.device_held,
        report.to_device,
        report.from_device,
        report.space,
        {} if report.costs is None else report.costs.as_map(),
        dict(report.counts),
    )


def clients_ask() -> Ask[dict[str, Any]]:
    """The request for who is connected."""
    return Ask(None, lambda _: GetClients(), lambda reply: expect(reply, Clients).values, dict, required=True)


def command_ask(kind: str, session: str, hashes: Sequence[bytes], deadline: float) -> Ask[int]:
    """The request that an engine do something with a session."""
    kind = expect_choice("kind", kind, tuple(one.value for one in CommandKind))
    session, seconds = expect_text("session", session), expect_seconds("deadline", deadline)
    names = tuple(expect_byte_strings("hashes", hashes, HASH_BYTES))
    return Ask(
        None,
        lambda _: Command(kind, session, names, seconds),
        lambda reply: expect(reply, CommandDone).count,
        lambda: 0,
        seconds,
        required=True,
    )
