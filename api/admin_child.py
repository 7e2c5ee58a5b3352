"""The admin process of a sidecar: started beside it, started again where it dies, ended with it.

It is a process of its own, so what operators ask shares no interpreter with what engines do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from ..tiers.errors import ConfigError
from .admin.address import addresses_of
from .remote_access import server_tls
from .secret_file import check_secret_file

__all__ = ["AdminOptions", "serve_admin"]

_log = logging.getLogger(__name__)

_PACKAGES: Final = ("fastapi", "uvicorn", "prometheus_client")
_GIVEN_UP: Final = 3
"""The exit code of one that may not, or cannot, listen, and said why."""
_FIRST_REST: Final = 0.5
_MOST_REST: Final = 60.0
_GOOD_SECONDS: Final = 60.0
"""One that ran so long is started again soon."""
_END_SECONDS: Final = 5.0


@dataclass(frozen=True)
class AdminOptions:
    """How an admin process is started.

    Args:
        address: what it listens on, ``HOST:PORT``.
        token_file: the file of its tokens; None: one beside the socket, which it makes.
        tls_cert, tls_key: files (PEM), for HTTPS; None: plain HTTP.

    Raises:
        ConfigError: a file cannot be read, or other machines reach the address and no tokens are named.
    """

    address: str
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def __post_init__(self) -> None:
        addresses_of(self.address, has_tokens=self.token_file is not None)
        if self.token_file is not None:
            check_secret_file("--admin-token-file", self.token_file)
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "--admin-tls-cert" if self.tls_cert is None else "--admin-tls-key"
            raise ConfigError(missing, "a certificate and its key are given together")
        if self.tls_cert is not None and self.tls_key is not None:
            server_tls(self.tls_cert, self.tls_key)

    def command(self, path: str) -> list[str]:
        """The command that serves the sidecar on this socket."""
        command = [
            sys.executable,
            "-P",
            "-m",
            "kvpager.api.admin",
            "--socket",
            path,
            "--listen",
            self.address,
        ]
        for name, value in (
            ("--token-file", self.token_file),
            ("--tls-cert", self.tls_cert),
            ("--tls-key", self.tls_key),
        ):
            if value is not None:
                command += [name, os.path.abspath(value)]
        return command


async def serve_admin(options: AdminOptions, path: str) -> None:
    """Have an admin process, until this is cancelled. What keeps it from running is logged once."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        _log.warning(
            "there is no admin process, for want of %s: pip install %s",
            " and ".join(missing),
            " ".join(missing),
        )
        return
    rest = _FIRST_REST
    refused = False
    while True:
        began = time.monotonic()
        code = await _run([*options.command(path), *(["--again"] if refused else [])])
        if time.monotonic() - began > _GOOD_SECONDS:
            rest = _FIRST_REST
            refused = False
        if code != _GIVEN_UP:
            _log.warning(
                "the admin process ended with code %d, and is started again in %g seconds", code, rest
            )
        elif not refused:
            _log.warning("there is no admin process: the sidecar serves without it, and goes on trying")
            refused = True
        await asyncio.sleep(rest)
        rest = min(_MOST_REST, 2 * rest)


async def _run(command: list[str]) -> int:
    """Run it to its end, or to the end of this; returns its exit code."""
    # Deaf to Ctrl-C, which reaches every process of a terminal: it ends with its standard input. That is a
    # pipe whose other end this process alone has, so it ends however this one does.
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            if process.stdin is not None:
                process.stdin.close()
            try:
                async with asyncio.timeout(_END_SECONDS):
                    await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
