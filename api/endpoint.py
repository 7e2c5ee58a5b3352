"""Where a sidecar is reached: the one place that knows kinds of sockets."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from ..tiers.errors import ConfigError
from ..tiers.settings import expect_path, shown

__all__ = ["Endpoint", "endpoint_of"]

_LONGEST_PATH = 107
"""Bytes of a Unix socket's path."""


@dataclass(frozen=True)
class Endpoint:
    """A sidecar's address.

    Args:
        path: of a Unix socket.
    """

    path: str

    def __str__(self) -> str:
        return f"unix://{self.path}"

    def socket(self) -> socket.socket:
        """A socket that does not wait, to be connected to `address`."""
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    @property
    def address(self) -> str:
        """What the socket is to be connected to."""
        return self.path


def endpoint_of(url: str | os.PathLike[str]) -> Endpoint:
    """The address in a URL: ``unix:///path``, or a path.

    Raises:
        ConfigError: it is neither.
    """
    text = expect_path("url", url)
    parts = urlsplit(text)
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
            raise ConfigError("url", f"must be unix:///path, got {shown(text)}")
        text = unquote(parts.path)
    elif "://" in text:
        raise ConfigError("url", f"must be unix:///path or a path, got {shown(text)}")
    if len(os.fsencode(text)) > _LONGEST_PATH:
        raise ConfigError("url", f"a socket's path has {_LONGEST_PATH} bytes at most, got {shown(text)}")
    return Endpoint(text)
