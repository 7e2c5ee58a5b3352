"""What ``/v1`` says and takes: a model of every answer and of every body that is sent.

Names end in what they are measured in: ``_bytes``, ``_blocks``, ``_tokens``, ``_seconds``. Hashes and ids
of spaces are 32 lower-case hex digits. Times are seconds since 1970, as `time.time` tells them. What is not
known is null, never a number that stands for it. `docs/rest.md` lists the routes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from ...kvstore.policy import DEFAULT_POLICY, check_weights, known_weights, policy_names
from ...tiers.errors import ConfigError
from ...tiers.settings import MOST_SECONDS

__all__ = [
    "MOST_CELLS",
    "MOST_HASHES",
    "MOST_PAGE",
    "MOST_TOKENS",
    "Alive",
    "ChainBlock",
    "Client",
    "ColdAttach",
    "ColdChange",
    "ColdDetach",
    "ColdTier",
    "Config",
    "ConfigChange",
    "ConfigChanged",
    "Counted",
    "DegradedPart",
    "DrainChange",
    "Drained",
    "EngineState",
    "EventKind",
    "EvictRequest",
    "Evicted",
    "Flow",
    "Hex",
    "HitCounters",
    "Invalid",
    "Listed",
    "Lookup",
    "LookupSpace",
    "LookupText",
    "LookupTokens",
    "MapCells",
    "MapSpace",
    "Page",
    "Pinned",
    "Policy",
    "PolicyChange",
    "Prefix",
    "PrefixChain",
    "PrefixMoved",
    "PrefixOrder",
    "Problem",
    "Purged",
    "Ready",
    "Role",
    "Session",
    "SessionCommanded",
    "Space",
    "SpaceShare",
    "Status",
    "StoreEvent",
    "TenantShare",
    "Tier",
    "TierDetail",
    "TierMap",
    "TierName",
    "WarmRequest",
    "Warmed",
]

MOST_CELLS: Final = 4096
"""Of a map."""
MOST_HASHES: Final = 4096
"""Of one request."""
MOST_PAGE: Final = 1000
"""Of what is listed at a time."""
MOST_TOKENS: Final = 1 << 17
"""Of one prompt that is looked up."""
_MOST_COUNT: Final = 1 << 53
"""Of what is sent: a number that every reader of JSON holds exactly."""
_MOST_WAIT: Final = 60.0
"""What a request of the sidecar waits at most."""
_MOST_DEADLINE: Final = 600.0
_POLICY: Final = DEFAULT_POLICY

T = TypeVar("T")

_HASH: Final = "9f2c41d07be3a85516fe0c9b7d24e831"
_PARENT: Final = "1b7e90ac53d8f2264a0be7719c35d6f8"
_SPACE: Final = "5a1d3f0c8e7742b9a6c4e1902fb8d735"

Hex = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9a-f]{32}$"),
    Field(description="16 bytes as 32 lower-case hex digits", examples=[_HASH]),
]
Bytes = Annotated[int, Field(ge=0, description="bytes", examples=[8_589_934_592])]
Blocks = Annotated[int, Field(ge=0, description="blocks", examples=[40_960])]
Tokens = Annotated[int, Field(ge=0, description="tokens", examples=[2048])]
Seconds = Annotated[float, Field(ge=0, description="seconds", examples=[1.5])]
Share = Annotated[float, Field(ge=0, le=1, description="a share, from 0 to 1")]
Wait = Annotated[float, Field(gt=0, le=_MOST_WAIT, description="seconds that it may take", examples=[30.0])]
TenantName = Annotated[str, StringConstraints(max_length=256), Field(examples=["acme"])]
PolicyName = Annotated[
    str, StringConstraints(pattern=f"^({'|'.join(policy_names())})$"), Field(examples=[_POLICY])
]
Reason = Annotated[str, Field(description="why, in words", examples=["the cold tier does not answer"])]


class TierName(StrEnum):
    """Where blocks lie."""

    DEVICE = "device"
    """Device memory of the engines that report it."""
    HOST = "host"
    """The sidecar's arena."""
    COLD = "cold"
    """Redis or a disk."""


class Role(StrEnum):
    """What who asks may do."""

    READ = "read"
    """Look."""
    OPERATE = "operate"
    """Look, and change."""


class PrefixOrder(StrEnum):
    """What is listed first."""

    LARGEST = "largest"
    """Of most tokens."""
    HOTTEST = "hottest"
    """Matched most often."""
    SHARED = "shared"
    """Continued by most others."""


class _Answer(BaseModel):
    """What is said."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_serialization_defaults_required=True)


class _Body(BaseModel):
    """What is sent: a field that is not known is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


# Problems


class Invalid(_Answer):
    """One thing that is wrong with a request."""

    where: str = Field(description="which parameter, or field of the body", examples=["body.most_bytes"])
    problem: str = Field(examples=["Input should be greater than 0"])


class Problem(_Answer):
    """Why a request was not done (RFC 9457), as ``application/problem+json``."""

    type: str = Field(description="names the kind of problem", examples=["urn:kvpager:problem:not-found"])
    title: str = Field(description="the kind in words", examples=["Not found"])
    status: int = Field(ge=400, le=599, description="of HTTP, once more", examples=[404])
    detail: str = Field(description="what is wrong this time", examples=["no space has this prefix"])
    instance: str = Field(description="the path that was asked for", examples=[f"/v1/prefixes/{_HASH}"])
    setting: str | None = Field(None, description="the setting that has a wrong value", examples=[None])
    invalid: list[Invalid] = Field(default_factory=list, description="all that is wrong with the request")


# Pages


class Page(_Answer, Generic[T]):
    """A part of a list."""

    items: list[T]
    next_cursor: str | None = Field(
        description="say it as `cursor` to be given what follows; null: this was the last part",
        examples=["WzIwNDgsIjlmMmM0MWQwIl0"],
    )
    age_seconds: Seconds = Field(description="how old what is said is, in seconds")


class Listed(_Answer, Generic[T]):
    """A list that is short enough to be given whole."""

    items: list[T]


# Status


class DegradedPart(_Answer):
    """A part that does not do all of its work."""

    part: str = Field(description="which", examples=["cold"])
    since: float = Field(description="seconds since 1970", examples=[1_767_225_600.0])
    reason: Reason


class HitCounters(_Answer):
    """What became of blocks that engines asked for since the sidecar was started; rates are differences."""

    host_blocks: Blocks = Field(description="found in host memory, in blocks")
    cold_blocks: Blocks = Field(description="brought up from the cold tier, in blocks")
    missed_blocks: Blocks = Field(description="not found in host memory, in blocks")
    saved_tokens: Tokens = Field(
        description="tokens of the blocks that were found in host memory, which nobody computed again; of a "
        "model in shards each shard counts"
    )


class Space(_Answer):
    """One layout and shard of one tenant's blocks, in host memory."""

    id: Hex = Field(examples=[_SPACE])
    tenant: TenantName
    shard: str = Field(examples=["tp0/2"])
    num_layers: int = Field(examples=[32])
    num_kv_heads: int = Field(examples=[8])
    head_dim: int = Field(examples=[128])
    block_size: int = Field(description="tokens of a block", examples=[16])
    dtype: str = Field(examples=["float16"])
    format: str = Field(examples=["swizzled"])
    planes: int = Field(examples=[2])
    window: int | None = Field(description="tokens of its window; null: none", examples=[None])
    scale_bytes: int = Field(description="of a head's rows of a block, in bytes", examples=[0])
    block_bytes: Bytes = Field(examples=[2_097_152])
    extents: int = Field(ge=0, description="extents that it has now", examples=[3])
    resident_blocks: Blocks
    reserved_blocks: Blocks = Field(description="being written, in blocks")
    leased_blocks: Blocks = Field(description="blocks that somebody leases")
    pinned_blocks: Blocks
    evictable_blocks: Blocks = Field(description="blocks that may go at any moment")
    free_blocks: Blocks = Field(description="room in its own extents, in blocks")
    dirty_blocks: Blocks = Field(description="blocks without a copy in the cold tier")


class ColdTier(_Answer):
    """The cold tier that is attached."""

    kind: str = Field(description="redis, redis+cluster or disk", examples=["redis"])
    url: str = Field(description="without its password", examples=["redis://cache.internal:6379/0"])
    state: str = Field(description="how it does", examples=["ready"])


class Status(_Answer):
    """The sidecar as it is."""

    version: str = Field(examples=["0.1.0"])
    boot_id: Hex = Field(description="another one after each start of the sidecar")
    pid: int = Field(examples=[4711])
    started_at: float = Field(description="seconds since 1970", examples=[1_767_225_600.0])
    uptime_seconds: Seconds
    draining: bool = Field(description="it takes no reservations and loads")
    degraded: list[DegradedPart] = Field(description="empty: all is well")
    tiers: list[TierName]
    cold: ColdTier | None = Field(description="null: there is none")
    spaces: list[Space]
    clients: int = Field(ge=0, description="connections, the admin process's own among them", examples=[3])
    sessions_awake: int = Field(ge=0, examples=[12])
    sessions_asleep: int = Field(ge=0, examples=[988])
    hits: HitCounters
    role: Role = Field(description="what who asks may do")
    age_seconds: Seconds = Field(description="how old what is said is, in seconds")


# Tiers


class Flow(_Answer):
    """What moved from one tier to another."""

    source: TierName
    target: TierName
    moved_bytes: Bytes | None = Field(
        description="since the sidecar was started, or the cold tier attached; null where engines move them"
    )
    busy_seconds: Seconds | None = Field(description="that it took, in seconds of all movers together")
    bytes_per_second: float | None = Field(
        ge=0,
        description="lately, of a few seconds; null where nothing has moved",
        examples=[1_473_741_824.0],
    )
    best_bytes_per_second: float | None = Field(
        ge=0, description="the best of such figures since the admin process was started"
    )
    ceiling_bytes_per_second: float | None = Field(
        ge=0,
        description="what `kvpager bench` last measured that the machine reaches at best; null: it did not",
        examples=[55_834_574_848.0],
    )


class Tier(_Answer):
    """How full a tier is. A block is counted as leased, else as pinned, else as reserved, else as idle."""

    tier: TierName
    state: Literal["ready", "degraded", "away"] = Field(examples=["ready"])
    reason: Reason | None = Field(description="why it is not ready")
    capacity_bytes: Bytes | None = Field(description="null: it does not say")
    used_bytes: Bytes | None = Field(description="bytes of blocks, reserved ones included")
    free_bytes: Bytes | None
    idle_bytes: Bytes | None = Field(description="of blocks that nobody relies on: these may go")
    leased_bytes: Bytes | None
    pinned_bytes: Bytes | None
    reserved_bytes: Bytes | None
    dirty_bytes: Bytes | None = Field(description="of blocks without a copy in the cold tier")
    blocks: Blocks | None


class TenantShare(_Answer):
    """What one tenant has of a tier."""

    tenant: TenantName
    blocks: Blocks | None
    used_bytes: Bytes
    leased_bytes: Bytes | None
    pinned_bytes: Bytes | None
    quota_bytes: Bytes | None = Field(description="null: none")


class SpaceShare(_Answer):
    """What one space has of a tier."""

    space: Hex = Field(examples=[_SPACE])
    tenant: TenantName
    shard: str = Field(examples=["tp0/2"])
    blocks: Blocks
    used_bytes: Bytes
    leased_bytes: Bytes
    pinned_bytes: Bytes
    free_bytes: Bytes = Field(description="room in its own extents, in bytes")


class TierDetail(Tier):
    """A tier, who fills it, and what moves."""

    tenants: list[TenantShare] | None = Field(description="null where the tier does not tell them apart")
    spaces: list[SpaceShare] | None
    flows: list[Flow] = Field(description="to and from the tier")
    queue_blocks: Blocks | None = Field(description="on their way to the cold tier just now, in blocks")
    largest_free_run_bytes: Bytes | None = Field(description="the longest stretch with no block in it")
    remainder_bytes: Bytes | None = Field(
        description="ends of extents, shorter than a block: lost until the extent is recycled"
    )
    last_blocks_bytes: Bytes | None = Field(
        description="so many bytes at most are lost in unfilled last blocks of the reported sessions"
    )
    age_seconds: Seconds = Field(description="how old what is said is, in seconds")


class MapSpace(_Answer):
    """Whose a cell may be."""

    space: Hex = Field(examples=[_SPACE])
    tenant: TenantName
    shard: str = Field(examples=["tp0/2"])


class MapCells(_Answer):
    """One number a cell in each list. ``vacant``, ``free``, ``reserved``, ``leased``, ``pinned`` and ``idle``
    are shares of the cell that add up to 1."""

    vacant: list[Share] = Field(description="in no space's extent")
    free: list[Share] = Field(description="empty slots of a space, and ends of extents")
    reserved: list[Share] = Field(description="being written")
    leased: list[Share] = Field(description="somebody relies on them")
    pinned: list[Share] = Field(description="kept, and not leased")
    idle: list[Share] = Field(description="these may go")
    dirty: list[Share] = Field(description="without a copy in the cold tier, of whatever state")
    age_seconds: list[float | None] = Field(
        description="since its blocks were last used, on average, in seconds; null: none, or not known"
    )
    space: list[int | None] = Field(
        description="whose it is, a place in the map's `spaces`; the one that has most; null: nobody's"
    )


class TierMap(_Answer):
    """The arena from its first byte to its last, as cells of equal size."""

    tier: TierName
    capacity_bytes: Bytes
    cell_bytes: int = Field(gt=0, description="bytes of one cell; the last one may be shorter")
    count: int = Field(ge=0, description="cells, as many as were asked for at most", examples=[1024])
    extents: int = Field(ge=0, description="the arena is cut into so many", examples=[128])
    spaces: list[MapSpace]
    cells: MapCells
    free_bytes: Bytes
    largest_free_run_bytes: Bytes = Field(description="the longest stretch with no block in it")
    free_runs: int = Field(ge=0, description="stretches with no block in them", examples=[17])
    remainder_bytes: Bytes = Field(description="ends of extents that are shorter than a block, in bytes")
    age_seconds: Seconds = Field(description="how old what is said is, in seconds")


# Prefixes


class ChainBlock(_Answer):
    """One block of a prefix."""

    hash: Hex
    depth: int | None = Field(description="1 for the first block; null: not known", examples=[128])
    tier: TierName = Field(description="the fastest that has it, of host and cold")
    in_cold: bool = Field(description="the cold tier has a copy")
    references: int = Field(ge=0, description="leases", examples=[2])
    pins: int = Field(ge=0, examples=[0])
    hits: int = Field(ge=0, description="how often it was matched", examples=[311])
    idle_seconds: Seconds | None = Field(description="since it was last used, in seconds; null: not known")


class Prefix(ChainBlock):
    """A prompt's beginning, named by the hash of its last block.

    Its *own* blocks are those that no other prefix has: what continues it, and what comes before it up to
    where another one goes another way. They are what demoting or evicting it takes.
    """

    space: Hex = Field(examples=[_SPACE])
    tenant: TenantName
    shard: str = Field(examples=["tp0/2"])
    parent: Hex | None = Field(
        description="the block before; null: the first, or not known", examples=[_PARENT]
    )
    tokens: Tokens | None = Field(description="of all its blocks together, in tokens; null: not known")
    bytes: Bytes | None = Field(description="of all its blocks together; null: not known")
    children: int = Field(ge=0, description="resident blocks that continue it directly", examples=[3])
    continuations: int = Field(ge=1, description="ends of prompts that begin with it", examples=[100])
    own_blocks: Blocks
    own_bytes: Bytes


class PrefixChain(_Answer):
    """A prefix with its blocks, from the first to the last, as far as they are resident and known."""

    prefix: Prefix
    chain: list[ChainBlock] = Field(description="a part of its blocks, in order")
    chain_blocks: Blocks = Field(description="how many are known altogether")
    complete: bool = Field(description="the chain goes back to the prompt's first block")
    next_cursor: str | None = Field(description="say it as `cursor` to be given what follows")
    age_seconds: Seconds = Field(description="how old what is said is, in seconds")


class _Prompt(_Body):
    """Where a prompt is looked for."""

    root: Hex = Field(description="where the engine's chain of hashes starts: `ChainIdentity.root`")
    space: Hex | None = Field(None, description="look in this space alone; null: in all")
    deadline_seconds: float = Field(
        0.5, ge=0, le=30, description="how long the cold tier may be asked; 0: not at all"
    )


class LookupTokens(_Prompt):
    """A prompt as its token ids."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"tokens": [1, 2, 3, 4], "root": _HASH, "space": _SPACE}]}
    )

    tokens: list[Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]] = Field(max_length=MOST_TOKENS)


class LookupText(_Prompt):
    """A prompt as text, with the tokenizer that makes tokens of it."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"text": "Once upon a time", "tokenizer": "gpt2", "root": _HASH}]}
    )

    text: str = Field(min_length=1, max_length=1 << 20)
    tokenizer: str = Field(
        min_length=1, max_length=256, description="its name, which the Hub's local cache has"
    )


class LookupSpace(_Answer):
    """How much of a prompt one space has."""

    space: Hex = Field(examples=[_SPACE])
    tenant: TenantName
    shard: str = Field(examples=["tp0/2"])
    block_size: int = Field(examples=[16])
    blocks: Blocks = Field(description="full blocks of the prompt")
    host_blocks: Blocks = Field(description="leading blocks in host memory")
    cold_blocks: Blocks | None = Field(
        description="of those that follow, how many the cold tier seems to have; null: it was not asked"
    )
    hit_tokens: Tokens = Field(description="tokens that need not be computed")
    hit_bytes: Bytes
    load_seconds: Seconds | None = Field(
        description="that bringing up what is in the cold tier would take, as fast as it was so far"
    )
    host_load_seconds: Seconds | None = Field(
        description="that an engine would take over reading what is in host memory; null: no engine told"
    )
    recompute_seconds: Seconds | None = Field(description="that computing what is there would take")
    recompute_reason: Reason | None = Field(
        description="why that is not known; then all that is there is taken"
    )
    taken_blocks: Blocks = Field(
        description="leading blocks that an engine would take, so that its first token comes soonest"
    )
    saved_tokens: Tokens = Field(description="tokens of these, which are not computed")
    saved_seconds: Seconds | None = Field(
        description="sooner that the first token comes than without them; null where computing is not known"
    )


class Lookup(_Answer):
    """How much of a prompt is there."""

    tokens: Tokens = Field(description="of the prompt")
    spaces: list[LookupSpace]


class Pinned(_Answer):
    """What became of the pins of a prefix."""

    hash: Hex
    pinned: bool
    changed_blocks: Blocks = Field(description="blocks that were given a pin, or had one taken")


class PrefixMoved(_Answer):
    """What became of a prefix that is to be in another tier."""

    hash: Hex
    tier: TierName = Field(description="where it was to go")
    asked_blocks: Blocks
    moved_blocks: Blocks = Field(
        description="blocks that are there now and were not; leased ones stay in host memory"
    )


_RESTRICTIONS: Final[list[Any]] = [
    {"required": [name], "properties": {name: said}}
    for name, said in (
        ("tenant", {"type": "string"}),
        ("spaces", {"minItems": 1}),
        ("prefixes", {"minItems": 1}),
        ("older_than_seconds", {"type": "number"}),
        ("most_bytes", {"type": "integer"}),
        ("everything", {"const": True}),
    )
]
"""What a request to evict says at least, one of these."""


class EvictRequest(_Body):
    """What is to go. Every restriction that is given holds; one is needed, or `everything`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"tenant": "acme", "older_than_seconds": 3600, "dry_run": True}],
            "anyOf": _RESTRICTIONS,
        }
    )

    tier: Literal["host", "cold"] = Field("host", description="where it is to go from")
    tenant: TenantName | None = Field(None, min_length=1, description="blocks of this tenant")
    spaces: list[Hex] = Field(default_factory=list, max_length=MOST_HASHES, description="blocks of these")
    prefixes: list[Hex] = Field(
        default_factory=list,
        max_length=MOST_HASHES,
        description="own blocks of these: what continues them, and what comes before and no other has",
    )
    older_than_seconds: float | None = Field(None, gt=0, le=1e9, description="not used for so long")
    most_bytes: int | None = Field(
        None, gt=0, le=_MOST_COUNT, description="so many bytes at most, coldest first"
    )
    everything: bool = Field(False, description="no restriction is meant")
    dry_run: bool = Field(False, description="say what would go, and do nothing")

    @model_validator(mode="after")
    def _is_restricted(self) -> EvictRequest:
        restricted = self.tenant or self.spaces or self.prefixes or self.older_than_seconds or self.most_bytes
        if not (restricted or self.everything):
            raise ValueError("nothing restricts what is to go: say what, or `everything`")
        return self


class Evicted(_Answer):
    """What went, or would go."""

    dry_run: bool
    blocks: Blocks
    bytes: Bytes
    lost_blocks: Blocks = Field(description="those of them that no other tier has")


class WarmRequest(_Body):
    """Blocks to bring up from the cold tier."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"hashes": [_PARENT, _HASH], "space": _SPACE}]})

    hashes: list[Hex] = Field(
        min_length=1, max_length=MOST_HASHES, description="of blocks; those of one prompt in their order"
    )
    space: Hex | None = Field(None, description="of this space alone; null: of all")
    deadline_seconds: Wait = 30.0


class Warmed(_Answer):
    """What is in host memory now."""

    asked_blocks: Blocks
    resident_blocks: Blocks = Field(description="those of them that are in host memory")
    loaded_blocks: Blocks = Field(description="those of these that were brought up for this request")


# Engines


class EngineState(_Answer):
    """What an engine said of itself."""

    block_bytes: Bytes
    device_blocks: Blocks = Field(description="that its device memory holds")
    device_held_blocks: Blocks = Field(description="of them, those that running sequences have")
    to_device_bytes_per_second: float = Field(
        ge=0, description="lately, in its own words", examples=[21_474_836_480.0]
    )
    from_device_bytes_per_second: float = Field(ge=0, description="likewise", examples=[1_073_741_824.0])
    sessions: int = Field(ge=0, examples=[1000])
    age_seconds: Seconds = Field(description="since it said so, in seconds")


class Client(_Answer):
    """A connection to the sidecar."""

    id: int = Field(ge=0, examples=[7])
    name: str = Field(description="what it calls itself", examples=["engine-0 (pid 4712)"])
    group: str = Field(description="what its processes share", examples=["9f2c41d07be3a85516fe0c9b7d24e831"])
    remote: bool = Field(description="it came over TCP")
    leased_blocks: Blocks
    reserved_blocks: Blocks
    engine: EngineState | None = Field(description="null: it did not report")


class Session(_Answer):
    """A conversation that an engine holds."""

    id: str = Field(examples=["chat-81f3"])
    client: int = Field(ge=0, description="the connection of the engine that holds it", examples=[7])
    engine: str = Field(description="that engine's name", examples=["engine-0 (pid 4712)"])
    state: str = Field(description="in the engine's own words", examples=["asleep"])
    asleep: bool
    age_seconds: Seconds = Field(description="since the engine said so, in seconds")


class SessionCommanded(_Answer):
    """An engine did as it was told."""

    session: str = Field(examples=["chat-81f3"])
    command: Literal["sleep", "wake"]
    blocks: Blocks = Field(description="it was done to so many blocks")


class Counted(_Answer):
    """It was done."""

    count: int = Field(ge=0, examples=[1])


class Purged(_Answer):
    """What is gone from every tier, and what is not yet."""

    spaces: int = Field(ge=0, examples=[2])
    host_blocks: Blocks
    host_bytes: Bytes
    cold_blocks: Blocks
    cold_bytes: Bytes
    notes: int = Field(ge=0, description="small records, of sessions", examples=[1])
    left: dict[str, Any] = Field(
        description="what is not gone yet: `leased` and `reserved` map who holds blocks to how many; `cold` "
        "says why the cold tier has not removed all. Empty: nothing",
        examples=[{}],
    )


# Settings


class PolicyWeight(_Answer):
    """A number of a policy that can be set."""

    value: float = Field(description="what it is now", examples=[0.2])
    usual: float = Field(description="what it is where nothing is said", examples=[0.1])
    least: float = Field(description="its lower bound", examples=[0.0])
    most: float = Field(description="its upper bound", examples=[1.0])
    above: bool = Field(description="it is greater than `least`", examples=[True])


class Policy(_Answer):
    """How blocks are ranked for eviction."""

    policy: str = Field(examples=[_POLICY])
    weights: dict[str, PolicyWeight] = Field(description="the policy's, by name", examples=[{}])
    policies: list[str] = Field(description="those that there are", examples=[policy_names()])


class PolicyChange(_Body):
    """Another policy."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"policy": _POLICY}]})

    policy: PolicyName


class Config(_Answer):
    """What can be changed while the sidecar runs."""

    policy: str = Field(examples=[_POLICY])
    clean_ahead: Share = Field(
        description="share of host memory that is kept copied to the cold tier", examples=[0.25]
    )
    cold_deadline: float = Field(
        ge=0, description="seconds that a call of the cold tier in the background may take", examples=[5.0]
    )
    quotas: dict[str, int] = Field(
        description="bytes that the blocks of each tenant may take; *: of each that is not named",
        examples=[{"acme": 8_589_934_592}],
    )
    policy_weights: dict[str, float] = Field(
        description="those of the policy's weights that are other than its own, by name", examples=[{}]
    )
    retention_ttl: float = Field(
        gt=0,
        description="seconds that advice on how long to keep blocks holds, where it does not say that",
        examples=[600.0],
    )
    log_level: str = Field(examples=["warning"])


def _weights_of(policy: str) -> dict[str, Any]:
    """The schema of a change of settings whose weights this policy takes."""
    try:
        known = known_weights(policy)
    except ConfigError:  # it cannot be imported
        known = {}
    bounds: dict[str, Any] = {
        name: {
            "type": "number",
            "exclusiveMinimum" if weight.above else "minimum": weight.least,
            "maximum": weight.most,
        }
        for name, weight in known.items()
    }
    weights = {"type": "object", "properties": bounds, "additionalProperties": False}
    return {
        "properties": {
            "policy": {"enum": [policy, None]},
            "policy_weights": {"anyOf": [weights, {"type": "null"}]},
        }
    }


class ConfigChange(_Body):
    """What is to change, all of it or nothing; what is not named stays."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"clean_ahead": 0.5}],
            "anyOf": [_weights_of(name) for name in policy_names()],
        }
    )

    policy: PolicyName | None = None
    clean_ahead: float | None = Field(None, ge=0, le=1, strict=True)
    cold_deadline: float | None = Field(None, gt=0, le=_MOST_DEADLINE, strict=True, description="seconds")
    quotas: dict[TenantName, Annotated[int, Field(gt=0, le=_MOST_COUNT)]] | None = Field(
        None, max_length=4096, description="all of them: a tenant that is not named has none"
    )
    policy_weights: dict[str, Annotated[float, Field(ge=0, strict=True)]] | None = Field(
        None,
        max_length=64,
        description="all of them: a weight that is not named is the policy's own; none where the policy "
        "changes and nothing is said",
    )
    retention_ttl: float | None = Field(None, gt=0, le=MOST_SECONDS, strict=True, description="seconds")
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None

    @model_validator(mode="after")
    def _some_policy_takes_the_weights(self) -> ConfigChange:
        problems = []
        for name in policy_names() if self.policy is None else [self.policy]:
            try:
                check_weights(name, self.policy_weights)
            except ConfigError as error:
                problems.append(str(error))
            else:
                return self
        raise ValueError("; ".join(problems))


class ConfigChanged(_Answer):
    """What changed, and what holds now."""

    changed: dict[str, tuple[Any, Any]] = Field(
        description="by name, the value before and after", examples=[{"clean_ahead": [0.25, 0.5]}]
    )
    config: Config


class ColdAttach(_Body):
    """A cold tier."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"url": "redis://cache.internal:6379/0"}]})

    url: str = Field(
        pattern=r"^(disk|redis|rediss|unix|redis\+cluster|rediss\+cluster)://",
        max_length=4096,
        description="redis://, rediss://, unix:// or disk://; of secrets none travel",
    )
    capacity_bytes: int | None = Field(None, gt=0, le=_MOST_COUNT, description="most bytes of one on disk")


class ColdDetach(_Body):
    """The cold tier goes."""

    deadline_seconds: Wait = Field(30.0, description="seconds to write to it what it lacks")


class ColdChange(_Answer):
    """The cold tier now."""

    cold: ColdTier | None = Field(description="null: there is none")
    dirty_blocks: Blocks = Field(description="blocks without a copy there")


class DrainChange(_Body):
    """Take no more reservations and loads, and write to the cold tier what it lacks; or take them again."""

    on: bool = Field(True, description="false: take reservations and loads again")
    deadline_seconds: Wait = 30.0


class Drained(_Answer):
    """How far it came."""

    draining: bool
    dirty_blocks: Blocks = Field(description="blocks without a copy in the cold tier")


# Events, and what probes ask


class EventKind(StrEnum):
    """What happened."""

    STORED = "stored"
    """Blocks came into a tier."""
    REMOVED = "removed"
    """Blocks left a tier."""
    DEGRADED = "degraded"
    """A part does not do all of its work."""
    RECOVERED = "recovered"
    """It does again."""
    CONNECTED = "connected"
    """The sidecar answers, perhaps another one than before."""
    DISCONNECTED = "disconnected"
    """The sidecar does not answer."""


class StoreEvent(_Answer):
    """One event: the `data` of a server-sent event, whose `event` is the kind and whose `id` counts."""

    kind: EventKind
    at: float = Field(description="seconds since 1970", examples=[1_767_225_600.0])
    tier: TierName | None = Field(None, description="of blocks")
    space: Hex | None = Field(None, description="of blocks", examples=[_SPACE])
    blocks: Blocks = Field(0, description="how many")
    hashes: list[Hex] = Field(default_factory=list, description="of the first of them, 16 at most")
    lost: int = Field(0, ge=0, description="events before this one that were dropped", examples=[0])
    part: str | None = Field(None, description="what is degraded, or well again", examples=[None])
    reason: Reason | None = Field(None, description="why", examples=[None])


class Alive(_Answer):
    """The admin process runs."""

    status: Literal["alive"] = "alive"


class Ready(_Answer):
    """The sidecar serves."""

    status: Literal["ready", "degraded"]
    degraded: list[DegradedPart]
