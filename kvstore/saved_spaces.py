"""The spaces in an arena's records: what describes one, and taking over what another process left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import msgpack
import numpy as np

from ..tiers.errors import ConfigError, IntegrityError
from ..tiers.layout import KVLayout
from ..tiers.record_file import RecordFile, Section, SectionKind
from .hashing import HASH_BYTES, space_id
from .policy import EvictionPolicy, Losses
from .purging import read_barred
from .slot_arrays import SlotArrays, slot_specs
from .slots import Adopted, SlotRecords

__all__ = ["SavedSpace", "SpaceName", "new_records", "read_spaces", "space_in"]

_FIELDS: Final = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "block_size",
    "dtype",
    "format",
    "planes",
    "window",
    "scale_bytes",
)


@dataclass(frozen=True)
class SpaceName:
    """What a section about a space says that it is of."""

    layout: KVLayout
    shard: str
    tenant: str

    @property
    def id(self) -> bytes:
        """16 bytes that name the space."""
        return space_id(self.layout, self.shard, self.tenant)


def space_in(section: Section) -> SpaceName:
    """Which space a section is about.

    Raises:
        IntegrityError: it does not say so.
    """
    try:
        *values, shard, tenant = msgpack.unpackb(section.about)
        name = SpaceName(KVLayout(**dict(zip(_FIELDS, values, strict=True))), shard, tenant)
        _ = name.id  # which refuses what names no space
    except (ValueError, TypeError, ConfigError) as error:
        raise IntegrityError(f"the description of a space is damaged: {error}") from error
    return name


@dataclass(frozen=True, eq=False)
class SavedSpace:
    """A space that another process had.

    Args:
        name: what it is of.
        records: its slots.
        adopted: what was found of them.
        barred: the section about what the cold tier was to remove and did not yet; None: nothing.
    """

    name: SpaceName
    records: SlotRecords
    adopted: Adopted
    barred: Section | None = None


def new_records(
    file: RecordFile,
    layout: KVLayout,
    shard: str,
    tenant: str,
    num_extents: int,
    policy: Callable[[Losses], EvictionPolicy],
) -> SlotRecords:
    """Records of a space that is new, in an arena's records.

    Raises:
        CapacityError, MemoryUnavailableError: there is no room for them.
    """
    per_extent = file.identity.extent_bytes // layout.block_bytes
    capacity = per_extent * num_extents
    about: bytes = msgpack.packb([*(getattr(layout, name) for name in _FIELDS), shard, tenant])
    section = file.add(SectionKind.SPACE, about, slot_specs(capacity, num_extents))
    arrays = SlotArrays.recorded(section, capacity, num_extents, space_id(layout, shard, tenant))
    arrays.begin()
    return SlotRecords(per_extent, num_extents, policy, arrays)


def read_spaces(
    file: RecordFile, policy: Callable[[Losses], EvictionPolicy], *, same_cold: bool
) -> list[SavedSpace]:
    """The spaces that another process had, all of their committed blocks to be found.

    Args:
        same_cold: the cold tier is the one that it was.

    Raises:
        IntegrityError: the records are damaged, and nothing of them can be believed.
    """
    num_extents = file.identity.capacity_bytes // file.identity.extent_bytes
    found = [
        _read(file, section, num_extents, policy, same_cold) for section in file.sections(SectionKind.SPACE)
    ]
    if len({one.name.id for one in found}) < len(found):
        raise IntegrityError("a space is described twice")
    barred: dict[bytes, Section] = {}
    for section in file.sections(SectionKind.BARRED):
        read_barred(section)
        barred[section.about[:HASH_BYTES]] = section
    found = [replace(one, barred=barred.pop(one.name.id, None)) for one in found]
    for section in barred.values():
        file.remove(section)
    extents = [extent for one in found for extent in one.records.extents]
    if len(set(extents)) < len(extents):
        raise IntegrityError("an extent belongs to two spaces")
    return found


def _read(
    file: RecordFile,
    section: Section,
    num_extents: int,
    policy: Callable[[Losses], EvictionPolicy],
    same_cold: bool,
) -> SavedSpace:
    name = space_in(section)
    per_extent = file.identity.extent_bytes // name.layout.block_bytes
    capacity = per_extent * num_extents
    if not capacity or capacity > np.iinfo(np.int32).max:
        raise IntegrityError("a space's blocks do not fit the arena's extents")
    arrays = SlotArrays.recorded(section, capacity, num_extents, name.id)
    records = SlotRecords(per_extent, num_extents, policy, arrays)
    return SavedSpace(name, records, records.adopt(same_cold=same_cold))
