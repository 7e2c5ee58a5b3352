"""Where the admin process listens: on this machine alone, unless tokens were given to others."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any, Final

from ...tiers.errors import ConfigError
from ..remote_access import parse_address

__all__ = ["DEFAULT_ADDRESS", "addresses_of", "is_loopback", "listen"]

DEFAULT_ADDRESS: Final = "127.0.0.1:8737"
_BACKLOG: Final = 128


def is_loopback(address: str) -> bool:
    """Whether an IP address is this machine's own."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)


def addresses_of(where: str, *, has_tokens: bool) -> list[tuple[socket.AddressFamily, Any]]:
    """The addresses of ``HOST:PORT``, with their families.

    Args:
        has_tokens: whether a file of tokens was named.

    Raises:
        ConfigError: it is no address, or one that other machines reach, and no tokens are named.
    """
    host, port = parse_address("--admin", where)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError("--admin", f"{where} is no address: {error.strerror}") from error
    addresses: list[tuple[socket.AddressFamily, Any]] = [
        (family, address) for family, _, _, _, address in found
    ]
    if not has_tokens and not all(is_loopback(str(address[0])) for _, address in addresses):
        raise ConfigError(
            "--admin",
            f"{where} is reached from other machines, which must say a token: name the file with "
            "--admin-token-file",
        )
    return addresses


def listen(where: str, *, has_tokens: bool) -> socket.socket:
    """A socket that listens on the first of the addresses.

    Raises:
        ConfigError: as of `addresses_of`, or it cannot be listened on.
    """
    family, address = addresses_of(where, has_tokens=has_tokens)[0]
    # Named as TCP: of others asyncio does not switch Nagle's algorithm off, and answers wait for 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError("--admin", f"{where} cannot be listened on: {error.strerror}") from error
    return listening
