from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpager.kvstore.hashing import (
    ChainIdentity,
    as_tokens,
    hash_blocks,
    hash_partial,
    link,
    pack_blocks,
    pack_keys,
    space_id,
)
from kvpager.tiers.errors import ConfigError
from kvpager.tiers.layout import KVLayout

IDENTITY = ChainIdentity(b"weights digest", adapter=b"lora", tenant=b"acme", epoch=7)
TOKENS = np.arange(40, dtype=np.int32) * 1001 - 3

# Computed once with `naive` and kept: a change of any of them orphans every cache in the field.
ROOT_HEX = "df2188d64d0ab23b1f7faa347395803a"
CHAIN_HEX = ["b888e525a5684d98cee6900cc5e8d6d4", "ff2bf62f2b6b3efc77f99e277a3f46f2"]
KEYED_HEX = ["b888e525a5684d98cee6900cc5e8d6d4", "6c059c82732eda2d740432108e1fc88f"]
PARTIAL_HEX = "d84e19cc5c88799ea1a622fe23d1bceb"
SPACE_HEX = "0f350d34c2e66e93f92a2d99a3a0a929"


def naive(parent: bytes, tokens: Sequence[int], keys: Sequence[bytes] = ()) -> bytes:
    """The definition, byte by byte: RFC 7693 BLAKE2b with a digest of 16 bytes and no key."""
    message = bytearray(parent)
    message += len(tokens).to_bytes(4, "little")
    for token in tokens:
        message += int(token).to_bytes(4, "little", signed=True)
    for key in keys:
        message += len(key).to_bytes(4, "little") + key
    return hashlib.blake2b(bytes(message), digest_size=16).digest()


def naive_chain(
    root: bytes, tokens: Sequence[int], size: int, keys: dict[int, list[bytes]] | None = None
) -> list[bytes]:
    hashes = []
    for at in range(len(tokens) // size):
        root = naive(root, tokens[at * size : (at + 1) * size], (keys or {}).get(at, ()))
        hashes.append(root)
    return hashes


def test_blake2b_of_this_python_is_the_one_of_rfc_7693() -> None:
    # RFC 7693, appendix A: BLAKE2b-512("abc").
    assert hashlib.blake2b(b"abc").hexdigest().startswith("ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b7")


def test_hashes_are_the_vectors_kept_here() -> None:
    root = IDENTITY.root
    assert root.hex() == ROOT_HEX
    assert [name.hex() for name in hash_blocks(TOKENS, 16, root)] == CHAIN_HEX
    keyed = hash_blocks(TOKENS, 16, root, {1: [b"image", b""]})
    assert [name.hex() for name in keyed] == KEYED_HEX
    assert hash_partial(TOKENS[32:], bytes.fromhex(CHAIN_HEX[1]), [b"k"]).hex() == PARTIAL_HEX
    assert space_id(KVLayout(32, 8, 128), "pp0/2 tp1/4").hex() == SPACE_HEX


@given(
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=70),
    size=st.integers(1, 20),
    keys=st.dictionaries(st.integers(0, 9), st.lists(st.binary(max_size=5), max_size=3), max_size=3),
)
def test_hashes_are_what_the_naive_definition_says(
    tokens: list[int], size: int, keys: dict[int, list[bytes]]
) -> None:
    root = b"p" * 16
    hashes = hash_blocks(tokens, size, root, keys)
    assert hashes == naive_chain(root, tokens, size, keys)
    rest = tokens[len(hashes) * size :]
    last = hashes[-1] if hashes else root
    assert hash_partial(rest, last, keys.get(0, ())) == naive(last, rest, keys.get(0, ()))


def test_a_block_linked_alone_has_the_hash_that_it_has_in_its_chain() -> None:
    hashes = hash_blocks(TOKENS, 16, b"r" * 16, {1: [b"key"]})
    messages = pack_blocks(TOKENS[:32].reshape(2, 16))
    assert link(b"r" * 16, messages[0]) == hashes[0]
    assert link(hashes[0], messages[1] + pack_keys([b"key"])) == hashes[1]


def test_a_chain_can_be_continued_from_its_last_hash() -> None:
    whole = hash_blocks(TOKENS, 8, b"r" * 16)
    assert whole[:2] + hash_blocks(TOKENS[16:], 8, whole[1]) == whole


def test_tokens_may_come_as_any_integers_and_hash_alike() -> None:
    expected = hash_blocks(TOKENS, 16, b"r" * 16)
    assert hash_blocks(TOKENS.tolist(), 16, b"r" * 16) == expected
    assert hash_blocks(TOKENS.astype(np.int64), 16, b"r" * 16) == expected
    assert hash_blocks(TOKENS.astype(">i4"), 16, b"r" * 16) == expected
    assert hash_blocks(np.repeat(TOKENS, 2)[::2], 16, b"r" * 16) == expected
    assert as_tokens(TOKENS) is TOKENS


def test_a_prompt_of_less_than_a_block_has_no_hash() -> None:
    assert hash_blocks([], 16, b"r" * 16) == []
    assert hash_blocks(TOKENS[:15], 16, b"r" * 16) == []


def test_identities_that_differ_in_anything_share_no_root() -> None:
    base = ChainIdentity(b"model", adapter=b"a", tenant=b"t", epoch=1, salt=b"s")
    others = [
        ChainIdentity(b"other", adapter=b"a", tenant=b"t", epoch=1, salt=b"s"),
        ChainIdentity(b"model", adapter=b"b", tenant=b"t", epoch=1, salt=b"s"),
        ChainIdentity(b"model", adapter=b"", tenant=b"t", epoch=1, salt=b"s"),
        ChainIdentity(b"model", adapter=b"a", tenant=b"u", epoch=1, salt=b"s"),
        ChainIdentity(b"model", adapter=b"a", tenant=b"t", epoch=2, salt=b"s"),
        ChainIdentity(b"model", adapter=b"a", tenant=b"t", epoch=1, salt=b""),
        # The same bytes, divided otherwise.
        ChainIdentity(b"modela", adapter=b"", tenant=b"t", epoch=1, salt=b"s"),
        ChainIdentity(b"model", adapter=b"at", tenant=b"", epoch=1, salt=b"s"),
    ]
    roots = [identity.root for identity in (base, *others)]
    assert len(set(roots)) == len(roots)
    chains = [hash_blocks(TOKENS, 16, root) for root in roots]
    assert not set(chains[0]).intersection(*map(set, chains[1:]))


def test_layouts_and_shards_that_differ_in_anything_share_no_space() -> None:
    spaces = [
        space_id(KVLayout(2, 2, 64)),
        space_id(KVLayout(3, 2, 64)),
        space_id(KVLayout(2, 4, 64)),
        space_id(KVLayout(2, 2, 128)),
        space_id(KVLayout(2, 2, 64, block_size=32)),
        space_id(KVLayout(2, 2, 64, dtype="bfloat16")),
        space_id(KVLayout(2, 2, 64, format="plain")),
        space_id(KVLayout(2, 2, 64, format="opaque:vllm-flash")),
        space_id(KVLayout(2, 2, 64, planes=1)),
        space_id(KVLayout(2, 2, 64, window=128)),
        space_id(KVLayout(2, 2, 64, scale_bytes=64)),
        space_id(KVLayout(2, 2, 64), "tp0/2"),
        space_id(KVLayout(2, 2, 64), "tp1/2"),
    ]
    assert len(set(spaces)) == len(spaces)
    assert space_id(KVLayout(2, 2, 64)) == spaces[0]


def test_extra_keys_change_their_block_and_all_after_it_and_none_before() -> None:
    plain = hash_blocks(TOKENS, 8, b"r" * 16)
    keyed = hash_blocks(TOKENS, 8, b"r" * 16, {2: [b"cat"]})
    assert keyed[:2] == plain[:2]
    assert not set(keyed[2:]) & set(plain)
    assert hash_blocks(TOKENS, 8, b"r" * 16, {2: [b"c", b"at"]})[2] != keyed[2]


def test_a_partly_filled_block_never_has_the_name_of_a_full_one_or_of_another_length() -> None:
    names = {hash_partial(np.zeros(count, dtype=np.int32), b"r" * 16) for count in range(17)}
    assert len(names) == 17


def test_a_model_without_a_digest_and_an_epoch_that_is_no_counter_are_refused() -> None:
    with pytest.raises(ConfigError, match="model"):
        ChainIdentity(b"")
    with pytest.raises(ConfigError, match="epoch"):
        ChainIdentity(b"m", epoch=-1)
    with pytest.raises(ConfigError, match="epoch"):
        ChainIdentity(b"m", epoch=2**64)


_PROCESS = """
import sys
import numpy as np
from kvpager.kvstore.hashing import ChainIdentity, hash_blocks
from kvpager.kvstore.host import HostStore
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.layout import KVLayout

folder, action = sys.argv[1:3]
with HostStore(1 << 20, cold=DiskColdTier(folder, capacity_bytes=1 << 20)) as host:
    for settings in eval(sys.argv[3]):
        layout = KVLayout(1, 1, 32, block_size=settings["block_size"], dtype=settings["dtype"])
        identity = ChainIdentity(settings["model"], adapter=settings["adapter"], tenant=settings["tenant"])
        hashes = hash_blocks(np.arange(64), layout.block_size, identity.root)
        space = host.space(layout, shard=settings["shard"])
        blocks = np.empty((len(hashes), layout.block_bytes), dtype=np.uint8)
        if action == "write":
            blocks[:] = np.arange(1, len(hashes) + 1)[:, None]
            assert space.put(hashes, blocks, wait=5.0) == len(hashes)
            assert host.flush() == 0
        with space.load(hashes, 5.0) as lease:
            found = len(lease)
        assert space.get(hashes[:found], blocks) == found
        assert (blocks[:found] == np.arange(1, found + 1)[:, None]).all()
        print(found)
"""

_SETTINGS: dict[str, object] = {
    "model": b"m",
    "adapter": b"",
    "tenant": b"",
    "block_size": 16,
    "dtype": "float16",
    "shard": "",
}


def _in_another_process(folder: Path, action: str, seed: int, *changes: dict[str, object]) -> list[int]:
    """Blocks found by a process of its own, of the four written, for each change of the settings."""
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS, str(folder), action, repr([_SETTINGS | one for one in changes])],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(found) for found in done.stdout.split()]


def test_processes_of_different_hash_seeds_find_each_others_blocks_and_nobody_elses(tmp_path: Path) -> None:
    assert _in_another_process(tmp_path, "write", 1, {}) == [4]
    changes: list[dict[str, object]] = [
        {},
        {"model": b"n"},
        {"adapter": b"lora"},
        {"tenant": b"acme"},
        {"dtype": "bfloat16"},
        {"block_size": 32},
        {"shard": "tp0/2"},
    ]
    assert _in_another_process(tmp_path, "read", 2, *changes) == [4, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "tokens",
    [
        np.full(16, 1 << 40),
        [1 << 31] * 16,
        [-(1 << 31) - 1] * 16,
        [1.7] * 16,
        np.zeros((2, 16), np.int32),
        [True] * 16,
    ],
    ids=["int64", "large", "small", "float", "flat", "bool"],
)
def test_what_would_have_to_be_cut_to_a_token_id_is_refused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        hash_blocks(tokens, 16, bytes(16))


def test_a_block_size_or_a_parent_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        hash_blocks([1] * 16, 0, bytes(16))
    with pytest.raises(ConfigError, match="parent"):
        hash_blocks([1] * 16, 16, b"short")
