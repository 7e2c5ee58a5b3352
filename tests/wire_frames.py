"""Frames of the wire protocol with their bytes, for whoever writes a client in another language.

``python -m kvpager.tests.wire_frames`` writes them to ``tests/data/wire_frames.json``. A file that changes
there where nothing was added means that old clients are no longer understood.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from kvpager.api import messages, operator_messages
from kvpager.api.messages import Message
from kvpager.api.wire import Failure, Frame, Notice, Reply, Request, encode
from kvpager.kvstore.cost import ComputeCost, CostModel, LinkCost
from kvpager.tiers import errors
from kvpager.tiers.errors import KVPagerError

__all__ = ["MESSAGES", "PATH", "error_of_each_class", "frames", "written"]

PATH = Path(__file__).parent / "data" / "wire_frames.json"

MESSAGES: tuple[type[Message], ...] = tuple(
    sorted(
        (
            one
            for module in (messages, operator_messages)
            for one in (getattr(module, name) for name in module.__all__)
            if isinstance(one, type) and issubclass(one, Message) and one is not Message
        ),
        key=lambda kind: kind.TAG,
    )
)
"""Every message, by its tag."""
_LATER_ERRORS = ("NotInPlaceError", "TLSError")
_LAST_ERRORS = ("CommandError", "QuotaError")


def error_of_each_class() -> list[KVPagerError]:
    made: list[KVPagerError] = []
    for name in errors.__all__:
        kind = getattr(errors, name)
        made.append(kind("host_bytes", "is zero") if name == "ConfigError" else kind(f"what {name} says"))
    return made


def _age_of(error: KVPagerError) -> int:
    name = type(error).__name__
    return 2 if name in _LAST_ERRORS else int(name in _LATER_ERRORS)


def _hash(number: int) -> bytes:
    return bytes(range(number, number + 16))


def frames() -> dict[str, Frame]:
    """One frame of every message and of every error, by name."""
    slots = np.array([0, 7, 2**31 - 1], np.int32)
    generations = np.array([1, 2, 2**63 - 1], np.int64)
    hashes = (_hash(0), _hash(100))
    parents, depths = (bytes(16), _hash(0)), np.array([1, 2], np.int32)
    layout = (32, 8, 128, 16, "float16", "swizzled", 2, 0, 0)
    m, o = messages, operator_messages
    made: dict[str, Frame] = {
        "hello": Request(0, m.Hello("kvpager", 1, 1, _hash(16), 4242, "", "engine 0", client=_hash(32))),
        "welcome": Reply(0, m.Welcome(1, _hash(48), 8 << 30, 256 << 20, 64 << 20)),
        "done": Reply(1, m.Done()),
        "count": Reply(127, m.Count(300)),
        "open space": Request(128, m.OpenSpace(*layout, "tp0/2", "tenant é")),
        "open a space with a window": Request(
            129, m.OpenSpace(1, 1, 64, 16, "uint8", "opaque:x", 1, 4096, 8, "", "")
        ),
        "space opened": Reply(128, m.SpaceOpened(0, _hash(64), 128)),
        "match": Request(2**31, m.Match(0, hashes, 0.0)),
        "match nothing": Request(2**32, m.Match(0, (), 0.5)),
        "leased": Reply(2**31, m.Leased(slots, generations, 4, loaded=1, seconds=0.5)),
        "load": Request(2**63 - 1, m.Load(3, hashes, 0.25)),
        "lease slots": Request(5, m.LeaseSlots(0, slots, generations)),
        "marks": Reply(5, m.Marks(np.array([True, False, True]))),
        "release": Request(6, m.Release(0, slots, generations)),
        "reserve": Request(7, m.Reserve(0, hashes, 1.5)),
        "reserved": Reply(7, m.Reserved(np.array([0, 1, 3], np.uint8), slots, generations)),
        "commit": Request(8, m.Commit(0, slots, generations)),
        "abort": Request(9, m.Abort(0, slots, generations)),
        "pin": Request(10, m.Pin(0, hashes)),
        "unpin": Request(11, m.Unpin(0, hashes)),
        "evict": Request(12, m.Evict(0, 1000)),
        "put note": Request(13, m.PutNote(0, b"name", b"\x00value\xff", 2.0)),
        "get note": Request(14, m.GetNote(0, b"name", 2.0)),
        "note": Reply(14, m.Note(True, b"\x00value\xff")),
        "put": Request(15, m.Put(0, hashes, bytes(range(64)), 0.0)),
        "get": Request(16, m.Get(0, hashes)),
        "blocks": Reply(16, m.Blocks(bytes(range(64)))),
        "get stats": Request(17, m.GetStats()),
        "stats": Reply(17, m.Stats({"host": {"matched": 12, "missed": 0}, "share": 0.5, "name": "a"})),
        "subscribe": Request(18, m.Subscribe(True)),
        "event": Notice(m.Event("stored", "host", _hash(64), hashes, 0)),
        "flush": Request(19, m.Flush(30.0)),
        "pin for a while": Request(23, m.Pin(0, hashes, 60.0)),
        "hint": Request(24, m.Hint(0, hashes, True)),
        "report": Request(
            25,
            m.Report(
                {"chat 1": "decoding"},
                1 << 21,
                1000,
                700,
                1.5e9,
                0.0,
                _hash(9),
                _costs(),
                {"saved_tokens": 640},
            ),
        ),
        "get clients": Request(26, m.GetClients()),
        "clients": Reply(26, m.Clients({"0": {"name": "engine 0 (pid 4242)", "leased": 12}})),
        "command": Request(27, m.Command("promote", "chat 1", hashes, 5.0)),
        "command given": Notice(m.CommandGiven(3, "promote", "chat 1", hashes, 5.0)),
        "command done": Request(28, m.CommandDone(3, 2, "")),
        "match the middle of a chain": Request(30, m.Match(0, hashes, 0.0, _hash(200), 7)),
        "load the middle of a chain": Request(31, m.Load(0, hashes, 0.25, _hash(200), 7)),
        "load ahead of a match": Request(31, m.Load(0, hashes, 10.0, _hash(200), 7, True)),
        "lease slots to use them": Request(40, m.LeaseSlots(0, slots, generations, True)),
        "reserve blocks of a chain": Request(32, m.Reserve(0, hashes, 0.0, parents, depths)),
        "put blocks of a chain": Request(33, m.Put(0, hashes, bytes(range(64)), 0.0, parents, depths)),
        "may have room": Request(29, m.MayHaveRoom(0, 3)),
        "count resident": Request(29, m.CountResident(0, hashes)),
        "get status": Request(30, o.GetStatus()),
        "status": Reply(30, o.Status({"pid": 4242, "draining": False, "clock": {"now": 7}})),
        "find space": Request(31, o.FindSpace(_hash(64))),
        "evict where": Request(
            32, o.EvictWhere("tenant é", (_hash(64),), hashes, 3600.0, "host", 1 << 30, True)
        ),
        "evictions": Reply(32, o.Evictions(12, 49152, 3)),
        "demote": Request(33, o.Demote(0, hashes, 30.0)),
        "disconnect": Request(34, o.Disconnect(7)),
        "configure": Request(35, o.Configure({"clean_ahead": 0.5, "quotas": {"tenant é": 1 << 30}})),
        "configured": Reply(35, o.Configured({"clean_ahead": {"0": 0.25}})),
        "attach cold": Request(36, o.AttachCold("disk:///var/cache/kv", 1 << 40)),
        "detach cold": Request(37, o.DetachCold(30.0)),
        "drain": Request(38, o.Drain(True, 30.0)),
        "purge": Request(21, m.Purge(0, hashes, b"name", 30.0)),
        "purge tenant": Request(22, m.PurgeTenant("tenant é", 30.0)),
        "purged": Reply(22, m.Purged(2, 10, 40960, 12, 49152, 1, {"leased": {"engine 0 (pid 4242)": 3}})),
        "reassert": Request(20, m.Reassert(0, slots, generations, np.array([1, 2, 0], np.int32))),
    }
    # What was recorded keeps its id: errors that came later are last.
    by_age = sorted(error_of_each_class(), key=_age_of)
    for number, error in enumerate(by_age):
        made[f"failure {type(error).__name__}"] = Failure(100 + number, error)
    return made


def _costs() -> dict[str, Any]:
    """What an engine tells of its costs, of which it does not know all."""
    compute, link = ComputeCost(0.002, 2e-5, 1e-9, 512), LinkCost(1e-5, 2e-11)
    return CostModel(16, 1 << 21, compute, link, link).as_map()


def _shown(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, np.ndarray):
        return value.astype(int).tolist()
    if isinstance(value, tuple):
        return [_shown(one) for one in value]
    if isinstance(value, dict):
        return {name: _shown(one) for name, one in value.items()}
    return value


def written(frame: Frame) -> dict[str, Any]:
    """A frame as the file has it: what it says, and its bytes, length included."""
    data = {"bytes": encode(frame).hex()}
    if isinstance(frame, Failure):
        return {"kind": "failure", "id": frame.id, "error": type(frame.error).__name__, **data}
    message = frame.message
    return {
        "kind": type(frame).__name__.lower(),
        "id": 0 if isinstance(frame, Notice) else frame.id,
        "message": type(message).__name__,
        "tag": message.TAG,
        "fields": {one.name: _shown(getattr(message, one.name)) for one in fields(message)},  # type: ignore[arg-type]
        **data,
    }


def main() -> None:
    PATH.parent.mkdir(exist_ok=True)
    made = {name: written(frame) for name, frame in frames().items()}
    PATH.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
