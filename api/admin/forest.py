"""The prefixes that are resident, as trees: what continues what, how often, and what only one prompt has.

A space's blocks are the nodes; a block's parent is the one before it in its chain, found by the first 8 bytes
of its hash. All of it is array operations, over all blocks or over all of one depth: a million blocks take
some tenths of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ...kvstore.records_view import Residents, SpaceView, view_spaces
from ...tiers.record_file import RecordView
from .models import PrefixOrder
from .occupancy import leases_of

__all__ = ["MOST_RANKED", "Ranked", "Tree", "grow"]

_Nodes: TypeAlias = npt.NDArray[np.int64]
_WORD: Final = np.dtype("<u8")
MOST_RANKED: Final = 1 << 16
"""Prefixes of a space that are listed in one order."""


@dataclass(frozen=True, eq=False)
class Ranked:
    """Prefixes in an order.

    Args:
        nodes: int64 [n]; by `values`, the largest first, then by their hashes' first 8 bytes.
        values: int64 [n], what they are ranked by.
        words: uint64 [n], these bytes as a big-endian number, which sorts as the hashes do.
    """

    nodes: _Nodes
    values: npt.NDArray[np.int64]
    words: npt.NDArray[np.uint64]

    def place(self, value: int, name: bytes) -> int:
        """Where the first one stands that is not ranked before this value and hash."""
        start = int(np.searchsorted(-self.values, -value))
        stop = int(np.searchsorted(-self.values, -value, side="right"))
        word = np.frombuffer(name, ">u8", 1)[0].astype(np.uint64)
        return start + int(np.searchsorted(self.words[start:stop], word))


class Tree:
    """The resident blocks of one space. Nodes are numbers from 0 to `count` - 1; `count` stands for no node.

    Args:
        space: the space.
        blocks: its committed blocks.
        leases: int32 [capacity], leases of each slot; None: there are none.

    Attributes:
        parent: int64 [count], the node before each; `count` where that is not resident, not known or not
            there.
        references: int32 [count], leases of each.
        children: int64 [count], nodes that continue each directly.
    """

    def __init__(
        self, space: SpaceView, blocks: Residents, leases: npt.NDArray[np.int32] | None = None
    ) -> None:
        self.space = space
        self.blocks = blocks
        self.count = len(blocks.slots)
        self.references = np.zeros(self.count, np.int32) if leases is None else leases[blocks.slots]
        words = np.ascontiguousarray(blocks.hashes).view(_WORD)[::2]
        self._order = np.argsort(words, kind="stable")
        self._words = words[self._order]
        self.parent = self._parents()
        self.children = np.bincount(self.parent, minlength=self.count + 1)[: self.count]

    def find(self, name: bytes) -> int | None:
        """The node of a hash; None where it is not resident."""
        word = np.frombuffer(name, _WORD, 1)[0]
        at = int(np.searchsorted(self._words, word))
        while at < self.count and self._words[at] == word:
            node = int(self._order[at])
            if self.name(node) == name:
                return node
            at += 1
        return None

    def leading(self, names: Sequence[bytes]) -> int:
        """How many of the first of these are resident."""
        return next((at for at, name in enumerate(names) if self.find(name) is None), len(names))

    def name(self, node: int) -> bytes:
        """The hash of a node."""
        name: bytes = self.blocks.hashes[node].tobytes()
        return name

    def names(self, nodes: Sequence[int] | _Nodes) -> list[bytes]:
        """The hashes of nodes."""
        names: list[bytes] = self.blocks.hashes[np.asarray(nodes, dtype=np.int64)].tolist()
        return names

    def chain(self, node: int) -> list[int]:
        """The nodes from the first one that is known to this one."""
        nodes = [node]
        parent = self.parent
        while (before := int(parent[nodes[-1]])) < self.count:
            nodes.append(before)
        return nodes[::-1]

    def own(self, node: int) -> list[int]:
        """What no other prefix has: what comes before it and leads nowhere else, itself, and what continues
        it.

        In the order of their depths, so that a prefix's beginning comes first.
        """
        before = self.chain(node)[:-1]
        shared = 0
        while before[shared:] and (self.children[before[shared:]] > 1).any():
            shared += 1 + int(np.flatnonzero(self.children[before[shared:]] > 1)[-1])
        inside = np.zeros(self.count + 1, dtype=np.bool_)
        inside[node] = True
        depths = self.blocks.depths
        for level in self._levels:
            if depths[level[0]] > depths[node]:
                inside[level] = inside[self.parent[level]]
        after = np.flatnonzero(inside)
        return [*before[shared:], *after[np.argsort(depths[after], kind="stable")].tolist()]

    def pinned_alone(self, node: int) -> list[int]:
        """The pinned nodes of a chain up to where another pinned block continues it."""
        pinned = np.append(self.blocks.pins > 0, False)
        following = np.bincount(self.parent[pinned[:-1]], minlength=self.count + 1)
        found: list[int] = []
        for one in self.chain(node)[::-1]:
            # The block that was looked at last is one that continues this one, and not another.
            if following[one] > (bool(found) and pinned[found[-1]]):
                break
            if pinned[one]:
                found.append(one)
        return found

    @cached_property
    def _sums(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """int64 [count] each: blocks and ends of chains that continue each node, itself among them."""
        blocks = np.ones(self.count + 1, dtype=np.int64)
        ends = np.append(self.children == 0, False).astype(np.int64)
        for level in self._levels[::-1]:
            before = self.parent[level]
            np.add.at(blocks, before, blocks[level])
            np.add.at(ends, before, ends[level])
        return blocks[: self.count], ends[: self.count]

    @property
    def continuations(self) -> npt.NDArray[np.int64]:
        """int64 [count]: ends of chains that begin with each."""
        return self._sums[1]

    @cached_property
    def own_count(self) -> npt.NDArray[np.int64]:
        """int64 [count]: how many nodes `own` of each has."""
        alone = np.append(self.children == 1, False)
        before = np.zeros(self.count + 1, dtype=np.int64)
        for level in self._levels:
            parents = self.parent[level]
            before[level] = np.where(alone[parents], before[parents] + 1, 0)
        return self._sums[0] + before[: self.count]

    @cached_property
    def _levels(self) -> list[_Nodes]:
        """Nodes of each depth that have a parent, by ascending depth."""
        nodes = np.flatnonzero(self.parent < self.count)
        depths = self.blocks.depths[nodes]
        order = np.argsort(depths, kind="stable")
        starts = np.flatnonzero(np.diff(depths[order])) + 1
        return [level for level in np.split(nodes[order], starts) if len(level)]

    @cached_property
    def ranked(self) -> dict[PrefixOrder, Ranked]:
        """Prefixes by each order. One stands for itself where prompts end or part, or fewer of them go on."""
        hits = self.blocks.hits.astype(np.int64)
        following = np.zeros(self.count + 1, dtype=np.int64)
        np.maximum.at(following, self.parent, hits)
        ends = np.flatnonzero(self.children == 0)
        return {
            PrefixOrder.LARGEST: self._rank(ends, self.blocks.depths[ends].astype(np.int64)),
            PrefixOrder.HOTTEST: self._rank_where(
                (self.children == 0) | (hits > following[: self.count]), hits
            ),
            PrefixOrder.SHARED: self._rank_where(self.children > 1, self.continuations),
        }

    def _rank_where(self, chosen: npt.NDArray[np.bool_], values: npt.NDArray[np.int64]) -> Ranked:
        nodes = np.flatnonzero(chosen)
        return self._rank(nodes, values[nodes])

    def _rank(self, nodes: _Nodes, values: npt.NDArray[np.int64]) -> Ranked:
        if len(nodes) > MOST_RANKED:
            first = np.argpartition(-values, MOST_RANKED)[:MOST_RANKED]
            nodes, values = nodes[first], values[first]
        words = np.ascontiguousarray(self.blocks.hashes[nodes]).view(">u8")[::2].astype(np.uint64)
        order = np.lexsort((words, -values))
        return Ranked(nodes[order], values[order], words[order])

    def _parents(self) -> _Nodes:
        parents, depths = self.blocks.parents, self.blocks.depths
        found = np.full(self.count, self.count, dtype=np.int64)
        named = np.flatnonzero(parents)
        # In order: looking for neighbours one after the other stays in the processor's cache.
        named = named[np.argsort(parents[named], kind="stable")]
        at = np.searchsorted(self._words, parents[named])
        there = at < self.count
        named, at = named[there], at[there]
        there = self._words[at] == parents[named]
        named, nodes = named[there], self._order[at[there]]
        # A parent is one nearer to the beginning; so there are no circles, whatever records say.
        before = (depths[nodes] > 0) & (depths[nodes] == depths[named] - 1)
        found[named[before]] = nodes[before]
        return found


def grow(view: RecordView) -> list[Tree]:
    """The trees of an arena's spaces now, ranked."""
    spaces = view_spaces(view)
    leases = leases_of(view, spaces)
    trees: list[Tree] = []
    for space in spaces:
        blocks = space.residents()
        if blocks is not None:
            tree = Tree(space, blocks, leases.get(space.id))
            # All of it now: who asks later is not to wait.
            _ = tree.ranked, tree.own_count
            trees.append(tree)
    return trees
