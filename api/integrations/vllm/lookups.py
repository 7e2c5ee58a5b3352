"""What the sidecar has of a request, asked in threads: the scheduler never waits for an answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from ....kvstore.handles import Lease
from ....kvstore.lineage import ChainPlace
from ....tiers.errors import KVPagerError
from ...remote_space import RemoteSpace
from ..link import SidecarLink
from .identity import ChainRoots
from .metadata import ShardMetadata
from .naming import RequestNames

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["Lookup", "Lookups"]

_THREADS: Final = 2
_FIRST_BLOCKS: Final = 16
"""Asked for at first: a prompt that nobody sent is named no further until it is known."""
_COLD_SECONDS: Final = 0.05
"""How long counting what the cold tier has may take."""


class Lookup:
    """A question, and what is known of the answer.

    Args:
        request: whose blocks are asked for.
        limit: how many of its leading blocks.
        names: of its blocks, where they are known from an earlier lookup.
        seconds: how long the request waits for an answer at most.
    """

    def __init__(self, request: Request, limit: int, names: RequestNames | None, seconds: float) -> None:
        self.request = request
        self.limit = limit
        self.names = names
        self._seconds = seconds
        self._until: float | None = None
        self._found = 0
        self._from_cold = 0
        self._leases: list[Lease] = []
        self._lock = threading.Lock()
        self._wanted = True
        self._done = False

    @property
    def done(self) -> bool:
        """Whether the answer is known."""
        return self._done

    @property
    def found(self) -> int:
        """Leading blocks that every shard has in host memory, leased until `release`."""
        return self._found

    @property
    def from_cold(self) -> int:
        """How many of them came up from the cold tier for it."""
        return self._from_cold

    @property
    def seconds_left(self) -> float:
        """How long the request still waits; all of it before somebody waits."""
        return self._seconds if self._until is None else max(self._until - time.monotonic(), 0.0)

    @property
    def late(self) -> bool:
        """Whether the request waits no longer."""
        return not self._done and not self.seconds_left

    def await_answer(self) -> None:
        """The request waits from now on, if it did not before."""
        if self._until is None:
            self._until = time.monotonic() + self._seconds

    @property
    def wanted(self) -> bool:
        """Whether anybody still wants the answer."""
        return self._wanted

    def answer(self, found: int, from_cold: int, leases: list[Lease]) -> None:
        """The answer is this; the leases are given back where nobody wants it any more."""
        with self._lock:
            self._found, self._from_cold, self._done = found, from_cold, True
            if self._wanted:
                self._leases = leases
                return
        for lease in leases:
            lease.release()

    def release(self) -> None:
        """Nobody wants the answer, or the blocks any more. Idempotent. Does not wait."""
        with self._lock:
            self._wanted = False
            leases, self._leases = self._leases, []
        for lease in leases:
            lease.release()


class Lookups:
    """Asks for requests' blocks, of all shards.

    Args:
        link: the sidecar.
        roots: of chains.
        block_size: tokens of a block.
        seconds: how long a request waits for an answer.
        log: where it is said what went wrong.
    """

    def __init__(
        self, link: SidecarLink, roots: ChainRoots, block_size: int, seconds: float, log: logging.Logger
    ) -> None:
        self._link = link
        self._roots = roots
        self._block_size = block_size
        self._seconds = seconds
        self._log = log
        self._shards: Sequence[ShardMetadata] = ()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvpager-lookup")
        self._namer = ThreadPoolExecutor(1, thread_name_prefix="kvpager-name")
        self._answered = threading.Condition()
        self._under_way = 0

    @property
    def under_way(self) -> int:
        """Questions without an answer."""
        return self._under_way

    def serve(self, shards: Sequence[ShardMetadata]) -> None:
        """Ask in the spaces of these shards from now on."""
        self._shards = shards

    def begin(self, request: Request, limit: int, names: RequestNames | None) -> Lookup:
        """Ask for the leading `limit` blocks of a request. Does not wait."""
        lookup = Lookup(request, limit, names, self._seconds)
        with self._answered:
            self._under_way += 1
        self._threads.submit(self._run, lookup)
        return lookup

    def name(self, names: RequestNames, blocks: int) -> Future[list[bytes]]:
        """The names of the leading `blocks` blocks, made in a thread that waits for nothing else."""
        return self._namer.submit(names.first, blocks)

    def wait_a_little(self, seconds: float) -> None:
        """Wait for an answer, so many seconds at most."""
        with self._answered:
            if self._under_way:
                self._answered.wait(seconds)

    def close(self) -> None:
        """Ask nothing more, and wait for what is being asked."""
        self._threads.shutdown(cancel_futures=True)
        self._namer.shutdown(cancel_futures=True)

    def _run(self, lookup: Lookup) -> None:
        found, from_cold, leases = 0, 0, list[Lease]()
        try:
            if lookup.names is None:
                root = self._roots.root(lookup.request)
                lookup.names = None if root is None else RequestNames(lookup.request, self._block_size, root)
            if lookup.names is not None and lookup.wanted and not lookup.late and lookup.limit:
                spaces = self._spaces()
                if spaces:
                    found, from_cold = self._ask(lookup, lookup.names, spaces, leases)
        except KVPagerError as error:  # of a connection that was closed, say: then nothing is found
            self._log.warning("kvpager: nothing was found for a request: %s", error)
            found = from_cold = 0
        except Exception:
            self._log.exception("kvpager: a lookup failed, and its request is computed")
            found = from_cold = 0
            raise
        finally:
            lookup.answer(found, from_cold, leases)
            with self._answered:
                self._under_way -= 1
                self._answered.notify_all()
        self._name_the_rest(lookup)

    def _name_the_rest(self, lookup: Lookup) -> None:
        """The scheduler's thread stores the prompt when it has its names, and makes few itself."""
        if lookup.names is not None:
            lookup.names.first(lookup.request.num_prompt_tokens // self._block_size)

    def _spaces(self) -> list[RemoteSpace]:
        """Of every shard; none where one of them cannot be asked."""
        if not self._link.ready:
            return []
        spaces = [self._link.space(shard.layout, shard.shard) for shard in self._shards]
        return [] if None in spaces else [space for space in spaces if space is not None]

    def _ask(
        self, lookup: Lookup, names: RequestNames, spaces: list[RemoteSpace], leases: list[Lease]
    ) -> tuple[int, int]:
        """How many leading blocks every shard has, and how many of them came from cold; leases are added."""
        begin, end, from_cold = 0, min(_FIRST_BLOCKS, lookup.limit), 0
        while begin < end:
            chain = names.first(end)
            found, cold = self._ask_part(lookup, chain, begin, spaces, leases)
            from_cold += cold
            begin += found
            if begin < end:
                break
            end = lookup.limit
        return begin, from_cold

    def _ask_part(
        self, lookup: Lookup, chain: list[bytes], begin: int, spaces: list[RemoteSpace], leases: list[Lease]
    ) -> tuple[int, int]:
        place, part = ChainPlace.at(chain, begin), chain[begin:]
        found, resident = len(part), len(part)
        taken: list[Lease] = []
        for space in spaces:
            began = time.monotonic()
            lease = space.match(part[:found], start=place, cold_deadline=_COLD_SECONDS)
            if not len(lease) and time.monotonic() - began >= self._seconds:
                self._link.pause()
            resident = min(resident, len(lease))
            if lease.cold and len(lease) < found:
                wanted = part[: len(lease) + lease.cold]
                # Held meanwhile, so that what is resident stays so.
                with lease:
                    lease = space.load(wanted, lookup.seconds_left, start=place)
            found = min(found, len(lease))
            if not found:
                # Nothing is held by it, and giving it back would cost the scheduler's thread a message.
                lease.release()
                break
            taken.append(lease)
            leases.append(lease)
        for lease in taken:
            lease.shorten(found)
        return found, max(found - resident, 0)
