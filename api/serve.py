"""``kvpager serve``: the sidecar, one pool of host memory and a cold tier for every engine of this machine.

It needs no GPU and holds none. Clients of this machine come through the socket and map the memory; with
--listen others come over TCP, and get copies. SIGTERM and Ctrl-C stop it: outstanding commits are waited for
and blocks are written to the cold tier, within --drain seconds; a second signal ends it at once.

Its memory is a file. Where the process is killed, the next one on the same file goes on with all blocks that
were committed; clients that live keep what they hold. When it is stopped the file goes, unless --keep-arena.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import inspect
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from ..kvstore.host import HostStore
from ..kvstore.tenants import check_quotas
from ..tiers.arena_file import ArenaFile, default_arena_path
from ..tiers.errors import ConfigError, IntegrityError
from ..tiers.memory import format_bytes, memory_headroom
from ..tiers.settings import MOST_BYTES, expect_integer, expect_seconds, shown
from .admin.address import DEFAULT_ADDRESS
from .admin_child import AdminOptions, serve_admin
from .cold_source import ColdSource
from .listening import default_socket_path, refuse_if_taken
from .processes import Interruptions
from .remote_access import RemoteAccess, check_token, parse_address, read_tokens, server_tls
from .secret_file import read_secret_file
from .sidecar import Sidecar

__all__ = ["TOKEN_VARIABLE", "add_parser", "parse_bytes", "usual_bytes"]

_log = logging.getLogger(__name__)

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_UNITS: Final = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_HOST_SHARE: Final = 4
_ROOM_SHARE: Final = 2
"""Of what is free in the arena's file system, others may want some."""
_MOST_DRAIN: Final = 86400.0
_MOST_UID: Final = (1 << 32) - 2
_MOST_PID: Final = 1 << 22
"""Linux gives no higher one."""
TOKEN_VARIABLE: Final = "KVPAGER_TOKEN"
"""The environment variable that holds the token where no file does."""
_COLD_SECRET: Final = "KVPAGER_COLD_SECRET"
"""The environment variable that holds the cold tier's secret where no file does."""
_NO_FILE: Final = "memory"
_NO_ADMIN: Final = "off"


def parse_bytes(setting: str, text: str) -> int:
    """Bytes that a size like ``8G``, ``512M``, ``1.5GiB`` or ``4096`` means; units are powers of 1024.

    Raises:
        ConfigError: it is none; the error names the setting.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(setting, f"must be a size like 8G, 512M or 1.5G, got {text[:40]!r}")
    number, unit = found.groups()
    try:
        count = (
            int(float(number) * (1 << _UNITS[unit.upper()]))
            if "." in number
            else (int(number) << _UNITS[unit.upper()])
        )
    except (ValueError, OverflowError) as error:
        raise ConfigError(setting, f"must be a size like 8G, 512M or 1.5G, got {text[:40]!r}") from error
    return expect_integer(setting, count, 1, MOST_BYTES)


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "serve",
        help="the sidecar: one pool of host memory and a cold tier for the engines of this machine",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="where to listen (default: kvpager/sidecar.sock in $XDG_RUNTIME_DIR or /run/user/UID, "
        "or /tmp/kvpager-UID/sidecar.sock)",
    )
    parser.add_argument(
        "--host-bytes",
        metavar="SIZE",
        help="host memory, as 8G or 512M (default: that of the arena that is there, "
        "or a quarter of what is free)",
    )
    parser.add_argument(
        "--cold", metavar="URL", help="the cold tier: redis://..., unix://..., disk:///folder (default: none)"
    )
    parser.add_argument("--cold-bytes", metavar="SIZE", help="most bytes of a cold tier on disk")
    parser.add_argument(
        "--quota",
        metavar="TENANT=SIZE",
        action="append",
        default=[],
        help="the most host memory that a tenant's blocks take, as acme=8G; *: of every other tenant; may be "
        "given several times",
    )
    parser.add_argument(
        "--cold-secret-file",
        metavar="FILE",
        help="seal what goes to the cold tier (AES-256-GCM) under the secret in a file that only its owner "
        f"can read (default: ${_COLD_SECRET}, or not sealed)",
    )
    parser.add_argument(
        "--allow-uid",
        metavar="N",
        type=int,
        action="append",
        default=[],
        help="another user who may connect; may be given several times",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="let clients in over TCP as well, who say the token (default: the socket alone)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="what clients over TCP must say, in a file that only its owner can read; each line a token, or "
        "TENANT:TOKEN for one that opens spaces of this tenant alone; # begins a comment "
        f"(default: ${TOKEN_VARIABLE})",
    )
    parser.add_argument(
        "--tls-cert", metavar="FILE", help="speak TLS over TCP: the certificate and its chain"
    )
    parser.add_argument(
        "--tls-key", metavar="FILE", help="the certificate's key, which only its owner can read"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="speak plain TCP on an address that other machines reach: the network sees tokens and blocks",
    )
    parser.add_argument(
        "--arena",
        metavar="PATH",
        help="the file that holds the memory (default: one of the socket's own in /dev/shm); "
        f"{_NO_FILE}: memory without a file, which does not outlive this process",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="give up what an earlier process left in the arena"
    )
    parser.add_argument(
        "--keep-arena", action="store_true", help="leave the arena for the next process when it is stopped"
    )
    parser.add_argument(
        "--drain",
        metavar="SECONDS",
        type=float,
        default=30.0,
        help="for commits and writes to the cold tier when it is stopped (default: %(default)s)",
    )
    parser.add_argument(
        "--with-process",
        metavar="PID",
        type=int,
        help="stop when this process is gone, however it ended (default: serve until it is asked to stop)",
    )
    parser.add_argument(
        "--admin",
        metavar="HOST:PORT",
        default=DEFAULT_ADDRESS,
        help=f"where operators look and change things over HTTP; {_NO_ADMIN}: nowhere (default: %(default)s)",
    )
    parser.add_argument(
        "--admin-token-file",
        metavar="FILE",
        help="what operators say, in a file that only its owner can read; each line read:TOKEN or "
        "operate:TOKEN (default: the socket's path with .admin.token, made at the first start)",
    )
    parser.add_argument("--admin-tls-cert", metavar="FILE", help="HTTPS: the certificate and its chain")
    parser.add_argument(
        "--admin-tls-key", metavar="FILE", help="the certificate's key, which only its owner can read"
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing unless something is wrong")
    parser.set_defaults(run=_run, settings=_settings)


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """The option that each setting comes from."""
    return {
        "host_bytes": "--host-bytes",
        "socket": "--socket",
        "arena": "--arena",
        "cold.url": "--cold",
        "cold.path": "--cold",
        "cold.capacity_bytes": "--cold-bytes",
        "cold.secret": f"${_COLD_SECRET}" if options.cold_secret_file is None else "--cold-secret-file",
    }


def _run(options: argparse.Namespace) -> int:
    drain = expect_seconds("--drain", options.drain, _MOST_DRAIN)
    uids = [expect_integer("--allow-uid", uid, 0, _MOST_UID) for uid in options.allow_uid]
    host_bytes = None if options.host_bytes is None else parse_bytes("--host-bytes", options.host_bytes)
    cold_bytes = None if options.cold_bytes is None else parse_bytes("--cold-bytes", options.cold_bytes)
    if cold_bytes is not None and options.cold is None:
        raise ConfigError("--cold-bytes", "is for a cold tier, and --cold names none")
    quotas = _quotas_of(options.quota)
    source = ColdSource(options.cold, _cold_secret(options))
    remote = _remote_of(options)
    admin = _admin_of(options)
    if options.arena == _NO_FILE and (options.fresh or options.keep_arena):
        raise ConfigError("--arena", f"{_NO_FILE} is no file that could be left, or be there")
    path = default_socket_path(make=True) if options.socket is None else options.socket

    def say(text: str) -> None:
        if not options.quiet:
            with suppress(BrokenPipeError):  # who listened is gone, and what is said is for him
                print(f"kvpager serve: {text}", file=sys.stderr, flush=True)

    with ExitStack() as stack:
        # Asked to end before it can serve or after, it leaves nothing behind either.
        interruptions = stack.enter_context(Interruptions())
        watched = None
        if options.with_process is not None:
            watched = _pidfd_of(options.with_process)
            stack.callback(os.close, watched)
        cold = source.open(cold_bytes)
        if cold is not None:
            stack.callback(cold.close)
        refuse_if_taken(path)
        arena = None
        if options.arena != _NO_FILE:
            with interruptions.put_off():
                arena = ArenaFile(
                    default_arena_path(os.fspath(path)) if options.arena is None else options.arena,
                    fresh=options.fresh,
                    keep=options.keep_arena,
                    cold=source.name,
                )
                stack.callback(arena.close)
            # What ends it before it is stopped is no reason to lose blocks.
            arena.keep = arena.keep or arena.nbytes > 0
        with interruptions.put_off():
            host = HostStore(host_bytes or usual_bytes(arena), cold=cold, arena=arena, quotas=quotas)
            stack.callback(host.close)
        if host.stats.adopted:
            say(f"{host.stats.adopted} blocks were there, and are served")

        def leave() -> None:
            """The end that was asked for: the arena stays, or does not."""
            if arena is not None:
                arena.keep = options.keep_arena
                if not arena.keep:
                    arena.remove()

        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(host, source, path, uids, remote, admin, drain, watched, say, leave))
        # Whoever still waits in a thread is woken by the store's end.
    say("stopped")
    return 0


def _pidfd_of(process: int) -> int:
    """A descriptor that is readable when a process is gone; the caller closes it."""
    expect_integer("--with-process", process, 1, _MOST_PID)
    try:
        return os.pidfd_open(process)
    except OSError as error:
        raise ConfigError(
            "--with-process", f"process {process} cannot be watched: {error.strerror}"
        ) from error


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: it has more requests through on the same core."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


def _quotas_of(given: list[str]) -> dict[str, int]:
    """Bytes by tenant, of ``TENANT=SIZE`` each."""
    quotas: dict[str, int] = {}
    for text in given:
        tenant, said, size = text.rpartition("=")
        if not said:
            raise ConfigError("--quota", f"must be TENANT=SIZE, got {shown(text)}")
        if tenant in quotas:
            raise ConfigError("--quota", f"names tenant {tenant!r} twice")
        quotas[tenant] = parse_bytes("--quota", size)
    return check_quotas("--quota", quotas)


def _cold_secret(options: argparse.Namespace) -> bytes | None:
    """What the cold tier's records are sealed under, if they are."""
    if options.cold_secret_file is not None:
        if options.cold is None:
            raise ConfigError("--cold-secret-file", "is for a cold tier, and --cold names none")
        return read_secret_file("--cold-secret-file", options.cold_secret_file)
    # The variable may be there for several sidecars, of which not all have a cold tier.
    return os.environ.get(_COLD_SECRET, "").encode() or None


def _remote_of(options: argparse.Namespace) -> RemoteAccess | None:
    """Who may come in over TCP, if anybody may."""
    if options.listen is None:
        for name, given in (
            ("--token-file", options.token_file),
            ("--tls-cert", options.tls_cert),
            ("--tls-key", options.tls_key),
            ("--insecure", options.insecure or None),
        ):
            if given is not None:
                raise ConfigError(name, "is for clients over TCP, and --listen names no address")
        return None
    host, port = parse_address("--listen", options.listen)
    if options.token_file is not None:
        token: str | dict[str, frozenset[str] | None] = read_tokens("--token-file", options.token_file)
    elif os.environ.get(TOKEN_VARIABLE):
        token = check_token(TOKEN_VARIABLE, os.environ[TOKEN_VARIABLE])
    else:
        raise ConfigError(
            "--listen", f"needs a token that clients must say: --token-file or ${TOKEN_VARIABLE}"
        )
    tls = None
    if options.tls_cert is not None and options.tls_key is not None:
        tls = server_tls(options.tls_cert, options.tls_key)
    elif options.tls_cert is not None or options.tls_key is not None:
        missing = "--tls-cert" if options.tls_cert is None else "--tls-key"
        raise ConfigError(missing, "a certificate and its key are given together")
    return RemoteAccess(host, port, token, tls, options.insecure)


def _admin_of(options: argparse.Namespace) -> AdminOptions | None:
    """How operators are served, if they are."""
    files = options.admin_token_file, options.admin_tls_cert, options.admin_tls_key
    if options.admin != _NO_ADMIN:
        return AdminOptions(options.admin, *files)
    if any(files):
        raise ConfigError("--admin", f"is {_NO_ADMIN}, and files are named for it")
    return None


def usual_bytes(arena: ArenaFile | None) -> int:
    """Host memory where nobody says how much: that of the arena that is there, or a share of what is free."""
    if arena is not None and arena.nbytes:
        return arena.nbytes
    share = memory_headroom().usable_bytes // _HOST_SHARE
    if arena is not None:
        room = os.statvfs(os.path.dirname(os.path.abspath(arena.path)))
        most = room.f_bavail * room.f_frsize // _ROOM_SHARE
        if most < share:
            _log.warning(
                "host memory is %s, for want of room at %s: a larger file system (docker run --shm-size), "
                "another --arena, or --arena=%s has more",
                format_bytes(most),
                arena.path,
                _NO_FILE,
            )
        share = min(share, most)
    return max(1 << 20, share)


async def _serve(
    host: HostStore,
    source: ColdSource,
    path: str | os.PathLike[str],
    uids: list[int],
    remote: RemoteAccess | None,
    admin: AdminOptions | None,
    drain: float,
    watched: int | None,
    say: Callable[[str], None],
    leave: Callable[[], None],
) -> None:
    loop = asyncio.get_running_loop()
    sidecar = Sidecar(host, path, allow_uids=uids, remote=remote, cold=source)
    asked = asyncio.Event()

    def hear(number: signal.Signals) -> None:
        if asked.is_set():
            sidecar.remove_socket()
            leave()
            os._exit(128 + number)
        say(f"{number.name}: stopping, in {drain:g} seconds at most; once more ends it at once")
        asked.set()

    def hear_end(descriptor: int) -> None:
        loop.remove_reader(descriptor)
        say(f"the process that it served for is gone: stopping, in {drain:g} seconds at most")
        asked.set()

    if watched is not None:
        loop.add_reader(watched, hear_end, watched)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup
            loop.add_signal_handler(number, partial(hear, number))
    try:
        await sidecar.start()
    except IntegrityError as error:
        raise ConfigError("--arena", f"{error}; --fresh gives up what it holds") from error
    capacity = format_bytes(host.arena.capacity_bytes)
    where = str(Path(path).absolute())
    if remote is not None:
        where += f" and on {remote.host}:{sidecar.port} ({'TLS' if remote.tls is not None else 'plain TCP'})"
    say(f"listening on {where}, {capacity} of host memory{_cold_words(host)}")
    served = None
    if admin is not None:
        say(f"operators are served on {admin.address}")
        served = loop.create_task(serve_admin(admin, os.path.abspath(path)))
    await asked.wait()
    if served is not None:
        served.cancel()
        await asyncio.wait([served])
    if sidecar.reserved:
        say(f"waiting for commits of {sidecar.reserved} blocks")
    left = await sidecar.close(drain)
    if left:
        say(f"{left} blocks are not in the cold tier")
    leave()


def _cold_words(host: HostStore) -> str:
    return "" if host.cold is None else ", and a cold tier"
