"""An engine on a sidecar: what operators see of it, and what they have it do between two steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvpager
import pytest
from kvpager.tests.raw_client import await_true
from kvpager.tests.serve_process import ServeProcess
from kvpager.tiers.errors import ClosedError, CommandError

if TYPE_CHECKING:
    from kvpager.api.client import Connection
    from kvpager.engine.control import Control
    from kvpager.engine.llm import LLM
    from kvpager.engine.sequence import Sequence
    from kvpager.tests.engine_cases import Case


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[ServeProcess]:
    with ServeProcess(tmp_path / "socket", host_bytes=64 << 20) as process:
        yield process


@pytest.fixture
def operator(serving: ServeProcess) -> Iterator[Connection]:
    with kvpager.connect(serving.path, name="operator", timeout=20.0) as connection:
        yield connection


@contextmanager
def attached(serving: ServeProcess, llama: Case) -> Iterator[Connection]:
    """A connection for an engine where the model is."""
    with kvpager.connect(serving.path, name="engine", timeout=20.0) as client:
        if llama.device != "cpu":
            client.map_device(llama.device)
        yield client


@pytest.fixture
def llm(serving: ServeProcess, llama: Case) -> Iterator[LLM]:
    from kvpager.engine.llm import LLM

    with (
        attached(serving, llama) as client,
        LLM(llama.loaded, device=llama.device, block_size=8, device_blocks=160, host=client) as engine,
    ):
        yield engine
        if not engine.closed:
            engine.store.check_integrity()


class Asked(threading.Thread):
    """A command, while the engine goes on stepping."""

    def __init__(self, operator: Connection, kind: str, session: str) -> None:
        super().__init__()
        self._operator, self._kind, self._session = operator, kind, session
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._operator.command(self._kind, self._session, deadline=20.0)
        except CommandError as error:
            self.result = error

    def stepping(self, llm: LLM) -> Any:
        """Step until it is answered; the answer."""
        while self.is_alive():
            llm.step()
        return self.result


def control(llm: LLM) -> Control:
    assert llm._control is not None
    return llm._control


def report_of(operator: Connection) -> dict[str, Any]:
    found = [one["report"] for one in operator.clients().values() if "report" in one]
    return found[0] if found else {}


def begin(llm: LLM, llama: Case, operator: Connection, **params: Any) -> Sequence:
    """A request of a session that has begun to decode, and of which the sidecar knows."""
    from kvpager.engine import SamplingParams
    from kvpager.engine.sequence import SequenceState

    settings = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **params}
    sequence = llm.submit(llama.prompts[5], SamplingParams(**settings), session="chat")
    while sequence.state is not SequenceState.DECODING:
        llm.step()
    control(llm)._report_at = 0.0  # as if half a second had passed
    llm.step()
    await_true(lambda: report_of(operator).get("sessions") == {"chat": "decoding"})
    return sequence


def test_an_engine_reports_by_itself(llm: LLM, llama: Case, operator: Connection) -> None:
    begin(llm, llama, operator)
    report = report_of(operator)
    assert report["block_bytes"] == llm.layout.block_bytes
    assert report["device_blocks"] == 160
    assert 0 < report["device_held"] <= 160


def test_a_session_sleeps_until_it_is_woken_and_answers_as_ever(
    llm: LLM, llama: Case, operator: Connection
) -> None:
    (truth,) = llm.generate([llama.prompts[5]], begin_params())
    sequence = begin(llm, llama, operator)
    blocks = Asked(operator, "sleep", "chat").stepping(llm)
    assert blocks > 0
    assert state_of(sequence) == "asleep"
    assert llm.scheduler.num_running == 0
    for _ in range(3):
        assert llm.step() == []
    assert state_of(sequence) == "asleep"
    control(llm)._report_at = 0.0
    llm.step()
    await_true(lambda: report_of(operator).get("sessions") == {"chat": "held"})
    assert report_of(operator)["device_held"] == 0
    assert Asked(operator, "promote", "chat").stepping(llm) >= blocks
    assert Asked(operator, "wake", "chat").stepping(llm) > 0
    while state_of(sequence) != "finished":
        llm.step()
    assert llm.completion(sequence).token_ids == truth.token_ids
    # Between two requests it has nothing of the device to itself; its blocks may be brought up.
    assert Asked(operator, "sleep", "chat").stepping(llm) == 0
    assert Asked(operator, "promote", "chat").stepping(llm) > 0


def test_a_session_that_is_held_may_be_given_up(llm: LLM, llama: Case, operator: Connection) -> None:
    sequence = begin(llm, llama, operator)
    assert Asked(operator, "sleep", "chat").stepping(llm) > 0
    assert Asked(operator, "sleep", "chat").stepping(llm) > 0
    llm.abort(sequence)
    assert len(llm.scheduler) == 0


def test_an_engine_refuses_what_it_cannot_do(llm: LLM, llama: Case, operator: Connection) -> None:
    sequence = begin(llm, llama, operator)
    llm.abort(sequence)
    assert llm.end_session("chat")
    answer = Asked(operator, "sleep", "chat").stepping(llm)
    assert isinstance(answer, CommandError)
    assert "no session 'chat' any more" in str(answer)


def test_an_engine_that_is_closed_refuses(llm: LLM, llama: Case, operator: Connection) -> None:
    begin(llm, llama, operator)
    asked = Asked(operator, "sleep", "chat")
    await_true(lambda: len(control(llm)._commands) == 1)
    llm.close()
    asked.join()
    assert isinstance(asked.result, CommandError)
    assert str(asked.result) == "the engine is closed"


def state_of(sequence: Sequence) -> str:
    return sequence.state.value


def begin_params() -> Any:
    from kvpager.engine import SamplingParams

    return SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


def test_an_engine_whose_connection_was_closed_says_that_it_was_the_connection(
    serving: ServeProcess, llama: Case, caplog: pytest.LogCaptureFixture
) -> None:
    from kvpager.engine.llm import LLM
    from kvpager.tests.engine_cases import GREEDY

    with (
        attached(serving, llama) as client,
        suppress(ClosedError),  # of the engine's own end
        LLM(llama.loaded, device=llama.device, block_size=8, device_blocks=160, host=client) as llm,
    ):
        client.close()
        with pytest.raises(ClosedError, match="the connection to the sidecar was closed"):
            llm.generate(llama.prompts[:1], GREEDY, sessions=["anna"])
    assert "the connection or host store was closed under its engine" in caplog.text
    assert "the cold tier was closed" not in caplog.text


def test_a_sidecar_knows_what_an_engine_says_of_its_costs(
    serving: ServeProcess, operator: Connection, llm: LLM
) -> None:
    from kvpager.engine.sampler import SamplingParams

    def told() -> dict[str, Any]:
        llm.step()
        (space,) = operator.status()["spaces"]
        return dict(space["costs"])

    await_true(lambda: bool(told()))
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    for start in range(1, 7):
        llm.generate([[start, *range(2, 2 + 10 * start)]], one)
    llm.generate([[1, *range(2, 12)]], one)
    await_true(lambda: told()["compute"] is not None)
    assert told()["block_size"] == 8
    counts = llm.store.stats
    assert counts.saved_tokens > 0
    await_true(lambda: llm.step() is not None and operator.stats()["engines"]["saved_tokens"] > 0)
