"""What a dashboard has to show: engines of several tenants on one sidecar, prompts that part like trees."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import numpy as np
from kvpager.api.client import Connection
from kvpager.kvstore.control import CommandKind, EngineReport
from kvpager.kvstore.handles import Lease
from kvpager.kvstore.hashing import ChainIdentity, hash_blocks
from kvpager.kvstore.lineage import Lineage
from kvpager.tests.admin_server import AdminServer
from kvpager.tiers.layout import KVLayout

__all__ = ["HOST_BYTES", "LAYOUT", "Scene", "scene_on"]

LAYOUT: Final = KVLayout(2, 2, 64)
"""Blocks of 16 KiB: 256 of them in an extent of the smallest size."""
HOST_BYTES: Final = 64 << 20
_ROOT: Final = ChainIdentity(b"a model of the scene").root
_MOST_LEASES: Final = 12


@dataclass(frozen=True)
class _Tenant:
    """How a tenant's prompts part: blocks that all share, then documents, then what is asked of each."""

    name: str
    shards: tuple[str, ...]
    shared: int
    documents: int
    document_blocks: int
    questions: int
    question_blocks: int


_TENANTS: Final = (
    _Tenant("acme", ("tp0/2", "tp1/2"), 24, 9, 40, 8, 6),
    _Tenant("globex", ("",), 8, 5, 96, 12, 5),
    _Tenant("initech", ("",), 16, 12, 30, 3, 12),
    _Tenant("", ("",), 4, 8, 24, 2, 8),
)


@dataclass(frozen=True)
class _Place:
    """A space, and the prompts of its tenant: hashes of all blocks of each, from the first."""

    space: Any
    tenant: _Tenant
    prompts: list[list[bytes]]


@dataclass
class Scene:
    """Engines and what they have stored.

    Attributes:
        places: the spaces that they have opened.
    """

    engines: list[Connection]
    layout: KVLayout
    places: list[_Place] = field(default_factory=list)
    _chance: random.Random = field(default_factory=lambda: random.Random(20))
    _leases: list[Lease] = field(default_factory=list)
    _tokens: Iterator[int] = field(default_factory=lambda: count(1))
    _sessions: dict[str, str] = field(default_factory=dict)

    def fill(self) -> None:
        """Store the prompts of every tenant, pin a few, and let some go again, so that there are holes."""
        for tenant in _TENANTS:
            prompts = self._prompts(tenant)
            for number, shard in enumerate(tenant.shards):
                engine = self.engines[number % len(self.engines)]
                space = engine.space(self.layout, shard=shard, tenant=tenant.name)
                place = _Place(space, tenant, prompts)
                self.places.append(place)
                for prompt in prompts:
                    self._store(place, prompt)
                space.pin(prompts[0][: tenant.shared + 6])
                for prompt in prompts[5::7]:
                    space.purge(prompt[-tenant.question_blocks :])
        for number in range(40):
            self._sessions[f"chat-{self._chance.randrange(1 << 20):05x}"] = (
                "running" if number % 4 == 0 else "asleep"
            )
        self.report()

    def report(self) -> None:
        """Say what the engines would: sessions, device memory, bandwidth."""
        names = sorted(self._sessions)
        for number, engine in enumerate(self.engines):
            sessions = {name: self._sessions[name] for name in names[number :: len(self.engines)]}
            speed = 1.9e10 * self._chance.uniform(0.6, 1.3)
            held = 300 + self._chance.randrange(40)
            engine.report(EngineReport(sessions, self.layout.block_bytes, 512, held, speed, speed / 20))

    def serve(self) -> None:
        """One moment of traffic: prompts that go on or begin, blocks asked for, leased and let go again."""
        for _ in range(6):
            place = self._chance.choice(self.places)
            prompt = self._chance.choice(place.prompts[: 1 + self._chance.randrange(len(place.prompts))])
            if self._chance.random() < 0.15:
                prompt = [*prompt[: place.tenant.shared], *self._chain(6, prompt[place.tenant.shared - 1])]
            lease = (
                place.space.load(prompt, 1.0) if self._chance.random() < 0.3 else place.space.match(prompt)
            )
            self._leases.append(lease)
            if self._chance.random() < 0.3:
                longer = [*prompt, *self._chain(2, prompt[-1])]
                self._store(place, longer)
                place.prompts.append(longer)
            if self._chance.random() < 0.1:
                place.space.evict(place.tenant.question_blocks)
        while len(self._leases) > _MOST_LEASES:
            self._leases.pop(0).release()

    def rest(self) -> None:
        """Nobody asks for anything: all leases end."""
        while self._leases:
            self._leases.pop().release()

    def obey(self, command: Any) -> None:
        """Do what an operator asks of an engine."""
        self._sessions[command.session] = "asleep" if command.kind is CommandKind.SLEEP else "running"
        command.done(7)
        self.report()

    def _prompts(self, tenant: _Tenant) -> list[list[bytes]]:
        first = self._chain(tenant.shared, _ROOT)
        found: list[list[bytes]] = []
        for number in range(tenant.documents):
            # No two are of one length.
            blocks = tenant.document_blocks // 2 + tenant.document_blocks * (number + 1) // (
                tenant.documents + 1
            )
            document = [*first, *self._chain(blocks, first[-1])]
            for question in range(tenant.questions):
                length = tenant.question_blocks // 2 + question % tenant.question_blocks + 1
                found.append([*document, *self._chain(length, document[-1])])
        return found

    def _chain(self, blocks: int, parent: bytes) -> list[bytes]:
        """Names of blocks that nobody has had before."""
        size = self.layout.block_size
        return list(hash_blocks([next(self._tokens) for _ in range(blocks * size)], size, parent))

    def _store(self, place: _Place, prompt: list[bytes]) -> None:
        blocks = np.zeros((len(prompt), self.layout.block_bytes), dtype=np.uint8)
        place.space.put(prompt, blocks, wait=2.0, lineage=Lineage.of_chain(prompt))


@contextmanager
def scene_on(server: AdminServer, layout: KVLayout = LAYOUT) -> Iterator[Scene]:
    """Two engines on a sidecar, until the end of a ``with``; nothing is stored yet."""
    with ExitStack() as stack:
        names = "engine-0 (vllm)", "engine-1 (vllm)"
        scene = Scene([stack.enter_context(server.client(name=name)) for name in names], layout)
        for engine in scene.engines:
            stack.callback(engine.on_command(scene.obey))
        stack.callback(scene.rest)
        yield scene
