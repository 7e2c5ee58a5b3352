"""The store, and the engine on it, with host memory in a sidecar: another process, which may die."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvpager
import numpy as np
import pytest
from kvpager.api.client import Connection
from kvpager.api.messages import Count, Evict, Release
from kvpager.kvstore.handles import Generations
from kvpager.kvstore.policy import Ids
from kvpager.kvstore.store import TieredStore
from kvpager.tests.raw_client import RawClient, await_true
from kvpager.tests.serve_process import ServeProcess
from kvpager.tests.test_store import LAYOUT, PROMPT, ROOT, Engine, HeldMover, array
from kvpager.tiers.errors import ConfigError, QuotaError, StaleHandleError
from kvpager.tiers.layout import KVLayout

if TYPE_CHECKING:
    from kvpager.tests.engine_cases import Case

TIMEOUT = 1.0
GROUP = b"one engine's own"

# Attaches, answers what it is asked, and lets go.
OTHER_PROCESS = """
import json, sys
import numpy as np
import kvpager
from kvpager.tests.test_store import PROMPT
from kvpager.tests.test_store_over_sidecar import attached

path, deadline, name = json.loads(sys.argv[1])
with attached(path) as one:
    if name is None:
        opened = one.store.open(np.append(PROMPT, [1, 2, 3]), cold_deadline=deadline)
    else:
        record = one.store.find_session(name)
        opened = one.store.wake(record.sleeping(4), cold_deadline=deadline)
    one.check()
    print(json.dumps([opened.length, opened.device, opened.host, opened.cold, one.read(opened.row)]))
"""


class AttachedEngine(Engine):
    """An `Engine` of `test_store` whose host memory is a sidecar's."""

    def __init__(self, path: str | Path, device_blocks: int, rows: int, **settings: Any) -> None:
        self.mover = HeldMover()
        self.host = None
        self.client = kvpager.connect(path, timeout=TIMEOUT, **settings)
        self.store = TieredStore(
            LAYOUT, device_blocks, root=ROOT, host=self.client, max_sequences=rows, mover=self.mover
        )


@contextmanager
def attached(
    path: str | Path, device_blocks: int = 16, rows: int = 8, **settings: Any
) -> Iterator[AttachedEngine]:
    """An engine on a sidecar; its books balance at the end, and it leaves nothing held.

    Args:
        settings: of its connection.
    """
    one = AttachedEngine(path, device_blocks, rows, **settings)
    try:
        yield one
        one.check()
    finally:
        one.mover.held = False
        one.store.close()
        one.client.close()


def ask_other_process(path: Path, deadline: float = 0.0, name: str | None = None) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", OTHER_PROCESS, json.dumps([str(path), deadline, name])],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer: list[Any] = json.loads(done.stdout)
    return answer


def check_nothing_is_held(one: AttachedEngine) -> None:
    """After the rows are closed the sidecar knows of nothing that is held."""
    one.store.flush()
    one.store.poll()
    counts = one.client.stats()["sidecar"]
    assert (counts["leased"], counts["reserved"]) == (0, 0)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[ServeProcess]:
    """A sidecar with a cold tier."""
    with ServeProcess(tmp_path / "socket", f"--cold=disk://{tmp_path}/cold", "--cold-bytes=16M") as process:
        yield process


def test_a_sequence_sleeps_wakes_far_and_is_promoted(serving: ServeProcess) -> None:
    with attached(serving.path) as one:
        row = one.run(PROMPT).row
        for token in (1, 2, 3):
            one.store.reserve(np.array([row]), 1)
            words = one.store.table.row(row)
            length = int(one.store.lengths[row])
            place = int(words[length // 4]) + length % 4 * LAYOUT.row_bytes
            ctypes.memmove(place, token.to_bytes(4, "little"), 4)
            one.store.append(np.array([row]), array(token))
            one.store.poll()
        whole = [*PROMPT.tolist(), 1, 2, 3]
        assert one.read(row) == whole
        sleeping = one.store.sleep(row)
        one.store.evict(16)
        opened = one.store.wake(sleeping)
        assert (opened.length, opened.host) == (17, 17)
        assert one.far(opened.row) == [True] * 5
        assert one.read(opened.row) == whole
        assert one.store.promote(opened.row, 8) == 4
        one.store.poll()
        assert one.far(opened.row) == [False] * 4 + [True]
        one.compute(opened.row, array(7))
        assert one.read(opened.row) == [*whole, 7]
        one.store.close_row(opened.row)
        check_nothing_is_held(one)


def test_another_process_reads_what_the_first_one_computed(serving: ServeProcess) -> None:
    with attached(serving.path) as one:
        one.run(PROMPT)
        one.store.flush()
        assert ask_other_process(serving.path) == [12, 0, 12, 0, PROMPT[:12].tolist()]
        counts = one.client.stats()["sidecar"]
        assert (counts["leased"], counts["clients"]) == (0, 1)


def test_more_sequences_than_vram_has_room_for_take_turns(serving: ServeProcess) -> None:
    with attached(serving.path, device_blocks=8) as one:
        prompts = [np.arange(first, first + 18, dtype=np.int32) for first in range(0, 300, 20)]
        sleeping = [one.store.sleep(one.run(prompt).row) for prompt in prompts]
        for _ in range(2):
            for number, (prompt, asleep) in enumerate(zip(prompts, sleeping, strict=True)):
                opened = one.store.wake(asleep)
                assert opened.length == 18
                assert one.read(opened.row) == prompt.tolist()
                one.store.poll()
                one.check()
                sleeping[number] = one.store.sleep(opened.row)
        assert one.store.stats.dropped == 0
        check_nothing_is_held(one)


def test_a_running_sequence_reads_its_oldest_blocks_in_the_sidecar(serving: ServeProcess) -> None:
    with attached(serving.path) as one:
        row = one.run(PROMPT).row
        assert one.store.spill(row, 2) == 2
        assert one.far(row) == [True, True, False, False]
        twin = one.store.fork(row)
        one.compute(twin, array(5))
        assert one.read(row) == PROMPT.tolist()
        assert one.read(twin) == [*PROMPT.tolist(), 5]
        for each in (row, twin):
            one.store.close_row(each)
        check_nothing_is_held(one)


def test_a_sequence_that_fills_its_device_waits_only_for_room_that_may_come(tmp_path: Path) -> None:
    with (
        ServeProcess(tmp_path / "socket", host_bytes=1 << 16) as serving,
        attached(serving.path, device_blocks=4) as one,
        kvpager.connect(serving.path) as other,
    ):
        space = other.space(LAYOUT)
        await_true(lambda: other.stats()["arena"]["ready_bytes"] == 1 << 16)
        row = one.run(PROMPT).row
        assert one.store.spill(row, 4) == 3
        assert one.store.promote(row, 1) == 1
        # All but what it reads itself.
        hashes = [bytes(14) + at.to_bytes(2, "big") for at in range(space.capacity - 3)]
        with space.reserve(hashes) as reservation:
            assert len(reservation.new) == len(hashes)
            assert one.store.may_spill(row)
            reservation.commit()
        assert space.pin(hashes) == len(hashes)
        await_true(lambda: not one.store.may_spill(row))
        assert space.unpin(hashes[:1]) == 1
        assert one.store.may_spill(row)
        one.store.close_row(row)
        check_nothing_is_held(one)


def test_blocks_come_up_from_the_sidecars_cold_tier(serving: ServeProcess) -> None:
    with attached(serving.path) as one:
        one.store.close_row(one.run(PROMPT).row)
        one.store.evict(16)
        one.store.poll()
        assert one.client.flush(10.0) == 0
        assert one.store.host is not None
        assert one.store.host.evict(100) == 3
        assert one.store.open(PROMPT).length == 0
        load = one.store.start_load(one.store.name_prompt(PROMPT))
        assert load is not None
        await_true(load.done)
        assert load.loaded == 3
        opened = one.store.open(PROMPT)
        load.release()
        assert (opened.length, opened.host) == (12, 12)
        one.store.close_row(opened.row)
        one.store.poll()
        assert one.store.host.evict(100) == 3
        assert ask_other_process(serving.path, deadline=5.0) == [12, 0, 0, 12, PROMPT[:12].tolist()]


def test_a_session_goes_on_in_another_process(serving: ServeProcess) -> None:
    with attached(serving.path) as one:
        sleeping = one.store.sleep(one.run(PROMPT).row)
        one.store.flush()
        assert one.store.save_session("chat", sleeping, PROMPT)
    assert ask_other_process(serving.path, 5.0, "chat") == [14, 0, 14, 0, PROMPT.tolist()]


def test_a_killed_sidecars_successor_has_what_sleeps_and_is_read(serving: ServeProcess) -> None:
    other = np.arange(200, 214, dtype=np.int32)
    with attached(serving.path) as one:
        asleep = one.store.sleep(one.run(PROMPT).row)
        one.store.evict(16)
        reading = one.store.wake(asleep).row
        gone = one.store.sleep(one.run(other).row)
        one.store.evict(16)
        serving.kill()
        await_true(lambda: not one.client.ready)
        serving.start()
        one.client.wait_ready(30)
        one.store.poll()
        one.check()
        assert one.client.counters.lost == 0
        assert one.read(reading) == PROMPT.tolist()
        opened = one.store.wake(gone)
        assert (opened.length, opened.host) == (14, 14)
        assert one.read(opened.row) == other.tolist()
        one.store.close_row(opened.row)
        one.store.close_row(reading)
        check_nothing_is_held(one)


@pytest.mark.parametrize("strict", [False, True])
def test_a_dead_sidecar_costs_hits_and_a_fresh_one_is_used_when_nothing_of_the_old_is_read(
    serving: ServeProcess, strict: bool
) -> None:
    other = np.arange(200, 214, dtype=np.int32)
    with attached(serving.path, strict=strict) as one:
        asleep = one.store.sleep(one.run(PROMPT).row)
        one.store.evict(16)
        reading = one.store.wake(asleep).row
        gone = one.store.sleep(one.run(other).row)
        one.store.evict(16)
        one.mover.held = True
        written = one.run(np.arange(300, 308, dtype=np.int32)).row
        one.store._device.start_write_back()
        serving.kill()
        await_true(lambda: not one.client.ready)
        one.mover.held = False
        for _ in range(2):
            one.store.poll()
            one.check()
            # Who reads in its memory goes on reading; who would look for something finds nothing.
            assert one.read(reading) == PROMPT.tolist()
            opened = one.store.wake(gone)
            assert opened.length == 0
            one.compute(opened.row, other)
            one.store.close_row(opened.row)
            one.store.evict(16)
            if not one.client.ready:
                serving.start("--fresh")
                one.client.wait_ready(30)
        assert one.client.counters.lost > 0
        assert one.read(reading) == PROMPT.tolist()
        # The last far block is let go of with its row.
        asleep = one.store.sleep(reading)
        one.store.close_row(written)
        one.store.poll()
        opened = one.store.wake(asleep)
        assert opened.length == 0
        one.compute(opened.row, PROMPT)
        asleep = one.store.sleep(opened.row)
        one.store.evict(16)
        opened = one.store.wake(asleep)
        assert (opened.length, opened.host) == (14, 14)
        assert one.read(opened.row) == PROMPT.tolist()
        one.store.close_row(opened.row)
        check_nothing_is_held(one)


def lose_leases(
    serving: ServeProcess,
    client: Connection,
    slots: Ids,
    generations: Generations,
    layout: KVLayout = LAYOUT,
) -> None:
    """The sidecar has these leases no more, and a new connection finds it out; its memory stays the same."""
    other = RawClient(serving.path, GROUP)
    try:
        space = other.open(layout)
        other.call(Release(space, slots, generations))
        # Else the leases are taken again.
        assert other.call(Evict(space, 100), Count).count >= len(slots)
    finally:
        other.close()
    serving.kill()
    await_true(lambda: not client.ready)
    serving.start()
    client.wait_ready(30)
    assert client.lost


@pytest.mark.parametrize("strict", [False, True])
def test_rows_whose_leases_were_lost_are_told_and_computed_again(serving: ServeProcess, strict: bool) -> None:
    other = np.arange(200, 214, dtype=np.int32)
    with attached(serving.path, group=GROUP, strict=strict) as one:
        rows = []
        for prompt in (PROMPT, other):
            asleep = one.store.sleep(one.run(prompt).row)
            one.store.evict(16)
            rows.append(one.store.wake(asleep).row)
        assert one.store.take_lost_rows() == []
        words = one.store.table.row(rows[0])
        assert one.store._far is not None
        slots = one.store._far.slots_at(words)
        lose_leases(serving, one.client, slots[1:2], one.store._far.generations(slots[1:2]))
        (lost,) = one.client.lost
        assert not lost.readable
        one.store.poll()
        assert one.store.take_lost_rows() == [rows[0]]
        assert one.store.take_lost_rows() == []
        asleep = one.store.sleep(rows[0], keep_tail=False)
        one.store.poll()
        one.check()
        # The other one reads on, and of this one what comes before the lost block is found.
        assert one.read(rows[1]) == other.tolist()
        opened = one.store.wake(asleep)
        assert opened.length == 4
        assert one.read(opened.row) == PROMPT[:4].tolist()
        one.compute(opened.row, PROMPT[4:])
        assert one.read(opened.row) == PROMPT.tolist()
        for row in (opened.row, rows[1]):
            one.store.close_row(row)
        check_nothing_is_held(one)


def test_memory_that_went_with_its_sidecar_is_read_on_and_loses_no_row(serving: ServeProcess) -> None:
    with attached(serving.path) as one:
        asleep = one.store.sleep(one.run(PROMPT).row)
        one.store.evict(16)
        row = one.store.wake(asleep).row
        serving.kill()
        await_true(lambda: not one.client.ready)
        serving.start("--fresh")
        one.client.wait_ready(30)
        await_true(lambda: bool(one.client.lost))
        assert all(lost.readable for lost in one.client.lost)
        one.store.poll()
        assert one.store.take_lost_rows() == []
        assert one.read(row) == PROMPT.tolist()
        one.store.close_row(row)


@pytest.mark.parametrize("strict", [False, True])
def test_a_stalled_sidecar_holds_up_one_step_and_not_the_next(serving: ServeProcess, strict: bool) -> None:
    with attached(serving.path, strict=strict) as one:
        asleep = one.store.sleep(one.run(PROMPT).row)
        one.store.evict(16)
        reading = one.store.wake(asleep).row
        serving.pause()
        assert one.store.open(np.append(PROMPT, array(1))).length == 0
        began = time.monotonic()
        for first in range(0, 200, 20):
            row = one.run(np.arange(first, first + 14, dtype=np.int32)).row
            one.store.close_row(row)
            one.store.poll()
            assert one.read(reading) == PROMPT.tolist()
        assert time.monotonic() - began < 2 * TIMEOUT
        serving.resume()
        await_true(lambda: not one.client.core.stalled)
        one.store.close_row(reading)
        one.store.evict(16)
        one.store.poll()
        assert one.store.open(np.append(PROMPT, array(1))).length == 12


def test_an_engine_on_a_strict_connection_goes_on_where_its_tenants_quota_has_no_room(tmp_path: Path) -> None:
    quota = 2 * LAYOUT.block_bytes
    with (
        ServeProcess(tmp_path / "socket", f"--quota=anna={quota}") as serving,
        attached(serving.path, device_blocks=8, strict=True, tenant="anna") as one,
    ):
        row = one.run(PROMPT).row
        # All that the tenant may have is read by somebody.
        with kvpager.connect(serving.path, tenant="anna") as other:
            space = other.space(LAYOUT)
            assert space.put([bytes(16), bytes(15) + b"1"], np.zeros((2, LAYOUT.block_bytes), np.uint8)) == 2
            with space.match([bytes(16), bytes(15) + b"1"]) as lease:
                assert len(lease) == 2
                one.store.flush()
                one.store.poll()
                asleep = one.store.sleep(row)
                assert one.store.evict(8) == 4
                assert one.client.counters.over_quota > 0
                with pytest.raises(QuotaError):
                    one.client.space(LAYOUT).reserve([bytes(15) + b"2"])
                # Nothing of it could be kept: it is computed again, as far as it is wanted.
                opened = one.store.wake(asleep)
                assert opened.length == 0
                one.compute(opened.row, PROMPT)
                assert one.read(opened.row) == PROMPT.tolist()

        def kept() -> bool:
            one.store.flush()
            return one.store.stats.written_back == 2

        await_true(kept)
        one.store.close_row(opened.row)
        check_nothing_is_held(one)


def test_an_engine_on_a_strict_connection_lets_go_of_what_is_lost(serving: ServeProcess) -> None:
    with attached(serving.path, group=GROUP, strict=True) as one:
        one.store.close_row(one.run(PROMPT).row)
        one.store.evict(16)
        reading = one.store.open(np.append(PROMPT, array(1))).row
        words = one.store.table.row(reading)
        assert one.store._far is not None
        slots = one.store._far.slots_at(words)
        lose_leases(serving, one.client, slots, one.store._far.generations(slots))
        assert one.client.counters.lost == len(slots)
        # Whoever gives back what is not held any more gives back the rest all the same.
        one.store.close_row(reading)
        one.store.poll()
        assert one.client.counters.refused >= len(slots)
        with pytest.raises(StaleHandleError):
            one.client.space(LAYOUT).release(slots, np.ones(len(slots), np.int64))
        check_nothing_is_held(one)


def test_a_gpus_store_does_not_take_memory_that_is_not_mapped_for_it(serving: ServeProcess) -> None:
    with kvpager.connect(serving.path) as client, pytest.raises(ConfigError, match="not mapped for cuda:0"):
        TieredStore(LAYOUT, 8, root=ROOT, host=client, device="cuda:0")


def test_a_second_engine_answers_from_the_first_ones_kv(serving: ServeProcess, llama: Case) -> None:
    from kvpager.engine.llm import LLM
    from kvpager.tests.engine_cases import GREEDY

    prompt, truth = llama.prompts[5], llama.truth[5]
    cached = []
    for number in range(2):
        with ExitStack() as engine:
            client = engine.enter_context(kvpager.connect(serving.path, name=f"engine {number}"))
            if llama.device != "cpu":
                client.map_device(llama.device)
            llm = engine.enter_context(
                LLM(llama.loaded, device=llama.device, block_size=8, device_blocks=160, host=client)
            )
            (answer,) = llm.generate([prompt], GREEDY, sessions=["chat"])
            assert answer.token_ids == truth
            cached.append(answer.cached.host)
            llm.store.flush()
            assert llm.save_sessions() == 1
            llm.store.check_integrity()
        assert not client.core.ready
    assert cached == [0, 72]
    with kvpager.connect(serving.path) as client:
        counts = client.stats()["sidecar"]
        assert (counts["leased"], counts["reserved"]) == (0, 0)
        with pytest.raises(ConfigError, match="host_bytes"):
            LLM(llama.loaded, device=llama.device, host=client, host_bytes=1 << 20)


def test_an_engine_computes_again_what_was_lost_and_answers_the_same(
    serving: ServeProcess, llama: Case
) -> None:
    from kvpager.engine.llm import LLM
    from kvpager.tests.engine_cases import GREEDY

    if llama.device != "cpu":
        pytest.skip("steps are looked at on a CPU")
    prompt, truth = llama.prompts[5], llama.truth[5]
    with (
        kvpager.connect(serving.path, timeout=TIMEOUT, group=GROUP) as client,
        LLM(llama.loaded, device="cpu", block_size=8, device_blocks=160, host=client) as llm,
    ):
        sequence = llm.submit(prompt, GREEDY)
        for _ in range(3):
            llm.step()
        llm.store.flush()
        row = sequence.row
        assert row is not None
        assert llm.store.spill(row, 4) == 4
        far = llm.store._far
        assert far is not None
        slots = far.slots_at(llm.store.table.row(row)[:4])
        lose_leases(serving, client, slots, far.generations(slots), llm.layout)
        while len(llm.scheduler):
            llm.step()
        answer = llm.completion(sequence)
        assert answer.token_ids == truth
        assert answer.preemptions == 1
        llm.store.check_integrity()
