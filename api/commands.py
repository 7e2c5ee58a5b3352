"""The channel between operators and engines: reports come in, commands go out, answers go back.

Used on the sidecar's loop, but for the futures of commands, which threads wait for.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Protocol

from ..kvstore.control import ENGINE_COUNTS, CommandKind, EngineReport
from ..kvstore.cost import CostModel
from ..tiers.errors import CommandError, ConfigError
from ..tiers.settings import expect_choice, expect_text
from .messages import Command, CommandDone, CommandGiven, Report

__all__ = ["Engine", "Engines"]

_MOST_GIVEN: Final = 64
"""Commands that one engine has not answered."""
_NOT_LISTED: Final = ("space", "costs", "counts")
"""Of a report: what is told of spaces and of all engines together."""
_MOST_REASON: Final = 1024
_ID_BITS: Final = 48
"""Of the first client's id: ids stay below 2^53, which every JSON reader takes as they are."""


class Engine(Protocol):
    """A client's connection, as far as commands need it."""

    def send_notice(self, message: CommandGiven) -> None:
        """Send it; where it cannot be sent, the connection is about to end."""
        ...

    def finish(self) -> None:
        """End the connection once the client has read its replies, or does not in a while."""
        ...


@dataclass(frozen=True)
class _Given:
    """A command that was handed to an engine.

    Args:
        answer: is set when it answers.
        until: when nobody waits for that any more, by `time.monotonic`.
    """

    answer: Future[CommandDone]
    until: float


@dataclass
class _Known:
    """What is known of a connected client.

    Attributes:
        id: what operators call it, for as long as it is connected; nobody else's before or after.
        name: what an operator knows it by.
        about: further facts for operators, as of now.
        report: the last one, and
        at: when that came; None where none did.
        given: commands that it has not answered.
    """

    id: int
    name: Callable[[], str]
    about: Callable[[], dict[str, Any]]
    report: Report | None = None
    at: float = 0.0
    given: dict[int, _Given] = field(default_factory=dict)


class Engines:
    """The clients of a sidecar, as operators see them."""

    def __init__(self) -> None:
        self._known: dict[Engine, _Known] = {}
        # From a number that nobody guesses, so that an id of an earlier sidecar is nobody's here.
        self.counts = dict.fromkeys(ENGINE_COUNTS, 0)
        """What all of them counted since their first reports, those included that have gone."""
        self._ids = count(secrets.randbits(_ID_BITS))
        self._numbers = count(1)

    def come(self, engine: Engine, name: Callable[[], str], about: Callable[[], dict[str, Any]]) -> None:
        """A client is there."""
        self._known[engine] = _Known(next(self._ids), name, about)

    def go(self, engine: Engine) -> None:
        """It is gone, its report with it, and what it was asked fails."""
        known = self._known.pop(engine, None)
        for given in known.given.values() if known is not None else ():
            given.answer.set_exception(CommandError("the engine went away before it answered"))

    def keep(self, engine: Engine, report: Report) -> None:
        """Its last report.

        Raises:
            ConfigError: a value is out of range.
        """
        EngineReport(
            report.sessions,
            report.block_bytes,
            report.device_blocks,
            report.device_held,
            report.to_device,
            report.from_device,
            report.space,
            CostModel.of_map(report.costs) if report.costs else None,
            report.counts,
        )
        known = self._known[engine]
        if known.report is not None:
            # What it had counted before its first report may have been told on an earlier connection.
            for name in ENGINE_COUNTS:
                self.counts[name] += max(0, report.counts.get(name, 0) - known.report.counts.get(name, 0))
        known.report, known.at = report, time.monotonic()

    def listed(self) -> dict[str, Any]:
        """All clients, by their ids, for operators."""
        now = time.monotonic()
        found: dict[str, Any] = {}
        for known in self._known.values():
            one: dict[str, Any] = {"id": known.id, "name": known.name(), **known.about()}
            if known.report is not None:
                told = {**vars(known.report), "age": now - known.at}
                one["report"] = {name: value for name, value in told.items() if name not in _NOT_LISTED}
            found[str(known.id)] = one
        return found

    def find(self, client: int) -> Engine:
        """The client of an id.

        Raises:
            ConfigError: none that is connected has it.
        """
        for engine, known in self._known.items():
            if known.id == client:
                return engine
        raise ConfigError("client", f"no client that is connected has the id {client}")

    def give(self, asked: Command, seconds: float) -> Callable[[], CommandDone]:
        """Hand a command to the engine that holds the session; returns what waits for its answer.

        Of several that say they hold it, the one that said so last.

        Raises:
            ConfigError: there is no such kind of command, or no session is named.
            CommandError: no engine holds it, or that has too much to do.
        """
        expect_choice("kind", asked.kind, _KINDS)
        session = expect_text("session", asked.session)
        holders = [
            (known.at, engine)
            for engine, known in self._known.items()
            if known.report is not None and session in known.report.sessions
        ]
        if not holders:
            raise CommandError(f"no engine that is connected has reported session {session!r}")
        engine = max(holders, key=lambda one: one[0])[1]
        known = self._known[engine]
        name = known.name()
        now = time.monotonic()
        for late in [number for number, given in known.given.items() if given.until < now]:
            del known.given[late]
        if len(known.given) >= _MOST_GIVEN:
            raise CommandError(f"{name} has {_MOST_GIVEN} commands to answer, and is given no more")
        number = next(self._numbers)
        answer: Future[CommandDone] = Future()
        known.given[number] = _Given(answer, now + seconds)
        engine.send_notice(CommandGiven(number, asked.kind, session, asked.hashes, seconds))

        def wait() -> CommandDone:
            try:
                return answer.result(seconds)
            except FutureTimeoutError as error:
                # Whoever answers now answers to nobody.
                raise CommandError(f"{name} did not answer within {seconds:g} seconds") from error

        return wait

    def done(self, engine: Engine, answer: CommandDone) -> None:
        """An engine answers a command. One that nobody waits for any more is passed over."""
        given = self._known[engine].given.pop(answer.command, None)
        if given is None:
            return
        if answer.problem:
            given.answer.set_exception(CommandError(answer.problem[:_MOST_REASON]))
        else:
            given.answer.set_result(answer)

    def close(self) -> None:
        """Nobody will answer any more."""
        for engine in tuple(self._known):
            self.go(engine)


_KINDS: Final[Collection[str]] = tuple(kind.value for kind in CommandKind)
