"""Prefixes: which are resident, how much of a prompt is there, and where its blocks are to be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Path, Query
from starlette.exceptions import HTTPException

from ...kvstore.hashing import hash_blocks
from ..client_async import AsyncSpace
from .context import Admin, AdminHere
from .cursors import Cursor, read_cursor, write_cursor
from .forest import Tree
from .models import (
    MOST_PAGE,
    ChainBlock,
    Evicted,
    EvictRequest,
    Hex,
    Lookup,
    LookupSpace,
    LookupText,
    LookupTokens,
    Page,
    Pinned,
    Prefix,
    PrefixChain,
    PrefixMoved,
    PrefixOrder,
    TierName,
    Warmed,
    WarmRequest,
)
from .problems import documented
from .reckoning import reckoning
from .tokenizing import tokens_of
from .watch import Facts

__all__ = ["router"]

router = APIRouter(tags=["prefixes"])

_Hash = Annotated[Hex, Path(description="of its last block")]
_Space = Annotated[Hex | None, Query(description="in this space alone; none: in all")]
_Limit = Annotated[int, Query(ge=1, le=MOST_PAGE, description="how many at most")]
_Wait = Annotated[float, Query(gt=0, le=60, description="seconds that it may take")]


class _Found(NamedTuple):
    """A block that is resident."""

    tree: Tree
    node: int


@router.get("/prefixes", responses=documented(404, 409, 422, 503))
async def prefixes(
    admin: AdminHere,
    order: Annotated[PrefixOrder, Query(description="what is listed first")] = PrefixOrder.LARGEST,
    tenant: Annotated[str | None, Query(max_length=256, description="of this tenant alone")] = None,
    space: _Space = None,
    limit: _Limit = 50,
    cursor: Cursor = None,
) -> Page[Prefix]:
    """Prefixes that are resident, each where prompts end or part; 65,536 of a space at most."""
    facts = (await admin.watch.facts()).value
    grown = await admin.watch.trees()
    trees = [
        tree
        for tree in grown.value
        if tenant in (None, tree.space.tenant) and space in (None, tree.space.id.hex())
    ]
    before = None
    if cursor is not None:
        value, name, where = read_cursor(cursor, int, str, str)
        try:
            before = -int(value), bytes.fromhex(str(name)), bytes.fromhex(str(where))
        except ValueError:
            before = 0, b"", b""
        if [len(one) for one in before[1:]] != [16, 16]:
            raise HTTPException(HTTPStatus.NOT_FOUND, "the cursor is none of this list")
    found: list[tuple[tuple[int, bytes, bytes], _Found]] = []
    for tree in trees:
        ranked = tree.ranked[order]
        at = 0 if before is None else ranked.place(-before[0], before[1])
        taken = 0
        while at < len(ranked.nodes) and taken <= limit:
            node = int(ranked.nodes[at])
            place = -int(ranked.values[at]), tree.name(node), tree.space.id
            at += 1
            if before is None or place > before:
                found.append((place, _Found(tree, node)))
                taken += 1
    found.sort(key=lambda one: one[0])
    last = found[limit - 1][0] if len(found) > limit else None
    return Page[Prefix](
        items=[_prefix(one, facts) for _, one in found[:limit]],
        next_cursor=None if last is None else write_cursor(-last[0], last[1].hex(), last[2].hex()),
        age_seconds=grown.age,
    )


@router.get("/prefixes/{hash}", responses=documented(404, 409, 422, 503))
async def prefix(
    hash: _Hash,  # noqa: A002  the route's own word
    admin: AdminHere,
    space: _Space = None,
    limit: _Limit = 256,
    cursor: Cursor = None,
) -> PrefixChain:
    """A prefix and its blocks, from the first to the last."""
    facts = (await admin.watch.facts()).value
    start = 0 if cursor is None else max(0, int(read_cursor(cursor, int)[0]))
    grown = await admin.watch.trees()
    found = _find(grown.value, hash, space)
    if not found:
        # It may be younger than what is known.
        grown = await admin.watch.trees(newest=True)
        found = _find(grown.value, hash, space)
    tree, node = _first(found, hash)
    chain = tree.chain(node)
    end = start + limit
    return PrefixChain(
        prefix=_prefix(_Found(tree, node), facts),
        chain=[ChainBlock(**one) for one in _blocks(tree, chain[start:end], facts)],
        chain_blocks=len(chain),
        complete=int(tree.blocks.depths[chain[0]]) == 1,
        next_cursor=write_cursor(end) if end < len(chain) else None,
        age_seconds=grown.age,
    )


@router.post("/prefixes/lookup", responses=documented(404, 409, 413, 422, 503))
async def lookup(prompt: LookupTokens | LookupText, admin: AdminHere) -> Lookup:
    """How much of a prompt is there, in which tier, what taking it costs, and what an engine would take."""
    tokens = (
        prompt.tokens
        if isinstance(prompt, LookupTokens)
        else await asyncio.to_thread(tokens_of, prompt.text, prompt.tokenizer)
    )
    facts = (await admin.watch.facts()).value
    trees = {tree.space.id: tree for tree in (await admin.watch.trees()).value}
    cold = facts.stats.get("cold")
    rate = cold["get_bytes"] / cold["get_seconds"] if cold and cold["get_seconds"] > 0 else None
    costs = {one["id"]: one["costs"] for one in facts.status["spaces"]}
    found: list[LookupSpace] = []
    for space in await admin.spaces(prompt.space):
        layout = space.layout
        hashes = await asyncio.to_thread(hash_blocks, tokens, layout.block_size, bytes.fromhex(prompt.root))
        tree = trees.get(space.id)
        host = 0 if tree is None else await asyncio.to_thread(tree.leading, hashes)
        below: int | None = None
        if cold is not None and prompt.deadline_seconds:
            more, below = await _below(space, hashes[host:], prompt.deadline_seconds)
            host += more
        blocks = host + (below or 0)
        found.append(
            LookupSpace(
                space=space.id.hex(),
                tenant=space.tenant,
                shard=space.shard,
                block_size=layout.block_size,
                blocks=len(hashes),
                host_blocks=host,
                cold_blocks=below,
                hit_tokens=blocks * layout.block_size,
                hit_bytes=blocks * layout.block_bytes,
                **reckoning(
                    costs.get(space.id.hex(), {}),
                    rate,
                    block_bytes=layout.block_bytes,
                    block_size=layout.block_size,
                    host=host,
                    cold=below or 0,
                    tokens=len(tokens),
                ),
            )
        )
    return Lookup(tokens=len(tokens), spaces=found)


@router.put("/prefixes/{hash}/pin", responses=documented(401, 403, 404, 409, 422, 503))
async def pin(hash: _Hash, admin: AdminHere, space: _Space = None) -> Pinned:  # noqa: A002
    """Keep all blocks of a prefix in host memory, in every space that has it. Twice is as good as once."""
    changed = 0
    for tree, node in await _resident(admin, hash, space):
        chain = tree.chain(node)
        free = [one for one in chain if not tree.blocks.pins[one]]
        space_calls = await admin.space(tree.space.id.hex())
        # Those that are pinned already keep the one pin that they have.
        changed += await space_calls.pin(tree.names(free)) if free else 0
    admin.watch.changed()
    return Pinned(hash=hash, pinned=True, changed_blocks=changed)


@router.delete("/prefixes/{hash}/pin", responses=documented(401, 403, 404, 409, 422, 503))
async def unpin(hash: _Hash, admin: AdminHere, space: _Space = None) -> Pinned:  # noqa: A002
    """Keep a prefix no longer, but for those of its blocks that another pinned prefix has, too."""
    changed = 0
    for tree, node in await _resident(admin, hash, space):
        space_calls = await admin.space(tree.space.id.hex())
        pinned = await asyncio.to_thread(tree.pinned_alone, node)
        changed += await space_calls.unpin(tree.names(pinned)) if pinned else 0
    admin.watch.changed()
    return Pinned(hash=hash, pinned=False, changed_blocks=changed)


@router.post("/prefixes/{hash}/promote", responses=documented(401, 403, 404, 409, 422, 503))
async def promote(
    hash: _Hash,  # noqa: A002
    admin: AdminHere,
    space: _Space = None,
    deadline_seconds: _Wait = 30.0,
) -> PrefixMoved:
    """Have a block in host memory; what comes before it must be there for engines to find it (see `warm`)."""
    await admin.refuse_if_draining()
    warmed = await _warm(admin, [hash], space, deadline_seconds)
    admin.watch.changed()
    return PrefixMoved(
        hash=hash, tier=TierName.HOST, asked_blocks=warmed.asked_blocks, moved_blocks=warmed.loaded_blocks
    )


@router.post("/prefixes/{hash}/demote", responses=documented(401, 403, 404, 409, 422, 503))
async def demote(
    hash: _Hash,  # noqa: A002
    admin: AdminHere,
    space: _Space = None,
    deadline_seconds: _Wait = 30.0,
) -> PrefixMoved:
    """Copy a prefix's own blocks to the cold tier, and drop them from host memory."""
    await admin.refuse_without_cold()
    asked = moved = 0
    for tree, node in await _resident(admin, hash, space):
        names = tree.names(await asyncio.to_thread(tree.own, node))
        space_calls = await admin.space(tree.space.id.hex())
        asked += len(names)
        moved += await space_calls.demote(names, deadline=deadline_seconds)
    admin.watch.changed()
    return PrefixMoved(hash=hash, tier=TierName.COLD, asked_blocks=asked, moved_blocks=moved)


@router.post("/evict", responses=documented(401, 403, 404, 409, 413, 422, 503))
async def evict(asked: EvictRequest, admin: AdminHere) -> Evicted:
    """Let blocks go."""
    await _refuse_unknown(admin, asked)
    if asked.tier == "cold":
        await admin.refuse_without_cold()
    evict_where = partial(
        admin.connection.evict_where,
        tenant=asked.tenant,
        older_than=asked.older_than_seconds,
        tier=asked.tier,
        dry_run=asked.dry_run,
    )
    if not asked.prefixes:
        spaces = [bytes.fromhex(one) for one in asked.spaces] or None
        gone = [await evict_where(spaces=spaces, most_bytes=asked.most_bytes)]
    else:
        gone = []
        left = asked.most_bytes
        # What one space has of a prefix alone, another may have of several.
        for space, names in (await _own_blocks(admin, asked)).items():
            gone.append(await evict_where(spaces=[space], hashes=names, most_bytes=left))
            if left is not None:
                left -= gone[-1].bytes
                if left <= 0:
                    break
    admin.watch.changed()
    return Evicted(
        dry_run=asked.dry_run,
        blocks=sum(one.blocks for one in gone),
        bytes=sum(one.bytes for one in gone),
        lost_blocks=sum(one.lost for one in gone),
    )


@router.post("/warm", responses=documented(401, 403, 404, 409, 413, 422, 503))
async def warm(asked: WarmRequest, admin: AdminHere) -> Warmed:
    """Bring blocks up from the cold tier."""
    await admin.refuse_if_draining()
    warmed = await _warm(admin, asked.hashes, asked.space, asked.deadline_seconds)
    admin.watch.changed()
    return warmed


# Inside


async def _own_blocks(admin: Admin, asked: EvictRequest) -> dict[bytes, list[bytes]]:
    """By space, the blocks that the prefixes named have there alone."""
    found: dict[bytes, dict[bytes, None]] = {}
    for prefix in asked.prefixes:
        for tree, node in await _resident(admin, prefix, None):
            space = tree.space
            if asked.spaces and space.id.hex() not in asked.spaces:
                continue
            if asked.tenant is None or space.tenant == asked.tenant:
                names = tree.names(await asyncio.to_thread(tree.own, node))
                found.setdefault(space.id, {}).update(dict.fromkeys(names))
    return {space: list(names) for space, names in found.items()}


async def _refuse_unknown(admin: Admin, asked: EvictRequest) -> None:
    """Raise `HTTPException` where a tenant or space is named that there is none of."""
    for space in asked.spaces:
        await admin.space(space)
    if asked.tenant and asked.tenant not in (await admin.watch.facts()).value.stats["tenants"]:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"the sidecar has no space of tenant {asked.tenant!r}")


async def _warm(admin: Admin, hashes: Sequence[str], space: str | None, seconds: float) -> Warmed:
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    names = [bytes.fromhex(one) for one in dict.fromkeys(hashes)]
    asked = resident = loaded = 0
    for one in await admin.spaces(space):
        rest = names
        asked += len(names)
        # What follows a block that is not to be had is asked for all the same.
        while rest and loop.time() < until:
            with await one.load(rest, until - loop.time()) as lease:
                resident += len(lease)
                loaded += getattr(lease, "loaded", 0)
                rest = rest[len(lease) + 1 :]
    return Warmed(asked_blocks=asked, resident_blocks=resident, loaded_blocks=loaded)


async def _below(space: AsyncSpace, hashes: list[bytes], wait: float) -> tuple[int, int]:
    """How many leading blocks came into host memory by now, and how many after them the cold tier has."""
    if not hashes:
        return 0, 0
    with await space.match(hashes, cold_deadline=wait) as lease:
        return len(lease), lease.cold


def _find(trees: Sequence[Tree], name: str, space: str | None) -> list[_Found]:
    """The resident blocks of a hash, one in each space that has it."""
    found = []
    for tree in trees:
        if space in (None, tree.space.id.hex()):
            node = tree.find(bytes.fromhex(name))
            if node is not None:
                found.append(_Found(tree, node))
    return found


async def _resident(admin: Admin, name: str, space: str | None) -> list[_Found]:
    """The same as of now.

    Raises:
        HTTPException: there are none.
    """
    found = _find((await admin.watch.trees(newest=True)).value, name, space)
    _first(found, name)
    return found


def _first(found: Sequence[_Found], name: str) -> _Found:
    if not found:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"host memory has no block {name}")
    return found[0]


def _blocks(tree: Tree, nodes: Sequence[int], facts: Facts) -> list[dict[str, Any]]:
    """What is told of each of these blocks."""
    blocks, at = tree.blocks, np.asarray(nodes, dtype=np.int64)
    columns = {
        "hash": [name.hex() for name in tree.names(nodes)],
        "depth": [depth or None for depth in blocks.depths[at].tolist()],
        "tier": [TierName.HOST] * len(at),
        "in_cold": blocks.in_cold[at].tolist(),
        "references": tree.references[at].tolist(),
        "pins": blocks.pins[at].tolist(),
        "hits": blocks.hits[at].tolist(),
        "idle_seconds": facts.ages(blocks.used_at[at]).round(3).tolist(),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _prefix(found: _Found, facts: Facts) -> Prefix:
    tree, node = found
    space, depth = tree.space, int(tree.blocks.depths[node])
    parent = int(tree.parent[node])
    own = int(tree.own_count[node])
    return Prefix.model_validate(
        {
            **_blocks(tree, [node], facts)[0],
            "space": space.id.hex(),
            "tenant": space.tenant,
            "shard": space.shard,
            "parent": tree.name(parent).hex() if parent < tree.count else None,
            "tokens": depth * space.layout.block_size if depth else None,
            "bytes": depth * space.layout.block_bytes if depth else None,
            "children": int(tree.children[node]),
            "continuations": int(tree.continuations[node]),
            "own_blocks": own,
            "own_bytes": own * space.layout.block_bytes,
        }
    )
