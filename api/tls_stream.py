"""The client's side of TLS over one connection, without I/O: bytes of the wire in, bytes of frames out.

Source: Python's `ssl.SSLObject` with `ssl.MemoryBIO`; RFC 8446.
"""

from __future__ import annotations

import ssl
from typing import Final

from ..tiers.errors import TLSError

__all__ = ["TLSStream"]

_READ_BYTES: Final = 1 << 16
"""Several records of TLS, which have 16 KiB each."""


class TLSStream:
    """TLS of one connection.

    Args:
        context: with the authorities that are trusted.
        host: whose certificate it must be.

    Attributes:
        ready: whether the handshake is through, and frames can be sent.
    """

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self.ready = False

    @property
    def pending(self) -> int:
        """Bytes that are to be written to the socket."""
        return self._outgoing.pending

    def take(self) -> bytes:
        """The bytes that are to be written to the socket."""
        return self._outgoing.read()

    def start(self) -> None:
        """Begin the handshake.

        Raises:
            TLSError: it failed.
        """
        try:
            self._object.do_handshake()
            self.ready = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError as error:
            raise TLSError(f"the sidecar's certificate is not trusted: {error.verify_message}") from error
        except ssl.SSLError as error:
            reason = (error.reason or str(error)).lower().replace("_", " ")
            raise TLSError(f"the other side does not shake hands over TLS: {reason}") from error

    def send(self, data: bytes | memoryview) -> None:
        """Bytes of frames, which `take` gives sealed. After the handshake only."""
        left = memoryview(data)
        while len(left):
            left = left[self._object.write(left) :]

    def receive(self, data: bytes | memoryview) -> bytes:
        """Bytes came from the socket; those of frames that can be read of them.

        Raises:
            TLSError: they are no TLS, or the certificate is not trusted.
        """
        self._incoming.write(data)
        if not self.ready:
            self.start()
            if not self.ready:
                return b""
        parts: list[bytes] = []
        try:
            while part := self._object.read(_READ_BYTES):
                parts.append(part)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            raise TLSError(f"what came is no TLS: {error.reason or error}") from error
        return b"".join(parts)
