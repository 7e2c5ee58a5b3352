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
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from ..kvstore.calibration import known_calibration
from ..kvstore.host import HostStore
from ..kvstore.trace_log import MOST_TRACE_BYTES, TraceLog
from ..tiers.arena_file import ArenaFile, default_arena_path
from ..tiers.errors import ConfigError, IntegrityError
from ..tiers.memory import format_bytes, memory_headroom
from .admin_child import AdminOptions, serve_admin
from .cold_source import ColdSource
from .listening import default_socket_path, refuse_if_taken
from .processes import Interruptions
from .remote_access import RemoteAccess, check_token, parse_address, read_tokens, server_tls
from .secret_file import read_secret_file
from .serve_settings import (
    COLD_SECRET_VARIABLE,
    NO_ADMIN,
    NO_FILE,
    TOKEN_VARIABLE,
    add_settings,
    find_settings,
)
from .setting import Given
from .sidecar import Sidecar

__all__ = ["add_parser", "usual_bytes"]

_log = logging.getLogger(__name__)

_HOST_SHARE: Final = 4
_ROOM_SHARE: Final = 2
"""Of what is free in the arena's file system, others may want some."""


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "serve",
        help="the sidecar: one pool of host memory and a cold tier for the engines of this machine",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_settings(parser)
    parser.set_defaults(run=_run, settings=_settings)


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """Where each setting comes from, in words: its flag, its variable, or its place in the file."""
    given: dict[str, Given] = getattr(options, "given", {})
    words = {one.setting.flag: one.where for one in given.values()}
    sealed = "--cold-secret-file" if options.cold_secret_file is not None else f"${COLD_SECRET_VARIABLE}"
    names = {
        "host_bytes": "--host-bytes",
        "socket": "--socket",
        "arena": "--arena",
        "cold.url": "--cold",
        "cold.path": "--cold",
        "cold.capacity_bytes": "--cold-bytes",
        "cold.secret": sealed,
        "trace": "--trace",
        "trace_bytes": "--trace-bytes",
    }
    return {**words, **{setting: words.get(flag, flag) for setting, flag in names.items()}}


def _fill(options: argparse.Namespace) -> None:
    """Put the value of every setting in place of what the command line gave.

    Raises:
        ConfigError: one has none, or the file that is to be read says what it cannot.
    """
    options.given = find_settings(options, os.environ)
    for name, given in options.given.items():
        setattr(options, name, given.value())


def _run(options: argparse.Namespace) -> int:
    _fill(options)
    host_bytes, cold_bytes, drain = options.host_bytes, options.cold_bytes, options.drain
    if cold_bytes is not None and options.cold is None:
        raise ConfigError("--cold-bytes", "is for a cold tier, and --cold names none")
    if options.trace_bytes is not None and options.trace is None:
        raise ConfigError("--trace-bytes", "is for a trace, and --trace names none")
    source = ColdSource(options.cold, _cold_secret(options))
    remote = _remote_of(options)
    admin = _admin_of(options)
    if options.arena == NO_FILE and (options.fresh or options.keep_arena):
        raise ConfigError("--arena", f"{NO_FILE} is no file that could be left, or be there")
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
        if options.arena != NO_FILE:
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
            trace = None
            if options.trace is not None:
                trace = TraceLog(options.trace, most_bytes=options.trace_bytes or MOST_TRACE_BYTES)
                stack.callback(trace.close)
            host = HostStore(
                host_bytes or usual_bytes(arena),
                cold=cold,
                policy=options.policy,
                arena=arena,
                quotas=options.quota,
                policy_weights=options.policy_weight,
                retention_ttl=options.retention_ttl,
                trace=trace,
            )
            stack.callback(host.close)
        if cold is not None and (calibration := known_calibration()) is not None:
            host.calibrate_cold(calibration.cold.get(cold.name))
        if host.stats.adopted:
            say(f"{host.stats.adopted} blocks were there, and are served")

        def leave() -> None:
            """The end that was asked for: the arena stays, or does not."""
            if arena is not None:
                arena.keep = options.keep_arena
                if not arena.keep:
                    arena.remove()

        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(
                _serve(host, source, path, options.allow_uid, remote, admin, drain, watched, say, leave)
            )
        # Whoever still waits in a thread is woken by the store's end.
    say("stopped")
    return 0


def _pidfd_of(process: int) -> int:
    """A descriptor that is readable when a process is gone; the caller closes it."""
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


def _cold_secret(options: argparse.Namespace) -> bytes | None:
    """What the cold tier's records are sealed under, if they are."""
    if options.cold_secret_file is not None:
        if options.cold is None:
            raise ConfigError("--cold-secret-file", "is for a cold tier, and --cold names none")
        return read_secret_file("--cold-secret-file", options.cold_secret_file)
    # The variable may be there for several sidecars, of which not all have a cold tier.
    return os.environ.get(COLD_SECRET_VARIABLE, "").encode() or None


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
    if options.admin != NO_ADMIN:
        return AdminOptions(options.admin, *files)
    if any(files):
        raise ConfigError("--admin", f"is {NO_ADMIN}, and files are named for it")
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
                NO_FILE,
            )
        share = min(share, most)
    return max(1 << 20, share)


async def _serve(
    host: HostStore,
    source: ColdSource,
    path: str | os.PathLike[str],
    uids: Collection[int],
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
        say(f"starting an admin process for operators, on {admin.address}")
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
