"""What is read of an arena while its owner goes on: records, what fills it, trees of prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvpager.api.admin.forest import Tree, grow
from kvpager.api.admin.models import PrefixOrder
from kvpager.api.admin.occupancy import KINDS, look
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.lineage import Lineage
from kvpager.kvstore.records_view import view_spaces
from kvpager.tests.raw_client import LAYOUT
from kvpager.tiers.arena_file import ArenaFile
from kvpager.tiers.errors import IntegrityError
from kvpager.tiers.layout import KVLayout
from kvpager.tiers.record_file import ArenaIdentity, ArraySpec, RecordFile, RecordView, SectionKind

EXTENT = 1 << 20
ODD = KVLayout(1, 1, 64, block_size=48, dtype="float16")
"""Blocks of 12 KiB, which do not fill an extent."""
SPECS = [ArraySpec(np.int64, 5)]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostStore]:
    arena = ArenaFile(str(tmp_path / "arena"))
    with HostStore(8 * EXTENT, arena=arena, extent_bytes=EXTENT) as made:
        yield made


@pytest.fixture
def view(host: HostStore) -> Iterator[RecordView]:
    records = host.records
    assert records is not None
    made = RecordFile.read_only(records.path)
    yield made
    made.close()


def chain(number: int, count: int, before: list[bytes] | None = None) -> list[bytes]:
    """Hashes of a chain, which goes on after another."""
    rng = np.random.default_rng(number)
    return [*(before or []), *(rng.bytes(16) for _ in range(count))]


def put(host: HostStore, hashes: list[bytes], layout: KVLayout = LAYOUT, **of: str) -> Any:
    """Have blocks of a chain in host memory; returns their space."""
    space = host.space(layout, **of)
    blocks = np.zeros((len(hashes), layout.block_bytes), np.uint8)
    assert space.put(hashes, blocks, wait=5.0, lineage=Lineage.of_chain(hashes)) == len(hashes)
    return space


# Records


def test_a_view_follows_sections_as_they_come_and_go(tmp_path: Path) -> None:
    path = str(tmp_path / "records")
    file = RecordFile.create(path, ArenaIdentity(1, 2, 8 << 20, 1 << 20))
    view = RecordFile.read_only(path)
    assert view.sections(SectionKind.GROUP) == []
    first, second = (file.add(SectionKind.GROUP, name, SPECS) for name in (b"first", b"second"))
    second.arrays(SPECS)[0][:] = 7
    seen = view.sections(SectionKind.GROUP)
    assert [section.about for section in seen] == [b"first", b"second"]
    (numbers,) = seen[1].arrays(SPECS)
    assert numbers.tolist() == [7] * 5
    with pytest.raises(ValueError, match="read-only"):
        numbers[0] = 1
    file.remove(first)
    assert [view.has(section) for section in seen] == [False, True]
    file.add(SectionKind.GROUP, b"third", SPECS)
    assert not view.has(seen[0])
    assert [section.about for section in view.sections(SectionKind.GROUP)] == [b"third", b"second"]
    view.close()
    file.close()
    assert numbers.tolist() == [7] * 5


def test_a_view_believes_nothing_that_is_not_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "records"
    file = RecordFile.create(str(path), ArenaIdentity(1, 2, 8 << 20, 1 << 20))
    for name in (b"a", b"b", b"c"):
        file.add(SectionKind.SPACE, name, SPECS)
    view = RecordFile.read_only(str(path))
    file._table["offset"][0] = 1 << 60
    file._table["crc"][1] ^= 1
    assert [section.about for section in view.sections(SectionKind.SPACE)] == [b"c"]
    view.close()
    file.close()
    for text, said in ((b"x" * 8192, "cut short"), (b"x" * (1 << 20), "none of kvpager's")):
        path.write_bytes(text)
        with pytest.raises(IntegrityError, match=said):
            RecordFile.read_only(str(path))
    with pytest.raises(IntegrityError, match="cannot be read"):
        RecordFile.read_only(str(tmp_path / "absent"))


def test_a_view_sees_what_is_committed_and_nothing_else(host: HostStore, view: RecordView) -> None:
    hashes = chain(1, 6)
    space = put(host, hashes, tenant="acme")
    reservation = space.reserve(chain(2, 3))
    (seen,) = view_spaces(view)
    assert (seen.id, seen.tenant, seen.layout) == (space.id, "acme", LAYOUT)
    blocks = seen.residents()
    assert blocks is not None
    assert {name.tobytes() for name in blocks.hashes} == set(hashes)
    order = np.argsort(blocks.depths)
    assert blocks.depths[order].tolist() == [1, 2, 3, 4, 5, 6]
    assert [name.tobytes() for name in blocks.hashes[order]] == hashes
    reservation.commit()
    space.purge(hashes[3:])
    again = seen.residents()
    assert again is not None
    assert {name.tobytes() for name in again.hashes} == {*hashes[:3], *chain(2, 3)}


# What fills the arena


def test_an_empty_arena_is_vacant(host: HostStore, view: RecordView) -> None:
    seen = look(view)
    assert (seen.spaces, seen.owned_extents, seen.remainder_bytes) == ([], 0, 0)
    assert (seen.free_runs.count, seen.free_runs.largest_bytes) == (1, 8 * EXTENT)
    assert not seen.sums.kinds.any()


def test_totals_and_the_map_are_what_a_loop_over_slots_finds(host: HostStore, view: RecordView) -> None:
    first = put(host, chain(1, 300))
    second = put(host, chain(2, 50), ODD, tenant="odd")
    first.pin(chain(1, 20))
    first.purge(chain(1, 300)[100:150])
    reservation = second.reserve(chain(3, 5))
    lease = first.match(chain(1, 10))
    seen = look(view)
    names = [space.tenant for space in seen.spaces]
    totals = dict(zip(names, seen.totals, strict=True))
    # Leases of this very process are in no client's claims.
    assert (totals[""].pinned, totals[""].idle, totals[""].leased) == (20, 230, 0)
    assert (totals["odd"].idle, totals["odd"].reserved) == (50, 5)
    assert totals[""].dirty == 250
    uses = {space.tenant: space.use() for space in view_spaces(view)}
    extents = {tenant: len(use.extents) for tenant, use in uses.items() if use is not None}
    assert seen.owned_extents == sum(extents.values())
    assert seen.remainder_bytes == extents["odd"] * (EXTENT % ODD.block_bytes)
    for cells in (1, 5, 8, 100, 4096):
        sums = seen.sums.coarser(cells)
        kinds = dict(zip(KINDS, sums.kinds.sum(axis=1), strict=True))
        assert kinds["idle"] == pytest.approx(230 * LAYOUT.block_bytes + 50 * ODD.block_bytes)
        assert kinds["pinned"] == pytest.approx(20 * LAYOUT.block_bytes)
        assert kinds["reserved"] == pytest.approx(5 * ODD.block_bytes)
        assert sums.kinds.sum() == pytest.approx(seen.owned_extents * EXTENT)
        assert sums.owners.sum() == pytest.approx(250 * LAYOUT.block_bytes + 55 * ODD.block_bytes)
        assert sums.part_bytes * sums.kinds.shape[1] >= 8 * EXTENT
    reservation.abort()
    lease.release()


def test_free_stretches_go_over_the_ends_of_extents(host: HostStore, view: RecordView) -> None:
    count = EXTENT // LAYOUT.block_bytes
    hashes = chain(4, 2 * count)
    space = put(host, hashes)
    blocks = view_spaces(view)[0].residents()
    assert blocks is not None
    by_slot = dict(zip(blocks.slots.tolist(), [name.tobytes() for name in blocks.hashes], strict=True))
    assert sorted(by_slot) == list(range(2 * count))
    # A hole in the first extent, and the end of the second with all that follows.
    space.purge([by_slot[slot] for slot in (3, 4, 5, *range(2 * count - 7, 2 * count))])
    runs = look(view).free_runs
    assert (runs.count, runs.largest_bytes) == (2, 7 * LAYOUT.block_bytes + 6 * EXTENT)
    space.purge([by_slot[slot] for slot in range(count - 2, count + 1)])
    assert look(view).free_runs.count == 3


# Trees


def trees(view: RecordView) -> Tree:
    (tree,) = grow(view)
    return tree


def test_a_tree_knows_what_continues_what(host: HostStore, view: RecordView) -> None:
    trunk = chain(1, 4)
    left, right = chain(2, 3, trunk), chain(3, 5, trunk)
    twig = chain(4, 2, right[:6])
    alone = chain(5, 1)
    for one in (left, right, twig, alone):
        put(host, one)
    tree = trees(view)
    nodes = {name: tree.find(name) for name in (*left, *right, *twig, *alone)}
    assert None not in nodes.values()
    assert tree.find(bytes(16)) is None
    at = {name: node for name, node in nodes.items() if node is not None}
    assert tree.names(tree.chain(at[twig[-1]])) == twig
    assert tree.leading([*right, bytes(16), *left]) == len(right)
    assert [int(tree.continuations[at[name]]) for name in trunk] == [3] * 4
    assert int(tree.children[at[trunk[-1]]]) == 2
    assert set(tree.names(tree.own(at[left[-1]]))) == set(left[4:])
    assert set(tree.names(tree.own(at[right[4]]))) == {*right[4:], *twig[6:]}
    assert set(tree.names(tree.own(at[trunk[0]]))) == {*left, *right, *twig}
    assert [int(tree.own_count[node]) for node in range(tree.count)] == [
        len(tree.own(node)) for node in range(tree.count)
    ]
    ranked = tree.ranked
    largest, shared = (tree.names(ranked[order].nodes) for order in (PrefixOrder.LARGEST, PrefixOrder.SHARED))
    assert largest == [right[-1], twig[-1], left[-1], alone[-1]]
    assert shared == [trunk[-1], right[5]]


def test_random_trees_count_as_loops_over_them_do(host: HostStore, view: RecordView) -> None:
    rng = np.random.default_rng(0)
    chains = [chain(0, 3)]
    for number in range(1, 40):
        before = chains[int(rng.integers(len(chains)))]
        chains.append(chain(number, int(rng.integers(1, 6)), before[: int(rng.integers(1, len(before) + 1))]))
    for one in chains:
        put(host, one)
    tree = trees(view)
    parent = {name: (one[at - 1] if at else None) for one in chains for at, name in enumerate(one)}
    children: dict[bytes, list[bytes]] = {name: [] for name in parent}
    for name, above in parent.items():
        if above is not None:
            children[above].append(name)

    def below(name: bytes) -> set[bytes]:
        return {name}.union(*(below(one) for one in children[name]))

    for name in parent:
        node = tree.find(name)
        assert node is not None
        ends = sum(not children[one] for one in below(name))
        assert int(tree.continuations[node]) == ends
        own, above = below(name), parent[name]
        while above is not None and len(children[above]) == 1:
            own.add(above)
            above = parent[above]
        assert set(tree.names(tree.own(node))) == own
        assert int(tree.own_count[node]) == len(own)


def test_a_tree_without_lineage_is_of_single_blocks(host: HostStore, view: RecordView) -> None:
    hashes = chain(1, 5)
    space = host.space(LAYOUT)
    with space.reserve(hashes) as reservation:
        reservation.commit()
    tree = trees(view)
    assert (tree.parent == tree.count).all()
    assert tree.own_count.tolist() == [1] * 5


def test_pins_that_others_rely_on_are_told_apart(host: HostStore, view: RecordView) -> None:
    trunk = chain(1, 3)
    left, right = chain(2, 2, trunk), chain(3, 2, trunk)
    space = put(host, left)
    put(host, right)
    space.pin(left)
    space.pin(right[3:])
    tree = trees(view)
    node = tree.find(left[-1])
    assert node is not None
    assert set(tree.names(tree.pinned_alone(node))) == set(left[3:])
    space.unpin(right[3:])
    tree = trees(view)
    node = tree.find(left[-1])
    assert node is not None
    assert set(tree.names(tree.pinned_alone(node))) == set(left)
