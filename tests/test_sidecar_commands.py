"""Reports of engines and commands to them through a sidecar: who is asked, and what if nobody answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvpager.api.client import connect
from kvpager.api.client_async import connect_async
from kvpager.api.messages import (
    Clients,
    Command,
    CommandDone,
    CommandGiven,
    Done,
    GetClients,
    Report,
)
from kvpager.api.remote_access import RemoteAccess
from kvpager.api.wire import Failure, Notice, Reply
from kvpager.kvstore.calls import ControlCalls, EngineCommand
from kvpager.kvstore.control import CommandKind, EngineReport
from kvpager.kvstore.host import HostStore
from kvpager.tests.raw_client import LAYOUT, RawClient, Running, await_true, names, store
from kvpager.tests.serve_process import ServeProcess
from kvpager.tiers.errors import (
    AccessDeniedError,
    CommandError,
    ConfigError,
    RequestError,
    ServiceUnavailableError,
)

ALL, ANNA = "token of all....", "token of anna..."
REPORT = Report({"chat": "decoding"}, 4096, 100, 70, 1.5e9, 2.0)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    remote = RemoteAccess("127.0.0.1", 0, {ALL: None, ANNA: frozenset({"anna"})})
    with (
        HostStore(1 << 20, extent_bytes=1 << 16) as host,
        Running(tmp_path / "socket", host, remote=remote) as made,
    ):
        yield made


@pytest.fixture
def engine(running: Running) -> Iterator[RawClient]:
    with RawClient(running.path, group=b"e" * 16) as made:
        assert made.call(REPORT) == Done()
        yield made


@pytest.fixture
def operator(running: Running) -> Iterator[RawClient]:
    with RawClient(running.path, group=b"o" * 16) as made:
        yield made


def given(engine: RawClient) -> CommandGiven:
    frame = engine.receive()
    assert isinstance(frame, Notice)
    assert isinstance(frame.message, CommandGiven)
    return frame.message


def test_operators_see_who_is_connected_and_the_last_report(engine: RawClient, operator: RawClient) -> None:
    space = engine.open()
    store(engine, space, 0, 2)
    engine.call(Report({"chat": "asleep", "other": "idle"}, 4096, 100, 0, 0.0, 0.0), Done)
    listed = operator.call(GetClients(), Clients).values
    assert len(listed) == 2
    (one,) = [one for one in listed.values() if "report" in one]
    assert one["name"].startswith("test (pid ")
    assert (one["remote"], one["group"], one["leased"], one["reserved"]) == (False, (b"e" * 16).hex(), 0, 0)
    assert one["report"]["sessions"] == {"chat": "asleep", "other": "idle"}
    assert one["report"]["age"] >= 0
    engine.close()
    await_true(lambda: len(operator.call(GetClients(), Clients).values) == 1)


def test_a_report_that_is_none_is_refused(operator: RawClient) -> None:
    for wrong in (
        Report({"chat": 1}, 1, 1, 1, 0.0, 0.0),
        Report({"c" * 300: "idle"}, 1, 1, 1, 0.0, 0.0),
        Report({str(at): "idle" for at in range(4097)}, 1, 1, 1, 0.0, 0.0),
        Report({}, 1, -1, 1, 0.0, 0.0),
        Report({}, 1, 1, 1, float("nan"), 0.0),
    ):
        with pytest.raises(ConfigError):
            operator.call(wrong)
    assert not [one for one in operator.call(GetClients()).values.values() if "report" in one]


def test_a_command_goes_to_who_holds_the_session_and_its_answer_back(
    engine: RawClient, operator: RawClient
) -> None:
    asked = operator.send(Command("promote", "chat", names(0, 2), 20.0))
    told = given(engine)
    assert (told.kind, told.session, told.hashes, told.deadline) == ("promote", "chat", names(0, 2), 20.0)
    assert engine.call(CommandDone(told.command, 7, "")) == Done()
    answer = operator.receive()
    assert isinstance(answer, Reply)
    assert (answer.id, answer.message) == (asked, CommandDone(told.command, 7, ""))
    operator.send(Command("sleep", "chat", (), 20.0))
    engine.call(CommandDone(given(engine).command, 0, "not now"), Done)
    refused = operator.receive()
    assert isinstance(refused, Failure)
    assert isinstance(refused.error, CommandError)
    assert str(refused.error) == "not now"


def test_who_asks_for_what_nobody_holds_is_told(engine: RawClient, operator: RawClient) -> None:
    with pytest.raises(CommandError, match="no engine that is connected has reported session 'nobody'"):
        operator.call(Command("wake", "nobody", (), 5.0))
    with pytest.raises(ConfigError, match="kind: "):
        operator.call(Command("dance", "chat", (), 5.0))
    engine.call(Report({}, 1, 1, 1, 0.0, 0.0), Done)
    with pytest.raises(CommandError, match="'chat'"):
        operator.call(Command("wake", "chat", (), 5.0))


def test_an_engine_that_does_not_answer_or_goes_away_is_waited_for_no_longer(
    engine: RawClient, operator: RawClient
) -> None:
    with pytest.raises(CommandError, match=r"test \(pid \d+\) did not answer within 0.05 seconds"):
        operator.call(Command("wake", "chat", (), 0.05))
    late = given(engine)
    operator.send(Command("wake", "chat", (), 60.0))
    assert given(engine).command != late.command
    engine.call(CommandDone(late.command, 1, ""), Done)  # nobody waits for it
    engine.close()
    gone = operator.receive()
    assert isinstance(gone, Failure)
    assert isinstance(gone.error, CommandError)
    assert "went away" in str(gone.error)


def test_nobody_answers_the_commands_of_another(
    running: Running, engine: RawClient, operator: RawClient
) -> None:
    asked = operator.send(Command("wake", "chat", (), 20.0))
    told = given(engine)
    with RawClient(running.path, group=b"x" * 16) as other:
        other.call(CommandDone(told.command, 99, ""), Done)
    engine.call(CommandDone(told.command, 1, ""), Done)
    answer = operator.receive()
    assert isinstance(answer, Reply)
    assert (answer.id, answer.message) == (asked, CommandDone(told.command, 1, ""))


def test_the_one_that_reported_last_is_asked(
    running: Running, engine: RawClient, operator: RawClient
) -> None:
    with RawClient(running.path, group=b"n" * 16) as newer:
        newer.call(REPORT, Done)
        operator.send(Command("wake", "chat", (), 20.0))
        newer.call(CommandDone(given(newer).command, 3, ""), Done)
        answer = operator.receive()
        assert isinstance(answer, Reply)
        assert isinstance(answer.message, CommandDone)
        assert answer.message.count == 3


def test_tokens_of_tenants_are_not_operators(running: Running, engine: RawClient) -> None:
    with RawClient(running.port, token=ANNA) as bound:
        for asked in (GetClients(), Command("wake", "chat", (), 5.0)):
            with pytest.raises(AccessDeniedError, match="operators"):
                bound.call(asked)
        assert bound.call(REPORT) == Done()
    with RawClient(running.port, token=ALL) as free:
        assert len(free.call(GetClients(), Clients).values) == 2


def test_a_sidecar_that_stops_lets_nobody_wait(
    running: Running, engine: RawClient, operator: RawClient
) -> None:
    operator.send(Command("wake", "chat", (), 60.0))
    given(engine)
    running.stop()
    try:
        last = operator.receive()
    except (EOFError, ConnectionResetError):
        return
    assert isinstance(last, Failure)
    assert isinstance(last.error, CommandError | ServiceUnavailableError)


# The client library


def test_an_engine_answers_from_any_thread(running: Running) -> None:
    with connect(str(running.path), name="engine 1") as engine, connect(str(running.path)) as operator:
        assert isinstance(engine, ControlCalls)
        came: list[EngineCommand] = []

        def obey(command: EngineCommand) -> None:
            came.append(command)
            if command.kind is CommandKind.SLEEP:
                raise RequestError("it runs")
            if command.kind is CommandKind.WAKE:
                raise ValueError("broken")

            def later() -> None:
                command.done(len(command.hashes))
                command.refuse("only the first answer counts")

            threading.Thread(target=later).start()

        engine.report(EngineReport({"chat": "idle"}, 4096, 10, 0))
        await_true(lambda: any("report" in one for one in operator.clients().values()))
        with pytest.raises(CommandError, match="the client does not take commands"):
            operator.command("promote", "chat")
        end = engine.on_command(obey)
        assert operator.command("promote", "chat", hashes=names(0, 3)) == 3
        with pytest.raises(CommandError, match="it runs"):
            operator.command("sleep", "chat")
        with pytest.raises(CommandError, match="a fault of the engine"):
            operator.command("wake", "chat")
        end()
        with pytest.raises(CommandError, match="does not take commands"):
            operator.command("promote", "chat")
        assert [command.session for command in came] == ["chat"] * 3
        for wrong in (("dance", "chat"), ("wake", "")):
            with pytest.raises(ConfigError):
                operator.command(*wrong)
        with pytest.raises(ConfigError, match="report: "):
            engine.report({"chat": "idle"})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="listener: "):
            engine.on_command(None)  # type: ignore[arg-type]


def test_asyncio_reports_and_obeys_too(running: Running) -> None:
    async def work() -> None:
        async with (
            await connect_async(str(running.path)) as engine,
            await connect_async(str(running.path)) as operator,
        ):
            engine.report(EngineReport({"chat": "idle"}))
            end = engine.on_command(lambda command: command.done(5))
            while not any("report" in one for one in (await operator.clients()).values()):
                await asyncio.sleep(0.01)
            assert await operator.command("promote", "chat") == 5
            end()
            with pytest.raises(CommandError):
                await operator.command("promote", "chat")

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_report_is_said_again_to_the_next_sidecar(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "socket") as serve, connect(str(serve.path), name="engine") as engine:
        engine.space(LAYOUT)
        engine.report(EngineReport({"chat": "idle"}, device_blocks=7))
        engine.on_command(lambda command: command.done(1))
        serve.kill()
        serve.start()
        with connect(str(serve.path)) as operator:
            await_true(lambda: any("report" in one for one in operator.clients().values()))
            (report,) = [one["report"] for one in operator.clients().values() if "report" in one]
            assert report["device_blocks"] == 7
            assert operator.command("wake", "chat") == 1
