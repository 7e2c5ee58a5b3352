"""``python -m kvpager.api.admin``: the admin process of a sidecar.

`kvpager serve` starts it, and its standard input is a pipe from there: when that ends it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import uvicorn

from ...tiers.errors import KVPagerError
from ..client_async import AsyncConnection
from ..remote_access import server_tls
from .address import listen
from .app import create_app
from .discovery import AdminPlace, default_token_file, place_file
from .tokens import Tokens, make_token_file

__all__ = ["TAKEN", "main"]

TAKEN: Final = 3
"""The exit code where it may not, or cannot, listen."""
_TIMEOUT: Final = 3.0
"""Seconds that the sidecar may take to answer."""
_MOST_CONNECTIONS: Final = 128
_KEEP_ALIVE_SECONDS: Final = 30
_STOP_SECONDS: Final = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until standard input ends, or a signal comes; returns the exit code."""
    options = _options(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        listening = listen(options.listen, has_tokens=options.token_file is not None)
    except KVPagerError as error:
        return _refused(error, options)
    with listening:
        try:
            tls = _tls(options)
            tokens = os.path.abspath(options.token_file or default_token_file(options.socket))
            if options.token_file is None:
                make_token_file(tokens)
            known = Tokens.read("--admin-token-file", tokens)
        except KVPagerError as error:
            return _refused(error, options)
        asyncio.run(_serve(options.socket, listening, known, tokens, tls))
    return 0


def _refused(error: KVPagerError, options: argparse.Namespace) -> int:
    if not options.again:
        print(f"kvpager admin: {error}", file=sys.stderr)
    return TAKEN


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvpager.api.admin", description=__doc__)
    parser.add_argument("--socket", required=True, metavar="PATH", help="the sidecar's")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--token-file", metavar="FILE")
    parser.add_argument("--tls-cert", metavar="FILE")
    parser.add_argument("--tls-key", metavar="FILE")
    parser.add_argument("--again", action="store_true", help="why it cannot listen was said already")
    return parser.parse_args(arguments)


def _tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    if options.tls_cert is None:
        return None
    return server_tls(options.tls_cert, options.tls_key)


class _Server(uvicorn.Server):
    """Is ended by its parent's end, or by SIGTERM, and cleans up then."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again at the end, before what is to be removed is.
        yield


async def _serve(
    path: str, listening: socket.socket, tokens: Tokens, token_file: str, tls: ssl.SSLContext | None
) -> None:
    group = secrets.token_bytes(16)

    def connect() -> AsyncConnection:
        return AsyncConnection(path, name="admin", group=group, timeout=_TIMEOUT, strict=True)

    connection = connect()
    app = create_app(connection, connect, tokens, group=group)
    config = uvicorn.Config(
        app,
        access_log=False,  # what is asked for may name sessions
        log_config=None,
        proxy_headers=False,  # who asks is who connects
        server_header=False,
        date_header=True,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_STOP_SECONDS,
        ws="none",
        lifespan="on",
    )
    config.load()
    config.ssl = tls
    server = _Server(config)

    def end() -> None:
        server.should_exit = True
        app.state.admin.feed.end()

    _end_with_parent(end)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    place = place_file(path)
    AdminPlace(_url_of(listening, tls is not None), token_file).write(place)
    try:
        await server.serve([listening])
    finally:
        await connection.close()
        with suppress(FileNotFoundError):
            os.unlink(place)


def _url_of(listening: socket.socket, tls: bool) -> str:
    host, port = listening.getsockname()[:2]
    # Of every address it is this machine's own that who is here asks.
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    name = f"[{local}]" if ":" in local else local
    return f"http{'s' if tls else ''}://{name}:{port}"


def _end_with_parent(end: Callable[[], None]) -> None:
    """Call `end` when standard input ends."""
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def heard() -> None:
        if not os.read(descriptor, 1):
            loop.remove_reader(descriptor)
            end()

    with suppress(PermissionError):  # a file, which says nothing of who is gone
        loop.add_reader(descriptor, heard)


if __name__ == "__main__":
    sys.exit(main())
