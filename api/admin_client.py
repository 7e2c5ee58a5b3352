"""What the command line asks the admin process over HTTP: where it is found, the token, and its answers.

Standard library only: a command that asks one thing starts no framework.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from .. import __version__
from ..tiers.errors import AccessDeniedError, ConfigError, ServiceError, ServiceUnavailableError
from ..tiers.settings import expect_path, shown
from .admin.discovery import find_admin
from .listening import default_socket_path
from .remote_access import check_token
from .secret_file import read_secret_file
from .serve_settings import serving

__all__ = ["ADMIN_OPTIONS", "AdminClient", "add_admin_options", "admin_client"]

URL_VARIABLE: Final = "KVPAGER_ADMIN_URL"
TOKEN_VARIABLE: Final = "KVPAGER_ADMIN_TOKEN"
ADMIN_OPTIONS: Final = {"url": "--url", "token": "--token-file", "ca": "--ca", "socket": "--socket"}
"""The option that each setting comes from."""

_MUST: Final = "must be http://HOST:PORT or https://HOST:PORT"
_SECONDS: Final = 35.0
"""How long an answer may take: what is asked for ends by itself in 30 seconds."""
_MOST_BYTES: Final = 64 << 20
_MOST_TOKEN_FILE: Final = 1 << 16
_ROLES: Final = ("operate", "read")
"""Of tokens in a file, the one that may do most first."""
_UNAVAILABLE: Final = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
_DENIED: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class AdminClient:
    """A connection to an admin process, made when something is first asked. For ``with``.

    Args:
        url: of its root.
        token: what is said with each request; None: nothing, and only looking is let in.
        ca: file of the authorities whose certificates are trusted, PEM; None: those of the system.

    Raises:
        ConfigError: the URL is none, or the file holds no certificates.
    """

    def __init__(self, url: str, token: str | None = None, ca: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError("url", f"{_MUST}, got {shown(url)}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ConfigError("url", f"{_MUST}, got {shown(url)}")
        if ca is not None and parts.scheme != "https":
            raise ConfigError("ca", f"is for https, and the URL is {url}")
        self.url = url.rstrip("/")
        self._path = parts.path.rstrip("/")
        self._token = token
        if parts.scheme == "http":
            self._connection = http.client.HTTPConnection(parts.hostname, port, timeout=_SECONDS)
        else:
            self._connection = http.client.HTTPSConnection(
                parts.hostname, port, timeout=_SECONDS, context=_context(ca)
            )

    def get(self, path: str, **query: object) -> Any:
        """What is there; None in the query is left out.

        Raises:
            ServiceUnavailableError: nobody answers, or the sidecar behind it does not.
            AccessDeniedError: the token does not do.
            ServiceError: it is not there, or is refused.
        """
        return self.ask("GET", path, None, query)

    def ask(
        self, method: str, path: str, body: Mapping[str, object] | None, query: Mapping[str, object]
    ) -> Any:
        """Ask for something, and return what is answered; raises as `get` does.

        Args:
            path: below ``/v1/``.
            body: sent as JSON; None: nothing is sent.
            query: None in it is left out.
        """
        asked = urlencode({name: value for name, value in query.items() if value is not None})
        target = f"{self._path}/v1/{quote(path)}{asked and '?' + asked}"
        headers: dict[str, str | bytes] = {
            "Accept": "application/json",
            "User-Agent": f"kvpager/{__version__}",
        }
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}".encode()
        sent = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            sent = json.dumps(body).encode()
        try:
            self._connection.request(method, target, sent, headers)
            response = self._connection.getresponse()
            data = response.read(_MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ServiceUnavailableError(f"{self.url} does not answer: {why}") from error
        try:
            answer = json.loads(data) if len(data) <= _MOST_BYTES else None
        except ValueError:
            answer = None
        if response.status < HTTPStatus.BAD_REQUEST and answer is not None:
            return answer
        raise self._error(response.status, answer)

    def _error(self, status: int, answer: object) -> ServiceError:
        detail = ""
        if isinstance(answer, dict):
            wrong = [f"{one.get('where')}: {one.get('problem')}" for one in answer.get("invalid") or []]
            detail = "; ".join(wrong) or str(answer.get("detail") or "")
        said = detail or f"{self.url} answers with status {status}, and not as an admin process does"
        if status in _DENIED:
            return AccessDeniedError(f"{said} (--token-file FILE, or ${TOKEN_VARIABLE})")
        return ServiceUnavailableError(said) if status in _UNAVAILABLE else ServiceError(said)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()


def add_admin_options(parser: argparse.ArgumentParser) -> None:
    """Add what says where the admin process is, and ``--json``."""
    where = parser.add_argument_group("where the admin process is")
    where.add_argument(
        "--url",
        metavar="URL",
        help=f"its URL (default: ${URL_VARIABLE}, or that of the sidecar of this user or of kvpager.toml)",
    )
    where.add_argument(
        "--token-file",
        metavar="FILE",
        help="tokens, each line read:TOKEN or operate:TOKEN, in a file that only its owner can read "
        f"(default: ${TOKEN_VARIABLE}, or the file that the sidecar's own admin process made)",
    )
    where.add_argument("--ca", metavar="FILE", help="authorities of a URL with https, PEM")
    where.add_argument("--socket", metavar="PATH", help="the sidecar's socket, whose admin process is meant")
    parser.add_argument("--json", action="store_true", help="print what it answers, as JSON")


def admin_client(options: argparse.Namespace) -> AdminClient:
    """Who asks the admin process that options, variables or a sidecar's files name.

    A token that is found beside a socket is said to the admin process of that socket alone.

    Raises:
        ConfigError: an option makes no sense, or a file cannot be read.
        ServiceUnavailableError: no admin process serves the socket.
    """
    url, token = options.url, _token_of(options)
    if url is not None and options.socket is not None:
        raise ConfigError("socket", "is where a URL is found, and --url names one")
    if url is None and options.socket is None:
        url = os.environ.get(URL_VARIABLE) or None
    if url is None:
        socket = options.socket or serving("socket", os.environ) or default_socket_path()
        place = find_admin(expect_path("socket", socket))
        url = place.url
        # Who may not read them may look all the same, from this machine.
        if token is None and os.access(place.token_file, os.R_OK):
            token = _token_in(place.token_file)
    return AdminClient(url, token, options.ca)


def _token_of(options: argparse.Namespace) -> str | None:
    if options.token_file is not None:
        return _token_in(options.token_file)
    said = os.environ.get(TOKEN_VARIABLE)
    return check_token(TOKEN_VARIABLE, said) if said else None


def _token_in(path: str) -> str:
    """The token of a file that may do most."""
    text = read_secret_file("token", path, most=_MOST_TOKEN_FILE).decode(errors="replace")
    lines = [line.strip().partition(":") for line in text.split("\n")]
    for role in _ROLES:
        for name, _, token in lines:
            if name == role and token:
                return check_token("token", token)
    raise ConfigError("token", f"{path} has no line read:TOKEN or operate:TOKEN")


def _context(ca: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError("ca", f"{ca} holds no certificates that can be read") from error
