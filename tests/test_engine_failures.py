"""Engines whose tiers are full, closed, slow or gone: what is lost is told, and nobody else pays for it."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from kvpager.engine import scheduler
from kvpager.engine.llm import LLM
from kvpager.engine.sequence import FinishReason, Sequence, SequenceState
from kvpager.kvstore.handles import Reservation
from kvpager.kvstore.host import HostStore
from kvpager.tests.engine_cases import (
    GREEDY,
    TOKENS,
    Case,
    MakeLLM,
    answers,
    check,
    check_nothing_is_held,
    evict_device,
    finish,
    maker,
    reads_cost_nothing,
    run_until,
)
from kvpager.tests.redis_servers import RedisServer
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.cold_redis import RedisColdTier
from kvpager.tiers.errors import CapacityError, ClosedError, RequestError
from kvpager.tiers.layout import KVLayout

# Tiers that are full


def test_what_the_tiers_never_hold_is_refused_and_the_rest_goes_on(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama(device_blocks=6, host_bytes=0)
    running = llm.submit(llama.prompts[0], GREEDY)
    with pytest.raises(RequestError, match="device_blocks"):
        llm.submit(llama.prompts[5], GREEDY)
    assert finish(llm, [running])[0].token_ids == llama.truth[0]


def fill_host(llm: LLM) -> Reservation:
    """Leave no room in host memory, as another space that is busy does."""
    assert llm.store.host is not None
    assert llm.host is not None
    assert llm.host.arena.wait_ready(llm.host.arena.num_extents, timeout=30.0)
    space = llm.host.space(replace(llm.layout, num_layers=1))
    held = space.reserve([at.to_bytes(16, "little") for at in range(space.capacity)])
    assert len(held.new)
    return held


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for room in host memory, which none of these tests makes."""
    monkeypatch.setattr(scheduler, "_ROOM_SECONDS", 0.05)


LONG, SHORT = 5, 0
"""Prompts of the case: the first needs more blocks than the small device tiers below have, the other one."""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("device_blocks", [6, 11])
def test_what_no_tier_has_room_for_ends_alone_and_the_others_go_on(
    llama: Case, make_llama: MakeLLM, caplog: pytest.LogCaptureFixture, device_blocks: int
) -> None:
    llm = make_llama(device_blocks=device_blocks)
    held = fill_host(llm)
    caplog.set_level(logging.WARNING)
    # In 6 blocks its prompt does not fit, in 11 its answer does not.
    large = llm.submit(llama.prompts[LONG], GREEDY, session="chat")
    others = [llm.submit(prompt, GREEDY) for prompt in llama.prompts[:5]]
    ended: list[Sequence] = []
    while len(llm.scheduler):
        ended += llm.step()
    assert sorted(one.id for one in ended) == [one.id for one in (large, *others)]
    assert [llm.completion(one).token_ids for one in others] == llama.truth[:5]
    cut = llm.completion(large)
    assert cut.finish_reason is FinishReason.CAPACITY
    assert cut.token_ids == llama.truth[LONG][: len(cut.token_ids)]
    assert (len(cut.token_ids) > 0) == (device_blocks == 11)
    assert f"sequence {large.id} ends" in caplog.text
    assert f"device_blocks ({device_blocks})" in caplog.text
    held.abort()
    (whole,) = llm.generate([llama.prompts[LONG]], GREEDY)
    assert whole.token_ids == llama.truth[LONG]
    check_nothing_is_held(llm)


@pytest.mark.usefixtures("impatient")
def test_generate_reports_what_no_tier_has_room_for(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama(device_blocks=11)
    with fill_host(llm):
        done = llm.generate([llama.prompts[LONG], llama.prompts[SHORT]], GREEDY)
    assert [one.finish_reason for one in done] == [FinishReason.CAPACITY, FinishReason.LENGTH]
    assert done[1].token_ids == llama.truth[SHORT]
    assert 0 < len(done[0].token_ids) < TOKENS


@pytest.mark.usefixtures("impatient")
def test_a_stream_that_no_tier_has_room_for_gives_its_text_and_raises(
    speaking: Case, made: list[LLM]
) -> None:
    make = maker(speaking, made)
    (whole,) = make().generate([speaking.prompts[LONG]], GREEDY)
    llm = make(device_blocks=11)
    pieces: list[str] = []
    stream = llm.stream(speaking.prompts[LONG], GREEDY)
    # A list keeps what came before the error.
    with fill_host(llm), pytest.raises(CapacityError, match=r"device_blocks \(11\)"):
        pieces.extend(stream)
    assert pieces
    assert whole.text.startswith("".join(pieces))
    assert len(llm.scheduler) == 0


def pin_host(llm: LLM) -> list[bytes]:
    """Have all of host memory pinned, and return what was."""
    space = llm.store.host
    assert space is not None
    names = [at.to_bytes(16, "little") for at in range(space.capacity)]
    assert space.put(names, np.zeros((len(names), llm.layout.block_bytes), np.uint8), wait=30.0) == len(names)
    assert space.pin(names) == len(names)
    return names


HOPELESS_SECONDS = scheduler._ROOM_SECONDS / 2
"""What ends for want of room that will not come does so sooner; room that may come is waited for longer."""


@pytest.mark.parametrize("device_blocks", [6, 11])
def test_room_that_is_pinned_is_not_waited_for(llama: Case, make_llama: MakeLLM, device_blocks: int) -> None:
    llm = make_llama(device_blocks=device_blocks)
    pinned = pin_host(llm)
    started = time.monotonic()
    done = llm.generate([llama.prompts[LONG], llama.prompts[SHORT]], GREEDY)
    assert time.monotonic() - started < HOPELESS_SECONDS
    assert [one.finish_reason for one in done] == [FinishReason.CAPACITY, FinishReason.LENGTH]
    assert done[1].token_ids == llama.truth[SHORT]
    assert llm.store.host is not None
    assert llm.store.host.unpin(pinned) == len(pinned)
    assert answers(llm, [llama.prompts[LONG]]) == [llama.truth[LONG]]
    check_nothing_is_held(llm)


def test_room_that_another_space_keeps_pinned_is_not_waited_for(llama: Case, make_llama: MakeLLM) -> None:
    if llama.device != "cpu":
        pytest.skip("the host store of this test is mapped for no GPU")
    block_bytes = llama.loaded.model.kv_layout(8).block_bytes
    with HostStore(4 * 4 * block_bytes, extent_bytes=4 * block_bytes) as host:
        assert host.arena.wait_ready(4, timeout=30.0)
        other = host.space(KVLayout(1, 1, 64, dtype="uint8"))
        names = [at.to_bytes(16, "little") for at in range(other.capacity)]
        blocks = np.zeros((len(names), other.layout.block_bytes), np.uint8)
        assert other.put(names, blocks) == len(names)
        half = names[: len(names) // 2]
        assert other.pin(half) == len(half)
        llm = make_llama(host=host, host_bytes=None, device_blocks=6)
        started = time.monotonic()
        # Of 13 blocks 6 are on the device, and 8 in the half of host memory that idles; 16 have no room.
        done = llm.generate([llama.prompts[LONG]], replace(GREEDY, max_tokens=50))
        assert time.monotonic() - started < HOPELESS_SECONDS
        assert done[0].finish_reason is FinishReason.CAPACITY
        assert done[0].token_ids[:TOKENS] == llama.truth[LONG]
        llm.close()


def test_who_has_no_block_that_could_go_below_waits_for_no_room(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama(device_blocks=1)
    params = replace(GREEDY, max_tokens=12)
    sequence = llm.submit(llama.prompts[SHORT], params)
    run_until(llm, sequence, SequenceState.DECODING)
    llm.step()
    # Both go on from the one block, partly filled; a copy to write has no room beside it, nor below.
    twin = llm.fork(sequence)
    pinned = pin_host(llm)
    started = time.monotonic()
    done = finish(llm, [sequence, twin])
    assert time.monotonic() - started < HOPELESS_SECONDS
    assert FinishReason.CAPACITY in {one.finish_reason for one in done}
    for one in done:
        assert one.token_ids == llama.truth[SHORT][: len(one.token_ids)]
    assert llm.store.host is not None
    assert llm.store.host.unpin(pinned) == len(pinned)
    check_nothing_is_held(llm)


def test_room_that_somebody_else_has_is_waited_for(
    llama: Case, make_llama: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llama(device_blocks=6)
    held = fill_host(llm)
    space = llm.store.host
    assert space is not None
    evict = space.evict
    waited: list[int] = []

    def evict_in_vain(count: int) -> int:
        """What the scheduler tries before it waits: meanwhile the other one ends."""
        monkeypatch.undo()
        waited.append(evict(count))
        held.abort()
        return waited[0]

    monkeypatch.setattr(space, "evict", evict_in_vain)
    assert answers(llm, [llama.prompts[LONG]]) == [llama.truth[LONG]]
    assert waited == [0]
    check_nothing_is_held(llm)


# Steps that fail


@pytest.mark.parametrize("layer", [0, 2])
def test_a_step_that_fails_installs_nothing_and_the_next_one_goes_on(
    llama: Case, make_llama: MakeLLM, layer: int
) -> None:
    llm = make_llama()
    prompt, truth = llama.prompts[5], llama.truth[5]
    llm.generate([prompt], GREEDY)
    evict_device(llm)
    sequence = llm.submit(prompt, GREEDY)

    def fail(module: torch.nn.Module, inputs: object) -> None:
        raise RuntimeError("a kernel failed")

    end = llama.loaded.model.layers[layer].register_forward_pre_hook(fail)
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a kernel failed"):
                llm.step()
            check(llm)
    finally:
        end.remove()
    assert llm.store.stats.promoted == 0
    assert sequence.row is not None
    assert llm.store.far_blocks(sequence.row) > 0 or llama.device != "cpu"
    assert finish(llm, [sequence])[0].token_ids == truth
    check_nothing_is_held(llm)


def test_a_sequence_that_is_aborted_after_its_step_failed_leaves_nothing_behind(
    llama: Case, make_llama: MakeLLM
) -> None:
    llm = make_llama()
    llm.generate(llama.prompts, GREEDY)
    evict_device(llm)
    reads_cost_nothing(llm)

    def fail(module: torch.nn.Module, inputs: object) -> None:
        raise RuntimeError("a kernel failed")

    end = llama.loaded.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="a kernel failed"):
            llm.generate(llama.prompts, GREEDY)
    finally:
        end.remove()
    check(llm)
    assert llm.store.stats.promoted == 0
    assert answers(llm, llama.prompts) == llama.truth
    check_nothing_is_held(llm)


# Engines that are driven by two, or closed


def test_a_second_thread_is_refused_while_one_drives(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama()
    refused: list[Exception] = []

    def meddle() -> None:
        try:
            llm.step()
        except RequestError as error:
            refused.append(error)

    def listen(event: object) -> None:
        other = Thread(target=meddle)
        other.start()
        other.join()

    # A listener runs in the midst of a step.
    end = llm.store.subscribe(listen)
    assert llm.generate([llama.prompts[-1]], GREEDY)[0].token_ids == llama.truth[-1]
    end()
    assert refused
    assert "one thread drives it" in str(refused[0])


@pytest.mark.parametrize("thread", [True, False])
def test_an_engine_is_not_closed_and_nothing_aborted_in_the_midst_of_a_step(
    thread: bool, llama: Case, make_llama: MakeLLM
) -> None:
    llm = make_llama()
    refused = []
    calls: list[Callable[[], object]] = [llm.close, lambda: llm.abort(llm.scheduler.unfinished[0])]

    def meddle() -> None:
        for call in calls:
            try:
                call()
            except RequestError as error:
                refused.append(error)

    def listen(event: object) -> None:
        if thread:
            other = Thread(target=meddle)
            other.start()
            other.join()
        else:
            meddle()  # as a signal handler would

    end = llm.store.subscribe(listen)
    assert llm.generate([llama.prompts[-1]], GREEDY)[0].token_ids == llama.truth[-1]
    end()
    assert len(refused) >= 2
    assert not llm.closed


def test_a_close_that_was_interrupted_is_finished_by_the_next(make_llama: MakeLLM) -> None:
    llm = make_llama()
    llm.store.close()  # as far as an interrupted close may have come
    llm.close()
    assert llm.closed
    llm.close()


def test_a_closed_engine_says_so(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama(max_sequences=2)
    sequences = [llm.submit(prompt, GREEDY, session=str(len(prompt))) for prompt in llama.prompts[3:7]]
    run_until(llm, sequences[0], SequenceState.DECODING)
    llm.step()
    llm.close()
    llm.close()
    for sequence in sequences:
        llm.abort(sequence)
        completion = llm.completion(sequence)
        assert completion.finish_reason is FinishReason.ABORTED
    assert llm.completion(sequences[0]).token_ids == llama.truth[3][:2]
    for call in (
        lambda: llm.submit(llama.prompts[0]),
        lambda: llm.generate(llama.prompts[0]),
        lambda: llm.generate([]),
        lambda: next(llm.stream(llama.prompts[0])),
        llm.step,
        lambda: llm.fork(sequences[0]),
        llm.reset_cache,
        llm.save_sessions,
        lambda: llm.session_tokens("x"),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_an_engine_whose_host_memory_was_closed_under_it_is_closed_all_the_same(
    llama: Case, caplog: pytest.LogCaptureFixture
) -> None:
    host = HostStore(8 << 20, device=llama.device)
    settings: dict[str, Any] = {"device": llama.device, "block_size": 8, "device_blocks": 40, "host": host}
    llm = LLM(llama.loaded, **settings)
    sequence = llm.submit(llama.prompts[LONG], GREEDY)
    run_until(llm, sequence, SequenceState.DECODING)
    host.close()
    # Whole blocks that the device tier does not have are looked for in host memory.
    with pytest.raises(ClosedError):
        llm.generate(llama.prompts[LONG][::-1])
    llm.close()
    assert llm.closed
    assert "the host memory was closed before the engine" in caplog.text
    llm.close()


def test_a_stream_that_is_read_on_when_its_engine_is_closed_says_so(speaking: Case, made: list[LLM]) -> None:
    make = maker(speaking, made)
    (whole,) = make().generate([speaking.prompts[LONG]], GREEDY)
    llm = make()
    stream = llm.stream(speaking.prompts[LONG], GREEDY)
    pieces = [next(stream)]
    llm.close()
    # A list keeps what came before the error.
    with pytest.raises(ClosedError, match="the engine is closed"):
        pieces.extend(stream)
    assert whole.text.startswith("".join(pieces))
    assert list(stream) == []


def test_a_stream_that_had_ended_before_its_engine_was_closed_gives_all_of_its_text(
    speaking: Case, made: list[LLM]
) -> None:
    make = maker(speaking, made)
    (whole,) = make().generate([speaking.prompts[LONG]], GREEDY)
    llm = make()
    stream = llm.stream(speaking.prompts[LONG], GREEDY)
    pieces = [next(stream)]
    while len(llm.scheduler):
        llm.step()
    llm.close()
    pieces.extend(stream)
    assert "".join(pieces) == whole.text


# A cold tier that fails


def test_a_disk_that_is_lost_costs_hits_and_nothing_else(
    llama: Case, make_llama: MakeLLM, tmp_path: Path
) -> None:
    folder = tmp_path / "cold"
    llm = make_llama(
        cold=DiskColdTier(folder, capacity_bytes=1 << 30), device_blocks=20, host_bytes=60 * 6144
    )
    names = [str(at) for at in range(len(llama.prompts))]
    assert [answer.token_ids for answer in llm.generate(llama.prompts, GREEDY, sessions=names)] == llama.truth
    assert llm.host is not None
    llm.host.flush(5.0)
    running = [llm.submit(prompt, GREEDY) for prompt in llama.prompts]
    for _ in range(5):
        llm.step()
    shutil.rmtree(folder)
    assert [one.token_ids for one in finish(llm, running)] == llama.truth
    started = time.monotonic()
    assert answers(llm, [list(reversed(prompt)) for prompt in llama.prompts]) != llama.truth
    assert answers(llm, llama.prompts) == llama.truth
    llm.close(drain=1.0)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("fate", ["killed", "stalled"])
def test_a_redis_that_dies_costs_hits_and_nothing_else(
    llama: Case, make_llama: MakeLLM, tmp_path: Path, fate: str
) -> None:
    with RedisServer(tmp_path) as server:
        llm = make_llama(
            cold=RedisColdTier(server.url, deadline=0.3),
            device_blocks=20,
            host_bytes=60 * 6144,
            load_seconds=0.5,
        )
        names = [str(at) for at in range(len(llama.prompts))]
        first = llm.generate(llama.prompts, GREEDY, sessions=names)
        assert [answer.token_ids for answer in first] == llama.truth
        assert llm.host is not None
        assert llm.host.flush(10.0) == 0
        running = [llm.submit(prompt, GREEDY) for prompt in llama.prompts]
        for _ in range(3):
            llm.step()
        if fate == "killed":
            server.kill()
        else:
            server.stall()
        started = time.monotonic()
        assert [one.token_ids for one in finish(llm, running)] == llama.truth
        again = llm.generate(
            llama.prompts, GREEDY, sessions=[f"new-{at}" for at in range(len(llama.prompts))]
        )
        assert [answer.token_ids for answer in again] == llama.truth
        assert time.monotonic() - started < 20
        assert llm.save_sessions() == 0
        check(llm)
        llm.close(drain=0.5)


def test_a_sequence_larger_than_the_device_tier_goes_on_over_a_redis_that_stalls(
    llama: Case, make_llama: MakeLLM, tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as server:
        cold = RedisColdTier(server.url, deadline=1.0)
        llm = make_llama(cold=cold, device_blocks=5, host_bytes=40 * 6144, load_seconds=0.2)
        server.stall()
        started = time.monotonic()
        for _ in range(2):
            assert answers(llm, llama.prompts) == llama.truth
        assert time.monotonic() - started < 30
        check(llm)
        llm.close()


# A cold tier that is closed


def test_an_engine_is_not_made_on_a_cold_tier_that_is_closed(
    llama: Case, make_llama: MakeLLM, tmp_path: Path
) -> None:
    cold = DiskColdTier(tmp_path / "a", capacity_bytes=1 << 30)
    make_llama(cold=cold).close()
    # An engine closes its cold tier: it is not there for the next one.
    with pytest.raises(ClosedError, match="cold: this tier is closed"):
        make_llama(cold=cold)
    with RedisServer(tmp_path) as server:
        other = RedisColdTier(server.url)
        other.close()
        with pytest.raises(ClosedError, match="cold: this tier is closed"):
            make_llama(cold=other)


def test_a_cold_tier_that_is_closed_under_an_engine_is_told_and_costs_hits(
    llama: Case, make_llama: MakeLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cold = DiskColdTier(tmp_path, capacity_bytes=1 << 30)
    llm = make_llama(cold=cold)
    names = [str(at) for at in range(len(llama.prompts))]
    assert answers(llm, llama.prompts) == llama.truth
    assert llm.host is not None
    assert llm.host.flush() == 0
    caplog.set_level(logging.WARNING)
    cold.close()
    done = llm.generate(llama.prompts, GREEDY, sessions=names)
    assert [one.token_ids for one in done] == llama.truth
    assert answers(llm, llama.prompts) == llama.truth
    said = [record.message for record in caplog.records if "closed under its engine" in record.message]
    assert len(said) == 1
    with pytest.raises(ClosedError, match="the cold tier is closed"):
        llm.save_sessions()
    llm.close(drain=5.0)
    assert "nothing is drained" in caplog.text


def test_a_closed_cold_tier_is_told_to_who_names_no_sessions(
    llama: Case, make_llama: MakeLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cold = DiskColdTier(tmp_path, capacity_bytes=1 << 30)
    llm = make_llama(cold=cold)
    cold.close()
    assert answers(llm, llama.prompts[:2]) == llama.truth[:2]
    until = time.monotonic() + 20
    while "closed under its engine" not in caplog.text:
        assert time.monotonic() < until
        time.sleep(0.01)


# A session's record that is slow to come


def test_who_waits_for_the_record_of_a_session_keeps_nobody_waiting(
    llama: Case, make_llama: MakeLLM, tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as server:
        llm = make_llama(cold=RedisColdTier(server.url, deadline=3.0), load_seconds=3.0)
        server.stall()
        started = time.monotonic()
        slow = [llm.submit(llama.prompts[at], GREEDY, session=f"chat-{at}") for at in range(3)]
        # Each would take the tier's deadline, were it waited for.
        assert time.monotonic() - started < 1.0
        assert [one.lookup is not None for one in slow] == [True] * 3
        while any(one.lookup is not None for one in slow):
            llm.step()
        asked = time.monotonic() - started
        assert [one.token_ids for one in finish(llm, slow)] == llama.truth[:3]
        assert 2.0 < asked < 10.0
        check(llm)
        llm.close()


def test_a_request_passes_one_that_waits_for_its_record(
    llama: Case, make_llama: MakeLLM, tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as server:
        llm = make_llama(cold=RedisColdTier(server.url, deadline=5.0), load_seconds=5.0)
        running = llm.submit(llama.prompts[4], GREEDY)
        run_until(llm, running, SequenceState.DECODING)
        server.stall()
        waiting = llm.submit(llama.prompts[0], GREEDY, session="chat")
        started = time.monotonic()
        assert finish(llm, [running])[0].token_ids == llama.truth[4]
        assert time.monotonic() - started < 3.0
        assert waiting.state is SequenceState.WAITING
        llm.abort(waiting)
        assert llm.completion(waiting).finish_reason is FinishReason.ABORTED
        server.resume()
        check_nothing_is_held(llm)
        llm.close()
