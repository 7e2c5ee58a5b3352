"""The cold record: how a block's payload is framed, named, checked and sealed outside host memory.

A record is a 96-byte header and a payload. Little-endian header::

    magic "KVPR" | version u16 | flags u16 | payload bytes, all parts u64 | bytes of this part u32
    | part u16 | parts u16 | write id u64 | space 16 | hash 16 | nonce 12 | zero 4 | check 16

``check`` is xxh3_128 (https://xxhash.com) over the header before it and the payload, or, where a secret is
configured, the tag of AES-256-GCM (NIST SP 800-38D) with the same header bytes as associated data. A
payload too large for one value is cut into equal parts; the random write id tells parts of one write from
those of another, so that two writers never yield a mixture. What does not verify is never handed out.

Key names carry the format version and a key id, which depends on the secret and on the size of a value:
hosts that would not understand each other's records do not see them.
"""

from __future__ import annotations

import enum
import hashlib
import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from .errors import ConfigError
from .extras import how_to_install
from .settings import expect_byte_strings, expect_bytes, expect_integer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "DEFAULT_VALUE_BYTES",
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "NOTE_SPACE",
    "Part",
    "RecordCodec",
    "Verdict",
    "check_key",
    "note_hash",
]

FORMAT_VERSION: Final = 1
"""Version of the header and of the key names; records of other versions are never looked at."""

DEFAULT_VALUE_BYTES: Final = 4 << 20
"""Bytes of one stored value, header included."""

NOTE_SPACE: Final = b"kvpager notes 01"
"""The space of named notes. Block spaces are digests and do not meet it."""

_HEADER: Final = struct.Struct("<4sHHQIHHQ16s16s12s4x16s")
HEADER_BYTES: Final = _HEADER.size
_BODY_FIELDS: Final = struct.Struct("<4sHHQIHHQ16s16s12s4x")
_MAGIC: Final = b"KVPR"
_OWN: Final = struct.pack("<4sH", _MAGIC, FORMAT_VERSION)
_SEALED: Final = 1
_NONCE_BYTES: Final = 12
_PART_ALIGNMENT: Final = 64
_MAX_PARTS: Final = 1 << 15
_MIN_SECRET_BYTES: Final = 16
_NAME_BYTES: Final = 16
_MOST_VALUE_BYTES: Final = (1 << 32) - 1


class Verdict(enum.Enum):
    """What a stored value turned out to be."""

    OK = "ok"
    """The record that was asked for, intact."""
    FOREIGN = "foreign"
    """Something else: not of this version, or a sound record of another block, part or length."""
    BROKEN = "broken"
    """A record of this version that fails its check: altered or truncated. May be deleted."""


class Part(NamedTuple):
    """One part of a record: which bytes of the payload it holds, and how it is named in the header."""

    space: bytes
    prefix_hash: bytes
    total: int
    """Payload bytes of all parts."""
    number: int
    parts: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Payload bytes of this part."""
        return self.stop - self.start


# Looking a member up on its class is slow in Python 3.11, and `decode` does it for every value.
_OK, _FOREIGN, _BROKEN = Verdict.OK, Verdict.FOREIGN, Verdict.BROKEN


def check_key(space: bytes, hashes: Sequence[bytes]) -> Sequence[bytes]:
    """The hashes, if the space and each of them are 16 bytes.

    Raises:
        ConfigError: they are not.
    """
    expect_bytes("space", space, _NAME_BYTES)
    return expect_byte_strings("hashes", hashes, _NAME_BYTES)


def note_hash(name: bytes) -> bytes:
    """16 bytes that stand for a note's name.

    Raises:
        ConfigError: the name is no byte string.
    """
    expect_bytes("name", name)
    return hashlib.blake2b(name, digest_size=16, person=b"kvpager-note").digest()


class RecordCodec:
    """Frames payloads into records and back. Stateless after construction, so safe from all threads.

    Args:
        secret: seal payloads with AES-256-GCM under a key derived from this. At least 16 bytes (a
            passphrase is stretched with scrypt, but a short one stays short). None stores them plain.
            Nonces are random 96-bit values: one secret is good for 2^32 records (SP 800-38D, 8.3).
        value_bytes: upper limit of one stored value, header included; larger payloads are split.
        setting: how error messages name the secret's setting.

    Raises:
        ConfigError: the secret is no secret or too short, or needs the package `cryptography`, which is
            missing; or `value_bytes` is out of range.
    """

    def __init__(
        self,
        secret: str | bytes | None = None,
        *,
        value_bytes: int = DEFAULT_VALUE_BYTES,
        setting: str = "cold.secret",
    ) -> None:
        least = HEADER_BYTES + _PART_ALIGNMENT
        value_bytes = expect_integer("cold.value_bytes", value_bytes, least, _MOST_VALUE_BYTES)
        self.value_bytes = value_bytes
        """Upper limit of one stored value, header included."""
        self.part_bytes = (value_bytes - HEADER_BYTES) // _PART_ALIGNMENT * _PART_ALIGNMENT
        """Most payload bytes of one stored value."""
        self._seal: _Seal | None = None
        identity = b"plain"
        if secret is not None:
            raw = _as_bytes(setting, secret)
            if len(raw) < _MIN_SECRET_BYTES:
                raise ConfigError(setting, f"must be at least {_MIN_SECRET_BYTES} bytes, got {len(raw)}")
            # The salt is fixed because hosts that share a secret must arrive at the same key.
            derived = hashlib.scrypt(raw, salt=b"kvpager cold record 1", n=1 << 14, r=8, p=1, dklen=48)
            self._seal = _Seal(derived[:32], setting)
            identity = derived[32:]
        self.key_id = hashlib.blake2b(identity + value_bytes.to_bytes(8, "little"), digest_size=6).hexdigest()
        """12 hexadecimal digits; equal where records can be exchanged."""

    @property
    def sealed(self) -> bool:
        """Whether payloads are encrypted."""
        return self._seal is not None

    def part_count(self, payload_bytes: int) -> int:
        """Parts that a payload of this many bytes is cut into.

        Raises:
            ConfigError: the payload is too large for the value size.
        """
        count = max(1, -(-payload_bytes // self.part_bytes))
        if count > _MAX_PARTS:
            raise ConfigError("cold.value_bytes", f"too small for payloads of {payload_bytes} bytes")
        return count

    def split(self, space: bytes, prefix_hash: bytes, payload_bytes: int) -> list[Part]:
        """The parts of a payload: as equal as multiples of 64 bytes allow, so that none is a remnant."""
        count = self.part_count(payload_bytes)
        if count == 1:
            return [Part(space, prefix_hash, payload_bytes, 0, 1, 0, payload_bytes)]
        step = -(-payload_bytes // (count * _PART_ALIGNMENT)) * _PART_ALIGNMENT
        cuts = [min(index * step, payload_bytes) for index in range(count + 1)]
        return [
            Part(space, prefix_hash, payload_bytes, index, count, cuts[index], cuts[index + 1])
            for index in range(count)
        ]

    def key(self, space: bytes, prefix_hash: bytes) -> bytes:
        """The name of a block's record without the part; its Cluster hash tag is the whole block."""
        return b"kvp:%d:%s:{%s%s}" % (
            FORMAT_VERSION,
            self.key_id.encode(),
            space.hex().encode(),
            prefix_hash.hex().encode(),
        )

    def keys_of(self, space: bytes) -> bytes:
        """What all keys of a space are like, whatever secret seals them: a pattern of Redis' MATCH."""
        return b"kvp:%d:*:{%s*" % (FORMAT_VERSION, space.hex().encode())

    def encode(self, part: Part, payload: memoryview, write_id: int) -> tuple[bytes, memoryview]:
        """Header (96 bytes) and body of one part.

        Args:
            part: which part; `payload` is that part's bytes alone.
            write_id: the same for all parts of one write; see `new_write_id`.

        Returns:
            The header, and the payload itself, or its ciphertext (same length) where a secret is set.
        """
        flags, nonce = 0, bytes(_NONCE_BYTES)
        if self._seal is not None:
            flags, nonce = _SEALED, os.urandom(_NONCE_BYTES)
        fields = _BODY_FIELDS.pack(
            _MAGIC,
            FORMAT_VERSION,
            flags,
            part.total,
            part.size,
            part.number,
            part.parts,
            write_id,
            part.space,
            part.prefix_hash,
            nonce,
        )
        if self._seal is None:
            return fields + _checksum(fields, payload), payload
        body, tag = self._seal.encrypt(nonce, fields, payload)
        return fields + tag, body

    def decode(self, part: Part, header: bytes | bytearray, body: memoryview) -> tuple[Verdict, int]:
        """Check one part in place; the body of a sealed record is decrypted where it lies.

        Args:
            part: the part that was asked for.
            header: the 96 bytes that were stored before the body.
            body: writable, `part.size` bytes.

        Returns:
            The verdict and the write id. The body is to be used only after `Verdict.OK`.
        """
        if len(header) != HEADER_BYTES or not header.startswith(_OWN):
            return _FOREIGN, 0
        _, _, flags, total, size, index, count, write_id, space, name, nonce, check = _HEADER.unpack(header)
        fields = bytes(header[: _BODY_FIELDS.size])
        if flags != (0 if self._seal is None else _SEALED) or size != len(body):
            return _BROKEN, write_id
        if self._seal is None:
            sound = _checksum(fields, body) == check
        else:
            sound = self._seal.decrypt(nonce, check, fields, body)
        if not sound:
            return _BROKEN, write_id
        asked = (part.space, part.prefix_hash, part.total, part.size, part.number, part.parts)
        if (space, name, total, size, index, count) != asked:
            return _FOREIGN, write_id
        return _OK, write_id

    def judge_size(self, header: bytes | bytearray, stored_bytes: int) -> Verdict:
        """What a value of an unexpected size is, from (up to) its first 96 bytes: never OK."""
        if not header.startswith(_OWN):
            return _FOREIGN
        if len(header) < HEADER_BYTES or _HEADER.unpack(header)[4] != stored_bytes - HEADER_BYTES:
            return _BROKEN
        return _FOREIGN

    def stored_parts(self, header: bytes | bytearray) -> int | None:
        """How many parts the record with this (unverified) header says it has; None if it is not ours."""
        if len(header) != HEADER_BYTES or not header.startswith(_OWN):
            return None
        count: int = _HEADER.unpack(header)[6]
        return count if 1 <= count <= _MAX_PARTS else None

    @staticmethod
    def new_write_id() -> int:
        """A random 64-bit number that marks the parts of one write."""
        return int.from_bytes(os.urandom(8), "little")


def _as_bytes(setting: str, secret: object) -> bytes:
    # A secret of a wrong type is not shown: it may be one all the same.
    if isinstance(secret, bytes):
        return secret
    if not isinstance(secret, str):
        raise ConfigError(setting, f"must be a string or bytes, got a {type(secret).__name__}")
    try:
        return secret.encode()
    except UnicodeEncodeError:
        raise ConfigError(setting, "must be text that UTF-8 can hold") from None


def _checksum(fields: bytes, payload: memoryview) -> bytes:
    # xxhash lets go of the interpreter lock over large inputs: lanes check side by side.
    state = xxhash.xxh3_128(fields)
    state.update(payload)
    digest: bytes = state.digest()
    return digest


class _Seal:
    """AES-256-GCM through OpenSSL, from buffer to buffer."""

    def __init__(self, key: bytes, setting: str) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher
            from cryptography.hazmat.primitives.ciphers.algorithms import AES
            from cryptography.hazmat.primitives.ciphers.modes import GCM
        except ImportError as error:
            raise ConfigError(setting, f"needs the package cryptography: {how_to_install('seal')}") from error
        algorithm = AES(key)
        self._invalid: type[Exception] = InvalidTag
        self._cipher: Callable[[bytes, bytes | None], Cipher[GCM]] = lambda nonce, tag: Cipher(
            algorithm, GCM(nonce, tag)
        )

    def encrypt(self, nonce: bytes, fields: bytes, payload: memoryview) -> tuple[memoryview, bytes]:
        """Ciphertext (as long as the payload) and the 16-byte tag."""
        encryptor = self._cipher(nonce, None).encryptor()
        encryptor.authenticate_additional_data(fields)
        body = memoryview(bytearray(len(payload)))
        encryptor.update_into(payload, body)
        encryptor.finalize()
        return body, encryptor.tag

    def decrypt(self, nonce: bytes, tag: bytes, fields: bytes, body: memoryview) -> bool:
        """Decrypt in place; False where the tag does not match (the body is then garbage)."""
        decryptor = self._cipher(nonce, tag).decryptor()
        decryptor.authenticate_additional_data(fields)
        decryptor.update_into(body, body)
        try:
            decryptor.finalize()
        except self._invalid:
            return False
        return True
