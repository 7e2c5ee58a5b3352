"""Who may come in over TCP, and where: the address, the token, TLS, and the sockets that are listened on.

Sources: Linux manual pages tcp(7), ipv6(7); RFC 8446 (TLS 1.3).
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..kvstore.tenants import check_tenant
from ..tiers.errors import AccessDeniedError, ConfigError
from ..tiers.settings import expect_integer, expect_path, expect_text, expect_type, shown
from .secret_file import check_secret_file, read_secret_file

__all__ = [
    "LEAST_TOKEN",
    "MOST_TOKEN",
    "RemoteAccess",
    "check_token",
    "keep_alive",
    "parse_address",
    "read_tokens",
    "server_tls",
]

LEAST_TOKEN: Final = 16
"""Bytes of the shortest token: one that is guessed lets in whoever guesses."""
MOST_TOKEN: Final = 1024
_MOST_TOKEN_FILE: Final = 1 << 20
_BACKLOG: Final = 128
_ADDRESS: Final = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]+)):(\d{1,5})", re.ASCII)
_IDLE_SECONDS: Final = 10
_PROBE_SECONDS: Final = 5
_PROBES: Final = 4
_BROKEN_SECONDS: Final = 30
"""Without an acknowledgement a connection is broken: the other side's machine is gone."""


@dataclass(frozen=True)
class RemoteAccess:
    """How clients reach a sidecar over TCP.

    Args:
        host, port: what to listen on; port 0 for any that is free.
        token: what each client must say, 16 to 1024 bytes; or of each token the tenants that it is for, None
            where it is for all, as `read_tokens` has them.
        tls: of `server_tls`; None for plain TCP, which shows tokens and blocks to the network.
        insecure: take plain TCP on an address that other machines reach.
        max_clients: at a time; as many more may be shaking hands.

    Raises:
        ConfigError: a value is of a wrong type or out of range, or plain TCP would leave the machine.
    """

    host: str
    port: int
    token: str | Mapping[str, frozenset[str] | None] = field(repr=False)
    tls: ssl.SSLContext | None = None
    insecure: bool = False
    max_clients: int = 64

    def __post_init__(self) -> None:
        expect_text("--listen", self.host)
        expect_integer("--listen", self.port, 0, 65535)
        for token in self._tokens():
            check_token("token", token)
        expect_integer("max_clients", self.max_clients, 1)
        if self.tls is not None:
            expect_type("tls", self.tls, ssl.SSLContext, "an ssl.SSLContext or None")

    def open(self) -> list[socket.socket]:
        """Sockets that listen, one for each address of the host, all on one port.

        Raises:
            ConfigError: the address is none of this machine, in use, or plain TCP would leave the machine.
        """
        where = f"{self.host}:{self.port}"
        opened: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
            if self.tls is None and not self.insecure:
                for _, address in addresses:
                    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
                        raise ConfigError(
                            "--listen",
                            f"{where} is reached from other machines, and plain TCP would show them "
                            "tokens and blocks: give --tls-cert and --tls-key, or say --insecure",
                        )
            port = self.port
            for family, address in addresses:
                try:
                    listening = _listening(family, (address[0], port, *address[2:]))
                except OSError as error:
                    # Names may have addresses of a kind that is switched off here.
                    last = (family, address) == addresses[-1]
                    if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or (last and not opened):
                        raise
                    continue
                opened.append(listening)
                port = listening.getsockname()[1]
        except BaseException as error:
            for listening in opened:
                listening.close()
            if isinstance(error, OSError):
                raise ConfigError("--listen", f"{where} cannot be listened on: {error.strerror}") from error
            raise
        return opened

    def admits(self, token: str) -> bool:
        """Whether a client that says this may come in. Takes as long whatever it says."""
        return self._right(token) is not None

    def tenants_of(self, token: str) -> frozenset[str] | None:
        """The tenants whose spaces a client may open that says this; None: all.

        Raises:
            AccessDeniedError: it may not come in.
        """
        right = self._right(token)
        if right is None:
            raise AccessDeniedError("the token is not the sidecar's")
        return self._tokens()[right]

    def _tokens(self) -> Mapping[str, frozenset[str] | None]:
        return {self.token: None} if isinstance(self.token, str) else self.token

    def _right(self, token: str) -> str | None:
        """The token that this one is, if it is one. All are compared."""
        said = hashlib.sha256(token.encode()).digest()
        found = [
            one for one in self._tokens() if hmac.compare_digest(said, hashlib.sha256(one.encode()).digest())
        ]
        return found[0] if found else None


def _listening(family: int, address: Any) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # A sidecar that is started again need not wait for connections of the last one to be forgotten.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def parse_address(setting: str, text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPV6]:PORT``.

    Raises:
        ConfigError: it is neither.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[3]) > 65535:
        raise ConfigError(setting, f"must be HOST:PORT or [IPV6]:PORT, got {shown(text)}")
    return found[1] or found[2], int(found[3])


def check_token(setting: str, token: object) -> str:
    """The token, if it is one. What it is is never shown.

    Raises:
        ConfigError: it is no text, has another length, or characters that a line does not have.
    """
    if not isinstance(token, str):
        raise ConfigError(setting, f"must be text, got {type(token).__name__}")
    if not token.isprintable():
        raise ConfigError(setting, "has characters that are not printable")
    if not LEAST_TOKEN <= len(token.encode()) <= MOST_TOKEN:
        raise ConfigError(
            setting, f"must have {LEAST_TOKEN} to {MOST_TOKEN} bytes, has {len(token.encode())}"
        )
    return token


def read_tokens(setting: str, path: str | os.PathLike[str]) -> dict[str, frozenset[str] | None]:
    """The tokens in a file, and the tenants that each is for; None: for all.

    A line is a token that is for all, or ``TENANT:TOKEN``; a token may stand in several of these. White space
    around a line is no part of it. A token in such a file has no colon and no white space. Lines that are
    empty or begin with ``#`` say nothing.

    Raises:
        ConfigError: the file cannot be read, others than its owner can read it, a line is none of these
            (which is told by its number, and not shown), or there is no token.
    """
    data = read_secret_file(setting, path, most=_MOST_TOKEN_FILE)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(setting, f"{path} is no text") from error
    tokens: dict[str, frozenset[str] | None] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            token, tenant = _token_in(setting, line)
        except ConfigError as error:
            raise ConfigError(setting, f"line {number} of {path} {error.problem}") from error
        known = tokens.get(token, frozenset())
        # What is for all is not narrowed by another line.
        tokens[token] = None if tenant is None or known is None else known | {tenant}
    if not tokens:
        raise ConfigError(setting, f"{path} has no token")
    return tokens


def _token_in(setting: str, line: str) -> tuple[str, str | None]:
    """The token of a line, and its tenant, None where it names none."""
    tenant, bound, token = line.rpartition(":")
    if any(character.isspace() for character in token):
        raise ConfigError(setting, "has white space in its token: it is TOKEN or TENANT:TOKEN")
    check_token(setting, token)
    if not bound:
        return token, None
    if not tenant or tenant != tenant.strip():
        raise ConfigError(setting, "names no tenant before its colon")
    return token, check_tenant(setting, tenant)


def server_tls(certificate: str | os.PathLike[str], key: str | os.PathLike[str]) -> ssl.SSLContext:
    """TLS 1.2 and later with a certificate (PEM, its chain after it) and its key (PEM, not encrypted).

    Raises:
        ConfigError: one cannot be read, others than its owner can read the key, or they do not belong
            together.
    """
    files = {"--tls-cert": expect_path("--tls-cert", certificate), "--tls-key": expect_path("--tls-key", key)}
    try:
        with open(files["--tls-cert"], "rb"):
            pass
    except OSError as error:
        unread = f"{files['--tls-cert']} cannot be read: {error.strerror}"
        raise ConfigError("--tls-cert", unread) from error
    check_secret_file("--tls-key", files["--tls-key"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An encrypted key would be asked for on the terminal.
        context.load_cert_chain(files["--tls-cert"], files["--tls-key"], password=bytes)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            "--tls-cert",
            f"{files['--tls-cert']} and {files['--tls-key']} are no certificate and its key: {reason}",
        ) from error
    return context


def keep_alive(connected: socket.socket) -> None:
    """Have a TCP connection end whose other side's machine is gone, and send what is written at once."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _BROKEN_SECONDS)
