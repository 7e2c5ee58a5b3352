"""Slots and who has them, and the arena in device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from .address import TAG_MASK
from .driver import let_reach
from .errors import CapacityError, ClosedError, ConfigError, IntegrityError, MemoryUnavailableError
from .layout import SLICE_ALIGNMENT
from .memory import format_bytes, memory_headroom
from .settings import MOST_BYTES, expect_array, expect_integer, expect_text, shown

if TYPE_CHECKING:
    import torch

__all__ = ["MOST_BLOCKS", "AddressArray", "DeviceArena", "SlotAllocator", "SlotArray"]

SlotArray: TypeAlias = npt.NDArray[np.int32]
"""int32 [n] of slot numbers."""
AddressArray: TypeAlias = npt.NDArray[np.int64]
"""int64 [n] of addresses in bytes; the low seven bits may be the tags of a block address."""

_INT32: Final = np.dtype(np.int32)
_INT64: Final = np.dtype(np.int64)
_TAKEN: Final = -1
_ABSENT: Final = -2
_MOST_SLOTS: Final = 1 << 31
MOST_BLOCKS: Final = _MOST_SLOTS - 1
"""Of a device arena."""
_HOST_ALIGNMENT: Final = 4096
_NO_SLOTS: Final = np.empty(0, np.int32)


class SlotAllocator:
    """A stack of free slots, taken and given back in batches; the cost does not depend on how many there are.

    Fresh slots come lowest first, so blocks that are allocated together lie side by side and move as one
    run; after that, the slots freed last are taken first, in the order in which they were freed. Slot
    numbers may be sparse: ranges are added and removed as extents are assigned. Not thread-safe: the
    store that owns it holds its own lock.

    Args:
        num_slots: slots 0 to ``num_slots - 1`` are there from the start.

    Raises:
        ConfigError: ``num_slots`` is negative, or beyond int32.
    """

    def __init__(self, num_slots: int = 0) -> None:
        num_slots = expect_integer("num_slots", num_slots, 0, _MOST_SLOTS)
        # _stack[:_count] are the free slots, the next one to take last. _place[slot] is where a free slot
        # stands in the stack, so freeing twice shows at once and a range is removed without a search.
        self._stack: SlotArray = _NO_SLOTS
        self._place: SlotArray = _NO_SLOTS
        self._order: SlotArray = _NO_SLOTS
        self._count = 0
        self._capacity = 0
        self.add(0, num_slots)

    @property
    def free_count(self) -> int:
        """Slots that nobody has."""
        return self._count

    @property
    def capacity(self) -> int:
        """Slots, free or taken."""
        return self._capacity

    def allocate(self, n: int) -> SlotArray:
        """Take ``n`` slots: int32 [n].

        Raises:
            CapacityError: fewer are free; none is taken.
            ConfigError: ``n`` is negative.
        """
        if type(n) is not int or n < 0:
            n = expect_integer("n", n, 0)
        count = self._count
        if n > count:
            raise CapacityError(f"{shown(n)} slots were asked for, {count} of {self._capacity} are free")
        left = count - n
        slots = self._stack[left:count][::-1].copy()
        self._place[slots] = _TAKEN
        self._count = left
        return slots

    def free(self, slots: SlotArray) -> None:
        """Give back ``slots`` (int32 [n], each once).

        Raises:
            IntegrityError: a slot is free already, appears twice, or does not exist; nothing changes.
        """
        slots = expect_array("slots", slots, _INT32)
        n = slots.size
        place = self._place
        # A negative number becomes a huge one, which is out of range like any other.
        index = slots.view(np.uint32)
        try:
            taken = place[index] == _TAKEN
        except IndexError:
            outside = slots[(slots < 0) | (slots >= place.size)]
            raise IntegrityError(f"slot {outside[0]} was freed but does not exist") from None
        if not taken.all():
            slot = int(slots[~taken][0])
            what = "does not exist" if place[slot] == _ABSENT else "is free already"
            raise IntegrityError(f"slot {slot} was freed but {what}")
        count = self._count
        places = self._order[count : count + n]
        if places.size == n:  # more slots than are taken can only be repetitions
            reverse = slots[::-1]
            place[reverse] = places
            if (place[reverse] == places).all():
                self._stack[count : count + n] = reverse
                self._count = count + n
                return
            place[slots] = _TAKEN
        values, repeats = np.unique(slots, return_counts=True)
        raise IntegrityError(f"slot {values[repeats > 1][0]} was freed twice in one batch")

    def is_free(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """Which of ``slots`` (int32 [n]) are free: bool [n]; False also for those that do not exist."""
        slots = expect_array("slots", slots, _INT32)
        inside = (slots >= 0) & (slots < self._place.size)
        result = np.zeros(slots.shape, np.bool_)
        result[inside] = self._place[slots[inside]] >= 0
        return result

    def add(self, first: int, count: int, *, taken: npt.NDArray[np.bool_] | None = None) -> None:
        """Slots ``first`` to ``first + count - 1`` come into being, free; they are taken next, lowest first.

        Args:
            taken: bool [count], those that somebody has already; None: all are free.

        Raises:
            ConfigError: the range is negative or beyond int32.
            IntegrityError: one of them exists already; nothing changes.
        """
        end = self._end(first, count)
        if end > self._place.size:
            # Doubling keeps a sequence of additions linear.
            grown = np.full(max(end, 2 * self._place.size), _ABSENT, np.int32)
            grown[: self._place.size] = self._place
            self._place = grown
        span = self._place[first:end]
        if (span != _ABSENT).any():
            raise IntegrityError(f"slots {first} to {end - 1} were added but some exist already")
        capacity = self._capacity + count
        if capacity > self._stack.size:
            stack = np.empty(max(capacity, 2 * self._stack.size), np.int32)
            stack[: self._count] = self._stack[: self._count]
            self._stack = stack
            self._order = np.arange(stack.size, dtype=np.int32)
        if taken is None:
            top = self._count + count
            self._stack[self._count : top] = np.arange(end - 1, first - 1, -1, dtype=np.int32)
            span[:] = self._order[self._count : top][::-1]
        else:
            free = np.flatnonzero(~taken)[::-1]
            top = self._count + len(free)
            self._stack[self._count : top] = free + first
            span[:] = _TAKEN
            span[free] = self._order[self._count : top]
        self._count = top
        self._capacity = capacity

    def remove(self, first: int, count: int) -> None:
        """Slots ``first`` to ``first + count - 1`` cease to be. Costs as much as the range is long.

        Raises:
            ConfigError: the range is negative or beyond int32.
            IntegrityError: one of them is taken or does not exist; nothing changes.
        """
        end = self._end(first, count)
        span = self._place[first:end]
        if span.size != count or (span < 0).any():
            raise IntegrityError(f"slots {first} to {end - 1} were removed but not all of them are free")
        # The holes that the range leaves below the new top are filled with what stays above it.
        top = self._count - count
        holes = np.sort(span[span < top])
        above = self._stack[top : self._count]
        stay = above[(above < first) | (above >= end)]
        self._stack[holes] = stay
        self._place[stay] = holes
        span[:] = _ABSENT
        self._count = top
        self._capacity -= count

    def withdraw(self, slots: SlotArray) -> None:
        """Take these very slots (int32 [n]). Costs as much as there are free ones.

        Raises:
            IntegrityError: one of them is not free; nothing changes.
        """
        if not self.is_free(slots).all():
            raise IntegrityError("slots were withdrawn but not all of them are free")
        self._place[slots] = _TAKEN
        free = self._stack[: self._count]
        stay = free[self._place[free] != _TAKEN]
        self._count = len(stay)
        self._stack[: self._count] = stay
        self._place[stay] = self._order[: self._count]

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every slot is free exactly once or taken, and the counts agree."""
        free = self._stack[: self._count]
        if not np.array_equal(self._place[free], self._order[: self._count]):
            raise IntegrityError("the stack of free slots and the places of the slots disagree")
        if np.count_nonzero(self._place >= 0) != self._count:
            raise IntegrityError("a slot is marked free but is not in the stack of free slots")
        if np.count_nonzero(self._place != _ABSENT) != self._capacity:
            raise IntegrityError("the number of slots and the capacity disagree")

    @staticmethod
    def _end(first: int, count: int) -> int:
        first = expect_integer("first", first, 0, _MOST_SLOTS)
        return first + expect_integer("count", count, 0, _MOST_SLOTS - first)


class DeviceArena:
    """One slab of equal slots in VRAM; in host memory, by the same code, where ``device`` is ``cpu``.

    Args:
        block_bytes: bytes of a slot; a multiple of 128.
        num_blocks: slots.
        device: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        ConfigError: a value is out of range, or there is no such device.
        MemoryUnavailableError: the device does not have that much memory left.
    """

    def __init__(self, block_bytes: int, num_blocks: int, device: str = "cpu") -> None:
        block_bytes = expect_integer("block_bytes", block_bytes, SLICE_ALIGNMENT, MOST_BYTES)
        if block_bytes % SLICE_ALIGNMENT:
            raise ConfigError(
                "block_bytes", f"must be a positive multiple of {SLICE_ALIGNMENT}, got {block_bytes}"
            )
        num_blocks = expect_integer("device_blocks", num_blocks, 1, MOST_BLOCKS)
        device = expect_text("device", device)
        self._slab: torch.Tensor | None = _slab(block_bytes, num_blocks, device)
        self.base = self._slab.data_ptr()
        """Address of slot 0."""
        self.device = str(self._slab.device)
        """Where the slab is: ``cpu`` or ``cuda:N``."""
        self.slot_bytes = block_bytes
        self.num_slots = num_blocks
        self._span = block_bytes * num_blocks
        self.slots = SlotAllocator(num_blocks)

    @property
    def slab(self) -> torch.Tensor:
        """The whole arena: uint8 [num_slots, slot_bytes], contiguous.

        Raises:
            ClosedError: after `close`.
        """
        if self._slab is None:
            raise ClosedError("the device arena was closed")
        return self._slab

    def addresses(self, slots: SlotArray) -> AddressArray:
        """int64 [n]: the address of each of ``slots`` (int32 [n]), tags zero.

        Raises:
            ClosedError: after `close`.
        """
        if self._slab is None:
            raise ClosedError("the device arena was closed")
        return expect_array("slots", slots, _INT32).astype(np.int64) * self.slot_bytes + self.base

    def slots_at(self, addresses: AddressArray) -> SlotArray:
        """int32 [n]: the slot that each of ``addresses`` (int64 [n]; tags are ignored) names.

        Raises:
            IntegrityError: an address is not that of a slot of this arena.
        """
        offsets = (expect_array("addresses", addresses, _INT64) & ~TAG_MASK) - self.base
        slots = offsets // self.slot_bytes  # numpy multiplies instead; divmod would divide
        # Seen as unsigned, an address below the arena is far beyond it.
        inside = offsets.view(np.uint64) < self._span
        if not (inside & (slots * self.slot_bytes == offsets)).all():
            raise IntegrityError("an address is not that of a slot of this arena")
        return slots.astype(np.int32)

    def contains(self, addresses: AddressArray) -> npt.NDArray[np.bool_]:
        """bool [n]: which of ``addresses`` (int64 [n]) lie in this arena."""
        addresses = expect_array("addresses", addresses, _INT64)
        return (addresses >= self.base) & (addresses < self.base + self.num_slots * self.slot_bytes)

    def open_to(self, device: str) -> None:
        """Let another GPU read and write the slots in place, at the addresses that they have.

        Args:
            device: ``cuda`` or ``cuda:N``.

        Raises:
            ConfigError: it is no CUDA device or cannot reach this one's memory, or the arena is not in VRAM.
            ClosedError: after `close`.
        """
        if self.slab.device.type != "cuda":
            raise ConfigError("device", f"an arena on {self.device} is not in the memory of a GPU")
        let_reach(device, self.device)

    def close(self) -> None:
        """Give the memory back, once tensors that the caller made of `slab` are gone too. Idempotent."""
        self._slab = None


def _slab(block_bytes: int, num_blocks: int, device: str) -> torch.Tensor:
    import torch

    total = block_bytes * num_blocks
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ConfigError("device", f"must be cpu, cuda or cuda:N, got {device!r}") from None
    if where.type == "cuda":
        if not torch.cuda.is_available() or (where.index or 0) >= torch.cuda.device_count():
            raise ConfigError("device", f"{device} was asked for, but there is no such CUDA device")
        if device == "cuda":
            where = torch.device("cuda", torch.cuda.current_device())
        free, whole = torch.cuda.mem_get_info(where)
        what = f"free on {where}"
        if total > whole:
            raise _no_memory(block_bytes, num_blocks, free, what)
        spare = 0  # torch aligns device memory to 512 bytes
    elif where.type == "cpu":
        headroom = memory_headroom()
        free, what = headroom.usable_bytes, headroom.limit
        spare = _HOST_ALIGNMENT
        if total > free:  # the kernel would grant it and kill later
            raise _no_memory(block_bytes, num_blocks, free, what)
    else:
        raise ConfigError("device", f"must be cpu, cuda or cuda:N, got {device!r}")
    try:
        memory = torch.empty(total + spare, dtype=torch.uint8, device=where)
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU allocator raises a plain one
        raise _no_memory(block_bytes, num_blocks, free, what) from error
    start = -memory.data_ptr() % _HOST_ALIGNMENT if spare else 0
    return memory[start : start + total].view(num_blocks, block_bytes)


def _no_memory(block_bytes: int, num_blocks: int, free: int, what: str) -> MemoryUnavailableError:
    if block_bytes > free:
        return MemoryUnavailableError(
            f"block_size: one block is {format_bytes(block_bytes)}, but only {format_bytes(free)} is {what}"
        )
    return MemoryUnavailableError(
        f"device_blocks: {num_blocks} blocks of {format_bytes(block_bytes)} are "
        f"{format_bytes(block_bytes * num_blocks)}, but only {format_bytes(free)} is {what}; "
        f"at most {free // block_bytes} blocks fit"
    )
