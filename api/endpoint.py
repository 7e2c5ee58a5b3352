"""Where a sidecar is reached: the one place that knows kinds of sockets."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import unquote, urlsplit

from ..tiers.errors import ConfigError
from ..tiers.settings import expect_path, shown, shown_url
from .remote_access import check_token, keep_alive
from .tls_stream import TLSStream

__all__ = ["Address", "Endpoint", "TcpEndpoint", "UnixEndpoint", "endpoint_of"]

_LONGEST_PATH: Final = 107
"""Bytes of a Unix socket's path."""
_KINDS: Final = "unix:///path, a path, kvpager://host:port or kvpagers://host:port"

Address: TypeAlias = tuple[int, Any]
"""A socket's family, and what a socket of it is connected to."""


class Endpoint(Protocol):
    """A sidecar's address, and what is needed to be let in there."""

    @property
    def local(self) -> bool:
        """Whether the sidecar is on this machine and passes its memory."""
        ...

    @property
    def token(self) -> str:
        """What to say there."""
        ...

    def addresses(self) -> Sequence[Address]:
        """Where to connect, one after the other until one answers. May wait for a name server.

        Raises:
            OSError: the host has no address.
        """
        ...

    def socket(self, family: int) -> socket.socket:
        """A socket that does not wait, to be connected to an address of this family."""
        ...

    def tls(self) -> TLSStream | None:
        """TLS for one connection; None where there is none."""
        ...


@dataclass(frozen=True)
class UnixEndpoint:
    """A sidecar of this machine.

    Args:
        path: of a Unix socket.
    """

    path: str

    def __str__(self) -> str:
        return f"unix://{self.path}"

    @property
    def local(self) -> bool:
        """It is."""
        return True

    @property
    def token(self) -> str:
        """None: the kernel says who connects."""
        return ""

    def addresses(self) -> Sequence[Address]:
        """The path."""
        return [(socket.AF_UNIX, self.path)]

    def socket(self, family: int) -> socket.socket:
        """See `Endpoint.socket`."""
        return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    def tls(self) -> TLSStream | None:
        """None."""
        return None


@dataclass(frozen=True)
class TcpEndpoint:
    """A sidecar that is reached over TCP.

    Args:
        host, port: where.
        token: what it wants to be told.
        context: TLS, with the authorities that are trusted; None for plain TCP.
    """

    host: str
    port: int
    token: str = field(repr=False)
    context: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return f"{'kvpager' if self.context is None else 'kvpagers'}://{self.place}"

    @property
    def place(self) -> str:
        """Host and port."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """It is not, wherever it is."""
        return False

    def addresses(self) -> Sequence[Address]:
        """Those of the host."""
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys((family, address) for family, _, _, _, address in found))

    def socket(self, family: int) -> socket.socket:
        """See `Endpoint.socket`."""
        made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            keep_alive(made)
        except BaseException:
            made.close()
            raise
        return made

    def tls(self) -> TLSStream | None:
        """See `Endpoint.tls`."""
        return None if self.context is None else TLSStream(self.context, self.host)


def endpoint_of(
    url: str | os.PathLike[str], token: str | None = None, ca: str | os.PathLike[str] | None = None
) -> Endpoint:
    """The address in a URL: ``unix:///path``, a path, ``kvpager://host:port`` or ``kvpagers://host:port``.

    Args:
        token: what a sidecar over TCP wants to be told; None on a Unix socket.
        ca: file of the authorities that are trusted over TLS, PEM; None: those of the system.

    Raises:
        ConfigError: it is none of these, or a token or `ca` is missing, wrong, or has nothing to do there.
    """
    text = expect_path("url", url)
    parts = urlsplit(text)
    if parts.scheme in ("kvpager", "kvpagers"):
        return _tcp_endpoint(parts.scheme == "kvpagers", text, token, ca)
    if "://" in text and parts.scheme != "unix":
        raise ConfigError("url", f"must be {_KINDS}, got {shown_url(text)}")
    for setting, given in (("token", token), ("ca", ca)):
        if given is not None:
            raise ConfigError(setting, "is for a sidecar that is reached over TCP, kvpager(s)://host:port")
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
            raise ConfigError("url", f"must be unix:///path, got {shown(text)}")
        text = unquote(parts.path)
    if len(os.fsencode(text)) > _LONGEST_PATH:
        raise ConfigError("url", f"a socket's path has {_LONGEST_PATH} bytes at most, got {shown(text)}")
    return UnixEndpoint(text)


def _tcp_endpoint(tls: bool, text: str, token: str | None, ca: str | os.PathLike[str] | None) -> TcpEndpoint:
    parts = urlsplit(text)
    if "@" in parts.netloc:
        # Nothing of it is shown: it may be the token.
        raise ConfigError("url", "names no user or token; give the token as token=")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigError("url", f"must be kvpager://host:port or kvpagers://host:port, got {shown(text)}")
    if token is None:
        raise ConfigError("token", "a sidecar that is reached over TCP lets nobody in without one")
    token = check_token("token", token)
    if not tls:
        if ca is not None:
            raise ConfigError("ca", "is for TLS: kvpagers://host:port")
        return TcpEndpoint(host, port, token)
    try:
        context = ssl.create_default_context(cafile=None if ca is None else expect_path("ca", ca))
    except (OSError, ValueError) as error:
        raise ConfigError("ca", f"{ca} holds no certificates that can be read: {error}") from error
    return TcpEndpoint(host, port, token, context)
