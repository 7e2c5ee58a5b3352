from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
from kvpager.kvstore.events import BlockEvent, EventKind
from kvpager.kvstore.hashing import hash_blocks, hash_partial
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.session import SessionRecord
from kvpager.kvstore.space import HostSpace
from kvpager.kvstore.store import Install, Opened, TieredStore
from kvpager.tests.troubled_disk import TroubledDisk
from kvpager.tiers.address import FAR, INSTALL, TAG_MASK
from kvpager.tiers.arena import AddressArray
from kvpager.tiers.cold import ColdStatus, ColdTier
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    IntegrityError,
    KernelError,
    MemoryUnavailableError,
    RecordError,
)
from kvpager.tiers.layout import KVLayout
from kvpager.tiers.mover import HostMover, MoverStats
from kvpager.tiers.pinned import PinnedArena

SIZE = 4
LAYOUT = KVLayout(1, 1, 32, block_size=SIZE, dtype="float32")
EXTENT = 4096
ROOT = b"r" * 16
PROMPT = np.arange(100, 114, dtype=np.int32)  # three full blocks and two tokens


class HeldMover:
    """Copies when it is let go, or fails: what happens in between can be looked at."""

    def __init__(self) -> None:
        self.inner = HostMover()
        self.held = False
        self.fails = False

    @property
    def stats(self) -> MoverStats:
        return self.inner.stats

    def copy(self, src: AddressArray, dst: AddressArray, nbytes: int) -> HeldTransfer:
        transfer = HeldTransfer(self, src.copy(), dst.copy(), nbytes)
        if not self.held:
            transfer.finish()
        return transfer

    def close(self) -> None:
        self.inner.close()


class HeldTransfer:
    def __init__(self, mover: HeldMover, src: AddressArray, dst: AddressArray, size: int) -> None:
        self._mover, self._src, self._dst, self._size = mover, src, dst, size
        self.nbytes = len(src) * size
        self.seconds = 0.0
        self.error: Exception | None = None
        self._over = False

    def finish(self) -> None:
        if self._over:
            return
        self._over = True
        if self._mover.fails:
            self.error = KernelError("the copy engine is on fire")
        else:
            self._mover.inner.copy_now(self._src, self._dst, self._size)

    def done(self) -> bool:
        if not self._mover.held:
            self.finish()
        if self.error is not None:
            raise self.error
        return self._over

    def wait(self, timeout: float | None = None) -> bool:
        self.finish()
        return self.done()


class Engine:
    """A store and the least that an engine does with it: every token's KV is its number and its row's tag."""

    def __init__(self, device_blocks: int, extents: int, cold: ColdTier | None, rows: int = 8) -> None:
        self.mover = HeldMover()
        self.host = HostStore(extents * EXTENT, extent_bytes=EXTENT, cold=cold) if extents else None
        if self.host is not None:
            self.host.arena.wait_ready()
        self.store = TieredStore(
            LAYOUT, device_blocks, root=ROOT, host=self.host, max_sequences=rows, mover=self.mover
        )

    def check(self) -> None:
        self.store.check_integrity()
        if self.host is not None:
            self.host.check_integrity()

    def compute(self, row: int, tokens: npt.NDArray[np.int32]) -> None:
        """Write the KV of more tokens of a row."""
        self.store.reserve(np.array([row]), len(tokens))
        length = int(self.store.lengths[row])
        words = self.store.table.row(row)
        for at, token in enumerate(tokens.tolist(), length):
            assert not words[at // SIZE] & FAR
            place = int(words[at // SIZE]) + at % SIZE * LAYOUT.row_bytes
            ctypes.memmove(place, token.to_bytes(4, "little"), 4)
        self.store.advance(row, tokens)

    def run(self, tokens: npt.NDArray[np.int32], **options: object) -> Opened:
        """Open a prompt and compute what was not found."""
        opened = self.store.open(tokens, **options)  # type: ignore[arg-type]
        self.compute(opened.row, tokens[opened.length :])
        return opened

    def read(self, row: int) -> list[int]:
        """The tokens that a row's KV was computed from, through its words."""
        words = (self.store.table.row(row) & ~TAG_MASK).tolist()
        return [
            int.from_bytes(ctypes.string_at(words[at // SIZE] + at % SIZE * LAYOUT.row_bytes, 4), "little")
            for at in range(int(self.store.lengths[row]))
        ]

    def far(self, row: int) -> list[bool]:
        return [bool(word & FAR) for word in self.store.table.row(row)]


@contextmanager
def engine(
    device_blocks: int = 16, extents: int = 4, cold: ColdTier | None = None, rows: int = 8
) -> Iterator[Engine]:
    one = Engine(device_blocks, extents, cold, rows)
    try:
        yield one
        one.check()
    finally:
        one.mover.held = one.mover.fails = False
        one.store.close()
        if one.host is not None:
            one.host.close()


def disk(path: Path) -> DiskColdTier:
    return DiskColdTier(path, capacity_bytes=16 << 20)


def array(*numbers: int) -> npt.NDArray[np.int32]:
    return np.array(numbers, dtype=np.int32)


# Opening, sharing, forking


def test_a_prompt_seen_before_is_attached_up_to_its_last_token() -> None:
    with engine() as one:
        first = one.run(PROMPT)
        assert (first.length, first.device) == (0, 0)
        again = one.store.open(PROMPT)
        assert (again.length, again.device, again.host, again.cold) == (12, 12, 0, 0)
        whole_blocks = one.store.open(PROMPT[:12])
        assert whole_blocks.length == 8
        assert one.read(again.row) == PROMPT[:12].tolist()
        assert one.store.pool.refs[one.store.arena.slots_at(one.store.table.row(again.row))].tolist() == [
            3,
            3,
            2,
        ]
        one.check()


def test_roots_and_extra_keys_keep_kv_apart() -> None:
    with engine(32) as one:
        one.run(PROMPT)
        one.run(PROMPT, root=b"s" * 16)
        one.run(PROMPT, extra_keys={1: [b"cat"]})
        assert one.store.open(PROMPT, root=b"t" * 16).length == 0
        assert one.store.open(PROMPT, root=b"s" * 16).length == 12
        assert one.store.open(PROMPT, extra_keys={1: [b"cat"]}).length == 12
        assert one.store.open(PROMPT, extra_keys={1: [b"dog"]}).length == 4


def test_extra_keys_name_also_blocks_that_fill_later_or_sleep_half_full() -> None:
    """The image lies in the last, partly filled block of the prompt."""
    with engine(32) as one:
        for image, more in ((b"cat", array(1, 2, 3)), (b"dog", array(1, 2, 3))):
            row = one.run(PROMPT, extra_keys={3: [image]}).row
            for token in more:
                one.store.reserve(np.array([row]), 1)
                one.store.append(np.array([row]), array(token))
            one.check()
            expected = hash_blocks(np.append(PROMPT, more), SIZE, ROOT, {3: [image]})
            assert one.store._chains.hashes(row) == expected
        cat = one.run(PROMPT, extra_keys={3: [b"cat"]}).row
        sleeping = one.store.sleep(cat)
        assert sleeping.partial == hash_partial(PROMPT[12:], hash_blocks(PROMPT, SIZE, ROOT)[-1], [b"cat"])
        longer = np.append(PROMPT, array(9, 9))
        assert one.store.open(longer, extra_keys={3: [b"dog"]}, partial_at=14).length == 12
        assert one.store.open(longer, extra_keys={3: [b"cat"]}, partial_at=14).length == 14


def test_extra_keys_are_still_known_after_a_nap_in_the_middle_of_the_prompt() -> None:
    with engine() as one:
        opened = one.store.open(PROMPT, extra_keys={1: [b"cat"]})
        one.compute(opened.row, PROMPT[:2])
        opened = one.store.wake(one.store.sleep(opened.row))
        one.compute(opened.row, PROMPT[opened.length :])
        assert one.store._chains.hashes(opened.row) == hash_blocks(PROMPT, SIZE, ROOT, {1: [b"cat"]})


def test_a_fork_shares_every_block_and_copies_the_last_one_when_it_is_written() -> None:
    with engine() as one:
        first = one.run(PROMPT).row
        second = one.store.fork(first)
        third = one.store.fork(first)
        assert one.store.table.row(first).tolist() == one.store.table.row(second).tolist()
        for token, row in enumerate((second, first, third), 1):
            one.compute(row, array(token))
            one.check()
        for token, row in enumerate((second, first, third), 1):
            assert one.read(row) == [*PROMPT.tolist(), token]
        assert one.store.stats.copied_on_write == 2


def test_rows_that_share_a_tail_may_be_reserved_together() -> None:
    with engine() as one:
        rows = [one.run(PROMPT).row]
        rows += [one.store.fork(rows[0]) for _ in range(3)]
        one.store.reserve(np.array(rows), 1)
        tails = one.store.table.words[rows, 3]
        assert len(set(tails.tolist())) == 4
        one.check()


def test_tails_that_cannot_be_copied_stay_shared() -> None:
    with engine(4) as one:
        first = one.run(PROMPT).row
        second = one.store.fork(first)
        with pytest.raises(CapacityError):
            one.store.reserve(np.array([first, second]), 1)
        one.check()
        one.store.close_row(second)
        one.compute(first, array(5))
        assert one.read(first) == [*PROMPT.tolist(), 5]


def test_blocks_computed_twice_at_once_are_kept_once() -> None:
    with engine() as one:
        rows = [one.store.open(PROMPT).row for _ in range(3)]
        for row in rows:
            one.compute(row, PROMPT)
        assert one.store.stats.adopted == 6
        words = [one.store.table.row(row)[:3].tolist() for row in rows]
        assert words[0] == words[1] == words[2]
        assert one.store.pool.available == 16 - 3 - 3


def test_a_prompt_longer_than_the_device_tier_fails_and_leaves_nothing_behind() -> None:
    with engine(2) as one:
        opened = one.store.open(PROMPT)
        with pytest.raises(CapacityError, match="4 blocks wanted in the device tier, 2 of 2 available"):
            one.store.reserve(np.array([opened.row]), len(PROMPT))
        one.check()
        one.store.close_row(opened.row)
        assert one.store.available_blocks == 2


def test_a_full_block_table_says_so_and_takes_no_lease() -> None:
    with engine(rows=1) as one:
        sleeping = one.store.sleep(one.run(PROMPT).row)
        one.store.open(PROMPT)
        with pytest.raises(CapacityError, match="all 1 rows"):
            one.store.open(PROMPT)
        with pytest.raises(CapacityError, match="all 1 rows"):
            one.store.wake(sleeping)
        with pytest.raises(CapacityError, match="all 1 rows"):
            one.store.fork(0)
        one.check()


def test_a_row_is_not_lost_when_attaching_to_it_fails() -> None:
    with engine(rows=2) as one:
        sleeping = one.store.sleep(one.run(PROMPT).row)
        one.store.flush()
        one.store.evict(16)
        assert one.host is not None
        one.host.close()
        with pytest.raises(ClosedError):
            one.store.open(PROMPT)
        with pytest.raises(ClosedError):
            one.store.wake(sleeping)
        assert one.store.table.free_rows == 2
        one.host = None


# Sleeping and waking


def test_a_sequence_wakes_where_its_blocks_lie_and_goes_on() -> None:
    with engine() as one:
        row = one.run(PROMPT).row
        sleeping = one.store.sleep(row)
        assert one.store.available_blocks == 16
        opened = one.store.wake(sleeping)
        assert (opened.length, opened.device) == (14, 14)
        assert one.store.stats.copied_on_write == 0
        one.compute(opened.row, array(7))
        assert one.read(opened.row) == [*PROMPT.tolist(), 7]


def test_a_sequence_wakes_far_when_its_vram_was_taken_and_is_promoted_later() -> None:
    with engine() as one:
        sleeping = one.store.sleep(one.run(PROMPT).row)
        one.store.evict(16)
        opened = one.store.wake(sleeping)
        assert (opened.length, opened.host) == (14, 14)
        assert one.far(opened.row) == [True] * 4
        assert one.read(opened.row) == PROMPT.tolist()
        one.mover.held = True
        assert one.store.promote(opened.row, 8) == 3
        assert one.store.promote(opened.row, 8) == 0
        one.store.poll()
        assert one.far(opened.row) == [True] * 4
        one.check()
        one.mover.held = False
        one.store.poll()
        assert one.far(opened.row) == [False, False, False, True]
        link = one.store.costs.copy.cost  # what that took is known from now on
        assert link is not None
        assert link.seconds(LAYOUT.block_bytes) > 0
        assert one.store.far_blocks(opened.row) == 1
        one.compute(opened.row, array(7))
        assert one.read(opened.row) == [*PROMPT.tolist(), 7]
        assert one.far(opened.row) == [False] * 4


@contextmanager
def woken_far() -> Iterator[tuple[Engine, int]]:
    """An engine and the row of a sequence of three full blocks and a partly filled one, all far."""
    with engine() as one:
        sleeping = one.store.sleep(one.run(PROMPT).row)
        one.store.evict(16)
        row = one.store.wake(sleeping).row
        assert one.far(row) == [True] * 4
        yield one, row


def read_and_install(one: Engine, install: Install) -> None:
    """Do as the attention of a step does."""
    words = one.store.table.words[install.rows, install.columns]
    for word, to in zip(words.tolist(), install.destinations.tolist(), strict=True):
        assert word & FAR
        assert word & INSTALL
        ctypes.memmove(to, word & ~TAG_MASK, LAYOUT.block_bytes)


def test_a_step_installs_what_it_reads_and_rows_read_it_there_when_the_step_is_done() -> None:
    with woken_far() as (one, row):
        install = one.store.start_install(np.array([row]), 8, np.array([row]))
        assert install is not None
        assert install.rows.tolist() == [row] * 3
        assert install.columns.tolist() == [0, 1, 2]
        assert len(set(install.destinations.tolist())) == 3
        one.check()
        assert one.store.available_blocks == 16 - 3
        assert one.store.promote(row, 8) == 0
        assert one.read(row) == PROMPT.tolist()
        read_and_install(one, install)
        one.store.finish_install()
        one.check()
        assert one.store.table.row(row)[:3].tolist() == install.destinations.tolist()
        assert one.far(row) == [False, False, False, True]
        assert one.store.stats.promoted == 3
        one.store.poll()
        one.compute(row, array(7))
        assert one.read(row) == [*PROMPT.tolist(), 7]
        assert one.store.start_install(np.array([row]), 8, np.array([row])) is None


def test_rows_that_share_far_blocks_have_them_installed_once() -> None:
    with woken_far() as (one, row):
        others = [one.store.open(PROMPT).row for _ in range(2)]
        reading, idle = others
        install = one.store.start_install(np.array([row]), 2, np.array([row, reading]))
        assert install is not None
        assert sorted(zip(install.rows.tolist(), install.columns.tolist(), strict=True)) == [
            (row, 0), (row, 1), (reading, 0), (reading, 1),
        ]  # fmt: skip
        assert len(set(install.destinations.tolist())) == 2
        one.check()
        read_and_install(one, install)
        one.store.finish_install()
        one.check()
        # Also the row that was not in the step reads them there.
        assert one.far(row) == [False, False, True, True]
        assert one.far(reading) == one.far(idle) == [False, False, True]
        for other in (row, reading, idle):
            length = int(one.store.lengths[other])
            assert one.read(other) == PROMPT[:length].tolist()


def test_an_install_of_a_step_that_failed_is_undone() -> None:
    with woken_far() as (one, row):
        words = one.store.table.row(row).copy()
        rows = np.array([row])
        ways: list[Callable[[], object]] = [one.store.poll, lambda: one.store.start_install(rows, 0, rows)]
        for undo in ways:
            assert one.store.start_install(rows, 8, rows) is not None
            assert (one.store.table.row(row) & INSTALL).astype(bool).tolist() == [True, True, True, False]
            undo()
            one.check()
            assert np.array_equal(one.store.table.row(row), words)
            assert one.store.available_blocks == 16
        one.store.finish_install()
        assert one.read(row) == PROMPT.tolist()
        assert one.store.stats.promoted == 0
        # The next step may have another one at once.
        assert one.store.start_install(rows, 8, rows) is not None
        install = one.store.start_install(rows, 2, rows)
        assert install is not None
        one.check()
        read_and_install(one, install)
        one.store.finish_install()
        assert one.far(row) == [False, False, True, True]
        assert one.read(row) == PROMPT.tolist()


def test_a_sequence_may_end_fork_or_sleep_before_what_it_installs_is_there() -> None:
    for end in ("close", "sleep", "fork"):
        with woken_far() as (one, row):
            install = one.store.start_install(np.array([row]), 8, np.array([row]))
            assert install is not None
            read_and_install(one, install)
            if end == "fork":
                twin = one.store.fork(row)
                one.check()
                one.store.finish_install()
                assert one.far(twin) == one.far(row) == [False, False, False, True]
                assert one.read(twin) == PROMPT.tolist()
            else:
                sleeping = one.store.sleep(row) if end == "sleep" else None
                if end == "close":
                    one.store.close_row(row)
                one.check()
                one.store.finish_install()
                one.check()
                assert one.store.open(PROMPT).device == 12
                if sleeping is not None:
                    assert one.read(one.store.wake(sleeping).row) == PROMPT.tolist()


def test_there_is_nothing_to_install_without_room_far_blocks_or_host_memory() -> None:
    with woken_far() as (one, row):
        near = one.run(array(1, 2, 3, 4, 5, 6)).row
        assert one.store.start_install(np.array([row]), 0, np.array([row])) is None
        assert one.store.start_install(np.array([row]), -3, np.array([row])) is None
        assert one.store.start_install(np.array([near]), 5, np.array([near, row])) is None
    with engine(extents=0) as one:
        row = one.run(PROMPT).row
        assert one.store.start_install(np.array([row]), 5, np.array([row])) is None
        one.store.finish_install()


def test_a_promotion_whose_row_is_gone_is_kept_for_the_next() -> None:
    with engine() as one:
        sleeping = one.store.sleep(one.run(PROMPT).row)
        one.store.evict(16)
        opened = one.store.wake(sleeping)
        one.mover.held = True
        one.store.promote(opened.row, 8)
        one.store.close_row(opened.row)
        one.check()
        one.mover.held = False
        one.store.poll()
        assert one.store.open(PROMPT).device == 12


def test_a_leased_slot_stays_until_the_step_that_may_read_it_is_done() -> None:
    with engine(extents=1) as one:
        sleeping = one.store.sleep(one.run(PROMPT).row)
        one.store.evict(16)
        assert one.host is not None
        opened = one.store.wake(sleeping)
        words = one.store.table.row(opened.row).copy()
        one.store.close_row(opened.row)
        space = one.host.space(LAYOUT)
        assert space.evict(4) == 0
        held = [ctypes.string_at(int(word) & ~TAG_MASK, 4) for word in words]
        assert held == [PROMPT[at].tobytes() for at in (0, 4, 8, 12)]
        one.store.poll()
        assert space.evict(4) == 4


def test_a_block_that_takes_over_a_partial_ones_place_is_not_taken_for_its_copy() -> None:
    """The snapshot in host memory is of two tokens; the block has four by the time it sleeps again."""
    with engine() as one:
        sleeping = one.store.sleep(one.run(PROMPT).row)
        one.store.flush()
        opened = one.store.wake(sleeping)
        one.compute(opened.row, array(1, 2, 3))
        sleeping = one.store.sleep(opened.row)
        one.store.evict(16)
        opened = one.store.wake(sleeping)
        assert one.far(opened.row) == [True] * 5
        assert one.read(opened.row) == [*PROMPT.tolist(), 1, 2, 3]


def test_waking_twice_gives_two_sequences_that_do_not_disturb_each_other() -> None:
    with engine() as one:
        sleeping = one.store.sleep(one.run(PROMPT).row)
        rows = [one.store.wake(sleeping).row for _ in range(2)]
        for token, row in enumerate(rows):
            one.compute(row, array(token, token))
        for token, row in enumerate(rows):
            assert one.read(row) == [*PROMPT.tolist(), token, token]


def test_a_hole_in_the_middle_costs_what_is_behind_it_and_no_more() -> None:
    with engine(extents=2) as one:
        sleeping = one.store.sleep(one.run(PROMPT).row)
        one.store.evict(16)
        assert one.host is not None
        space = one.host.space(LAYOUT)
        with space.match(sleeping.hashes[:1]), space.match([sleeping.hashes[2]]):
            space.evict(4)
        opened = one.store.wake(sleeping)
        assert (opened.length, opened.host) == (4, 4)
        one.store.poll()
        one.check()
        one.compute(opened.row, PROMPT[4:])
        assert one.read(opened.row) == PROMPT.tolist()
        assert one.store._chains.hashes(opened.row) == list(sleeping.hashes)


def test_near_and_far_blocks_may_alternate_in_a_row() -> None:
    with engine() as one:
        prompt = np.arange(24, dtype=np.int32)
        row = one.run(prompt).row
        one.store.flush()
        sleeping = one.store.sleep(row)
        pool = one.store.pool
        pool.evict(sleeping.places.device_blocks[[1, 2, 4]])
        opened = one.store.wake(sleeping)
        assert one.far(opened.row) == [False, True, True, False, True, False]
        assert one.read(opened.row) == prompt.tolist()
        assert (opened.device, opened.host) == (12, 12)


def test_a_sleeper_from_another_store_is_found_by_its_names_or_not_at_all() -> None:
    with engine() as first, engine() as second:
        sleeping = first.store.sleep(first.run(PROMPT).row)
        second.run(np.arange(14, dtype=np.int32))
        assert second.store.wake(sleeping).length == 0
        second.check()
        second.run(PROMPT)
        opened = second.store.wake(sleeping)
        assert second.read(opened.row) == PROMPT[: opened.length].tolist()


# Room


def test_vram_that_is_taken_again_was_copied_below_before() -> None:
    with engine(4, extents=4) as one:
        sleeping = [one.store.sleep(one.run(PROMPT + 1000 * at).row) for at in range(3)]
        assert one.store.stats.dropped == 0
        for at, sleeper in enumerate(sleeping):
            opened = one.store.wake(sleeper)
            assert opened.length == 14
            assert one.read(opened.row) == (PROMPT + 1000 * at).tolist()
            one.store.close_row(opened.row)
            one.store.poll()


def test_what_host_memory_let_go_of_meanwhile_is_copied_again_before_vram_drops_it() -> None:
    """A block that is in use in VRAM all the time looks cold to host memory."""
    with engine(8, extents=1) as one:
        row = one.run(PROMPT[:8]).row
        one.store.flush()
        assert one.host is not None
        assert one.host.space(LAYOUT).evict(4) == 2
        sleeping = one.store.sleep(row)
        one.store.evict(8)
        opened = one.store.wake(sleeping)
        assert (opened.length, opened.host) == (8, 8)
        assert one.read(opened.row) == PROMPT[:8].tolist()


def test_writing_blocks_back_does_not_spare_the_coldest_at_the_cost_of_others() -> None:
    with engine(8, extents=2) as one:
        for at in range(2):
            one.store.close_row(one.run(np.arange(16, dtype=np.int32) + 100 * at).row)
        assert one.store.pool.free == 0
        one.store.evict(2)
        assert one.store.open(np.arange(17, dtype=np.int32)).device == 8
        assert one.store.open(np.arange(17, dtype=np.int32) + 100).device == 16


def test_dropping_what_nothing_below_has_room_for_is_counted() -> None:
    with engine(4, extents=0) as one:
        one.store.close_row(one.run(PROMPT).row)
        one.store.close_row(one.run(PROMPT + 50).row)
        assert one.store.stats.dropped == 3
        assert one.store.wake(one.store.sleep(one.run(PROMPT + 50).row)).length == 14


def test_a_sequence_alone_spills_its_oldest_blocks_and_reads_them_far() -> None:
    with engine(4, extents=4) as one:
        row = one.run(PROMPT).row
        assert one.store.spill(row, 2) == 2
        assert one.far(row) == [True, True, False, False]
        one.compute(row, array(*range(8)))
        assert one.read(row) == [*PROMPT.tolist(), *range(8)]
        other = one.store.fork(row)
        assert one.store.spill(row, 9) == 0
        one.store.close_row(other)


def test_copies_that_host_memory_let_go_of_are_made_anew_for_a_spill() -> None:
    with engine(4) as one:
        row = one.run(PROMPT).row
        one.store.flush()
        assert one.host is not None
        assert one.host.space(LAYOUT).evict(8) == 3
        assert one.store.spill(row, 2) == 2
        assert one.far(row) == [True, True, False, False]
        assert one.read(row) == PROMPT.tolist()


def test_blocks_on_their_way_below_are_waited_for_where_they_are_all_there_is() -> None:
    """Who puts a sequence to sleep to make room must not have to put the next one to sleep as well."""
    with engine(4) as one:
        row = one.run(PROMPT).row
        one.mover.held = True
        sleeping = one.store.sleep(row)
        assert one.store.available_blocks == 4
        assert one.store.cached_blocks(sleeping) == 4
        row = one.store.open(PROMPT + 50).row
        one.store.reserve(np.array([row]), 14)
        one.check()


def test_a_step_waits_once_for_room_that_does_not_come(tmp_path: Path) -> None:
    """Host memory is full, and the cold tier below it hangs: that costs KV, and not every step's time."""

    cold = TroubledDisk(tmp_path)
    cold.pause, cold.fault = 2.0, ColdStatus.LATE
    with engine(4, extents=1, cold=cold) as one:
        began = time.monotonic()
        for at in range(10):
            one.store.close_row(one.run(PROMPT + 1000 * at).row)
            one.store.poll()
        assert time.monotonic() - began < 1.5
        assert one.store.stats.dropped > 0


def test_a_flush_waits_for_room_that_is_coming_though_a_batch_was_denied_just_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The arena is slow to come, and a batch in the background finds none of it."""
    denied = threading.Event()
    allocate = PinnedArena._try_allocate

    def allocate_late(arena: PinnedArena, extent: int) -> MemoryUnavailableError | None:
        assert denied.wait(30.0)
        return allocate(arena, extent)

    monkeypatch.setattr(PinnedArena, "_try_allocate", allocate_late)
    try:
        with HostStore(4 * EXTENT, extent_bytes=EXTENT) as host:
            store = TieredStore(LAYOUT, 8, root=ROOT, host=host)
            opened = store.open(PROMPT)
            store.reserve(np.array([opened.row]), len(PROMPT))
            store.advance(opened.row, PROMPT)
            store.sleep(opened.row)
            assert host.stats.denied > 0
            threading.Timer(0.1, denied.set).start()
            store.flush()
            assert store.stats.written_back == store.stats.published == 4
            store.close()
    finally:
        denied.set()


@pytest.mark.parametrize("outcome", ["abort", "commit"])
def test_blocks_that_others_are_writing_are_tried_again_until_they_are_below(outcome: str) -> None:
    with engine() as one:
        assert one.host is not None
        space = one.host.space(LAYOUT)
        other = space.reserve(hash_blocks(PROMPT, SIZE, ROOT))
        row = one.run(PROMPT).row
        one.store.flush()
        one.check()
        assert one.store.stats.written_back == 0
        if outcome == "commit":
            for at, view in enumerate(map(space.view, other.slots.tolist())):
                words = one.store.table.row(row)
                view[:] = ctypes.string_at(int(words[at]), LAYOUT.block_bytes)
            other.commit()
        else:
            other.abort()
        end = time.monotonic() + 5.0
        while not one.store.pool.host_generations[
            one.store._device.blocks_at(one.store.table.row(row)[:3])
        ].all():
            assert time.monotonic() < end, "the blocks were not tried again"
            one.store.poll()
        assert one.store.stats.written_back == (3 if outcome == "abort" else 0)
        sleeping = one.store.sleep(row)
        one.store.evict(16)
        assert one.read(one.store.wake(sleeping).row) == PROMPT.tolist()


# Copies that fail


def test_a_write_back_that_fails_gives_its_slots_and_blocks_back() -> None:
    with engine() as one:
        one.mover.fails = True
        row = one.run(PROMPT).row
        with pytest.raises(KernelError, match="on fire"):
            one.store.flush()
        one.check()
        one.mover.fails = False
        one.store.flush()
        sleeping = one.store.sleep(row)
        one.store.evict(16)
        assert one.read(one.store.wake(sleeping).row) == PROMPT.tolist()


def test_a_write_back_that_fails_in_the_background_is_told_by_the_next_poll_once() -> None:
    with engine() as one:
        row = one.run(PROMPT).row
        one.mover.held = True
        one.store.sleep(row)
        one.mover.held, one.mover.fails = False, True
        with pytest.raises(KernelError, match="on fire"):
            one.store.poll()
        one.mover.fails = False
        one.store.poll()
        one.check()
        assert one.store.available_blocks == 16


def test_slots_that_host_memory_took_back_cost_their_copies_and_no_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engine() as one:
        for first in (0, 100):
            one.mover.held = True
            sleeping = one.store.sleep(one.run(PROMPT + first).row)
            write_back = one.store._device._write_back
            assert write_back is not None
            late = write_back._writes[0].reservation
            late.space.abort(late.slots[:1], late.generations[:1])
            one.mover.held = False
            one.store.poll()
            one.check()
            one.store.evict(16)
            assert one.read(one.store.wake(sleeping).row) == (PROMPT + first).tolist()
        assert one.store.stats.refused == 8
        assert one.store.stats.dropped == 0
        assert len(caplog.records) == 1


def test_a_promotion_that_fails_leaves_the_row_reading_far() -> None:
    with engine() as one:
        sleeping = one.store.sleep(one.run(PROMPT).row)
        one.store.evict(16)
        opened = one.store.wake(sleeping)
        one.mover.fails = True
        with pytest.raises(KernelError, match="on fire"):
            one.store.promote(opened.row, 8)
        one.check()
        assert one.read(opened.row) == PROMPT.tolist()
        one.mover.fails = False
        assert one.store.promote(opened.row, 8) == 3
        assert one.read(opened.row) == PROMPT.tolist()


def test_a_tail_that_cannot_be_copied_for_a_failing_mover_stays_shared() -> None:
    with engine() as one:
        row = one.run(PROMPT).row
        other = one.store.fork(row)
        one.mover.fails = True
        with pytest.raises(KernelError):
            one.store.reserve(np.array([other]), 1)
        one.check()
        one.mover.fails = False
        one.compute(other, array(1))
        assert one.read(row) == PROMPT.tolist()


def test_a_store_closes_also_when_its_last_copies_fail() -> None:
    one = Engine(16, 4, None)
    one.mover.fails = True
    one.run(PROMPT)
    with pytest.raises(KernelError):
        one.store.close()
    with pytest.raises(ClosedError):
        _ = one.store.arena.slab
    assert one.host is not None
    one.host.check_integrity()
    one.host.close()


# Host memory that the device sees otherwise


def test_far_words_are_the_devices_addresses_where_these_are_not_the_hosts() -> None:
    with engine() as one:
        assert one.host is not None
        one.host.arena._device_delta = delta = 1 << 30
        sleeping = one.store.sleep(one.run(PROMPT).row)
        one.store.evict(16)
        opened = one.store.wake(sleeping)
        other = one.store.wake(one.store.sleep(one.store.fork(opened.row)))
        one.check()
        for row in (opened.row, other.row):
            words = one.store.table.row(row)
            assert one.far(row) == [True] * 4
            held = [ctypes.string_at(int(word & ~TAG_MASK) - delta, 4) for word in words]
            assert held == [PROMPT[at].tobytes() for at in (0, 4, 8, 12)]
        one.compute(other.row, array(7))
        assert one.store.promote(other.row, 8) == 3
        assert one.read(other.row) == [*PROMPT.tolist(), 7]


def test_what_was_copied_up_because_the_device_cannot_read_it_in_place_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine() as one:
        sleeping = one.store.sleep(one.run(PROMPT).row)
        one.store.evict(16)
        monkeypatch.setattr(HostSpace, "readable_in_place", lambda _, slots: np.zeros(len(slots), np.bool_))
        opened = one.store.wake(sleeping)
        assert one.far(opened.row) == [False] * 4
        other = one.run(PROMPT)
        assert other.device == 12
        assert one.store.sharing().saved_blocks == 3
        one.compute(opened.row, array(7))
        assert one.read(opened.row) == [*PROMPT.tolist(), 7]
        assert one.read(other.row) == PROMPT.tolist()
        one.check()
        assert one.store.stats.promoted == 4


# The cold tier and sessions


def test_a_session_goes_on_in_a_store_that_never_saw_it(tmp_path: Path) -> None:
    with engine(cold=disk(tmp_path)) as one:
        sleeping = one.store.sleep(one.run(PROMPT, extra_keys={3: [b"cat"]}).row)
        assert one.store.save_session("chat", sleeping, np.append(PROMPT, array(7)))
        one.store.flush()
        assert one.host is not None
        assert one.host.flush() == 0
    with engine(cold=disk(tmp_path)) as one:
        record = one.store.find_session("chat")
        assert record is not None
        assert record.tokens.tolist() == [*PROMPT.tolist(), 7]
        opened = one.store.wake(record.sleeping(SIZE), cold_deadline=5.0)
        assert (opened.length, opened.cold) == (14, 14)
        one.compute(opened.row, array(7))
        assert one.read(opened.row) == [*PROMPT.tolist(), 7]
        assert one.store.find_session("other chat") is None


def test_sessions_of_different_roots_may_have_the_same_name(tmp_path: Path) -> None:
    other = b"s" * 16
    with engine(cold=disk(tmp_path)) as one:
        for root, prompt in ((ROOT, PROMPT), (other, PROMPT + 50)):
            sleeping = one.store.sleep(one.run(prompt, root=root).row)
            one.store.save_session("chat", sleeping, prompt)
        for root, prompt in ((ROOT, PROMPT), (other, PROMPT + 50)):
            record = one.store.find_session("chat", root=root)
            assert record is not None
            assert record.root == root
            assert record.tokens.tolist() == prompt.tolist()
            assert one.read(one.store.wake(record.sleeping(SIZE)).row) == prompt.tolist()


@pytest.mark.parametrize("data", [b"", b"\x93\x01", b"\x01", b"\xff" * 40, bytes(100)])
def test_what_is_no_session_record_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(RecordError, match="not a session record"):
        SessionRecord.unpack(data)


@pytest.mark.parametrize("keys", [[[-1, b"x"]], [[0, 5]], [[0, 10**15]], [["0", b"x"]], [5], 5])
def test_a_session_record_with_extra_keys_that_are_none_is_no_record(keys: object) -> None:
    data = msgpack.packb([1, ROOT, 0, b"", keys], use_bin_type=True)
    with pytest.raises(RecordError, match="not a session record"):
        SessionRecord.unpack(data)


def test_every_truncation_and_every_flipped_byte_of_a_record_is_refused_or_harmless() -> None:
    record = SessionRecord(ROOT, 14, PROMPT, {3: (b"cat",)})
    packed = record.pack()
    assert SessionRecord.unpack(packed).extra_keys == {3: (b"cat",)}
    for at in range(len(packed)):
        for broken in (packed[:at], packed[:at] + bytes([packed[at] ^ 0x81]) + packed[at + 1 :]):
            try:
                found = SessionRecord.unpack(broken)
            except RecordError:
                continue
            assert 0 <= found.length <= len(found.tokens)
            found.sleeping(SIZE)


def test_a_wake_does_not_wait_for_blocks_that_this_very_thread_is_writing(tmp_path: Path) -> None:
    """The first block is in the cold tier alone, the second on its way down until the next poll."""
    with engine(cold=disk(tmp_path)) as one:
        sleeping = one.store.sleep(one.run(PROMPT[:4]).row)
        assert one.host is not None
        one.store.flush()
        one.host.flush()
        row = one.run(PROMPT).row
        one.mover.held = True
        longer = one.store.sleep(row)
        one.store.pool.evict(longer.places.device_blocks[:1])
        one.host.space(LAYOUT).evict(1)
        began = time.monotonic()
        opened = one.store.wake(longer, cold_deadline=3.0)
        assert time.monotonic() - began < 1.5
        assert (opened.device, opened.cold, opened.length) == (10, 4, 14)
        assert sleeping.hashes == longer.hashes[:1]
        assert one.read(opened.row) == PROMPT.tolist()


def test_a_load_ahead_of_open_serves_it_from_host_memory(tmp_path: Path) -> None:
    with engine(cold=disk(tmp_path)) as one:
        one.store.close_row(one.run(PROMPT).row)
        one.store.flush()
        assert one.host is not None
        one.host.flush()
        one.store.evict(16)
        one.host.space(LAYOUT).evict(16)
        load = one.store.start_load(one.store.name_prompt(PROMPT))
        assert load is not None
        assert load.wait(5.0)
        assert load.loaded == 3
        one.host.space(LAYOUT).evict(16)
        assert one.store.open(PROMPT).host == 12
        load.release()
        load.release()
        assert one.store.start_load(one.store.name_prompt(PROMPT[:3])) is None


# Events, settings, integrity


def test_events_tell_of_the_device_tier() -> None:
    heard: list[BlockEvent] = []
    with engine() as one:
        one.store.subscribe(heard.append)
        one.store.close_row(one.run(PROMPT).row)
        one.store.evict(1)
    names = hash_blocks(PROMPT, SIZE, ROOT)
    assert [(event.kind, event.tier, event.hashes) for event in heard] == [
        (EventKind.STORED, "device", tuple(names)),
        (EventKind.REMOVED, "device", (names[2],)),
    ]


def test_sizes_that_make_no_sense_are_named() -> None:
    with pytest.raises(ConfigError, match="device_blocks"):
        TieredStore(LAYOUT, 0, root=ROOT)
    with pytest.raises(ConfigError, match="max_sequences"):
        TieredStore(LAYOUT, 1, root=ROOT, max_sequences=0)
    with pytest.raises(ConfigError, match="policy"):
        TieredStore(LAYOUT, 1, root=ROOT, policy="magic")


def test_blocks_wanted_is_what_reserve_takes() -> None:
    with engine(32) as one:
        rows = np.array([one.run(PROMPT[:count]).row for count in (3, 4, 9, 14)])
        for counts in (1, 4, np.array([1, 9, 0, 3])):
            wanted = one.store.blocks_wanted(rows, counts)
            before = one.store.available_blocks
            one.store.reserve(rows, counts)
            assert before - one.store.available_blocks == wanted
        one.check()


@pytest.mark.parametrize("broken", ["reference", "far", "twice", "short", "count"])
def test_integrity_names_what_does_not_agree(broken: str) -> None:
    with engine() as one:
        store, far = one.store, one.store._far
        assert far is not None
        row = one.run(PROMPT).row
        if broken == "reference":
            undo = store.pool.refs.copy()
            store.pool.refs[store.arena.slots_at(store.table.row(row))[0]] += 1
        elif broken == "far":
            far._refs[0] += 1
        elif broken == "twice":
            kept = store.table.row(row).copy()
            store.table.words[row, 1] = store.table.words[row, 0]
        elif broken == "short":
            store.table.truncate(row, 2)
        else:
            far.counts[row] += 1
        with pytest.raises(IntegrityError):
            store.check_integrity()
        if broken == "reference":
            store.pool.refs[:] = undo
        elif broken == "far":
            far._refs[0] -= 1
        elif broken == "twice":
            store.table.words[row, : len(kept)] = kept
        elif broken == "short":
            store.table.counts[row] = 4
        else:
            far.counts[row] -= 1
