"""The settings of ``kvpager serve``: one entry each, of which flags, variables, keys and docs are made."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any, Final

from ..kvstore.policy import DEFAULT_POLICY
from ..tiers.settings import MOST_SECONDS
from .admin.address import DEFAULT_ADDRESS
from .config_file import CONFIG_VARIABLE, config_path, read_config
from .setting import (
    Given,
    Setting,
    add_flags,
    integer,
    integers,
    look_up,
    numbers_by_name,
    path,
    seconds,
    size,
    sizes_by_tenant,
    switch,
    text,
    url,
)

__all__ = [
    "COLD_SECRET_VARIABLE",
    "NO_ADMIN",
    "NO_FILE",
    "SERVE_SETTINGS",
    "TOKEN_VARIABLE",
    "add_settings",
    "find_settings",
    "serving",
    "without_settings",
]

TOKEN_VARIABLE: Final = "KVPAGER_TOKEN"
"""The environment variable that holds the token where no file does."""
COLD_SECRET_VARIABLE: Final = "KVPAGER_COLD_SECRET"
"""The environment variable that holds the cold tier's secret where no file does."""
NO_FILE: Final = "memory"
"""What `--arena` names where the memory is to have no file."""
NO_ADMIN: Final = "off"
"""What `--admin` says where nobody is to look."""

_MOST_DRAIN: Final = 86400.0
_MOST_UID: Final = (1 << 32) - 2
_MOST_PID: Final = 1 << 22
"""Linux gives no higher one."""

SERVE_SETTINGS: Final = (
    Setting(
        "--socket",
        path("/run/kvpager/sidecar.sock"),
        "where to listen (default: kvpager/sidecar.sock in $XDG_RUNTIME_DIR or /run/user/UID, "
        "or /tmp/kvpager-UID/sidecar.sock)",
        metavar="PATH",
    ),
    Setting(
        "--host-bytes",
        size("64G"),
        "host memory, as 8G or 512M (default: that of the arena that is there, or a quarter of what is free)",
        metavar="SIZE",
    ),
    Setting(
        "--cold",
        url("redis://redis:6379"),
        "the cold tier: redis://..., unix://..., disk:///folder (default: none)",
        metavar="URL",
    ),
    Setting("--cold-bytes", size("500G"), "most bytes of a cold tier on disk", metavar="SIZE"),
    Setting(
        "--quota",
        sizes_by_tenant('{ acme = "8G", "*" = "1G" }'),
        "the most host memory that a tenant's blocks take, as acme=8G; *: of every other tenant; may be "
        "given several times",
        default={},
        metavar="TENANT=SIZE",
    ),
    Setting(
        "--policy",
        text(DEFAULT_POLICY),
        "which blocks go first where there is no room: one of `kvpager policy`'s "
        f"(default: {DEFAULT_POLICY})",
        default=DEFAULT_POLICY,
        metavar="NAME",
    ),
    Setting(
        "--policy-weight",
        numbers_by_name("{ small_share = 0.2 }"),
        "a weight of the policy that is to be other than its own, as small_share=0.2; may be given several "
        "times",
        default={},
        metavar="NAME=NUMBER",
    ),
    Setting(
        "--retention-ttl",
        seconds(MOST_SECONDS, "600"),
        "that advice on how long to keep blocks holds where it does not say that (default: 600)",
        default=600.0,
        metavar="SECONDS",
    ),
    Setting(
        "--cold-secret-file",
        path("/etc/kvpager/cold.secret"),
        "seal what goes to the cold tier (AES-256-GCM) under the secret in a file that only its owner "
        f"can read (default: ${COLD_SECRET_VARIABLE}, or not sealed)",
        metavar="FILE",
    ),
    Setting(
        "--allow-uid",
        integers(0, _MOST_UID, "[1000]"),
        "another user who may connect; may be given several times",
        default=(),
        metavar="N",
    ),
    Setting(
        "--listen",
        text("127.0.0.1:8736"),
        "let clients in over TCP as well, who say the token (default: the socket alone)",
        metavar="HOST:PORT",
    ),
    Setting(
        "--token-file",
        path("/etc/kvpager/tokens"),
        "what clients over TCP must say, in a file that only its owner can read; each line a token, or "
        "TENANT:TOKEN for one that opens spaces of this tenant alone; # begins a comment "
        f"(default: ${TOKEN_VARIABLE})",
        metavar="FILE",
    ),
    Setting(
        "--tls-cert",
        path("/etc/kvpager/tls.crt"),
        "speak TLS over TCP: the certificate and its chain",
        metavar="FILE",
    ),
    Setting(
        "--tls-key",
        path("/etc/kvpager/tls.key"),
        "the certificate's key, which only its owner can read",
        metavar="FILE",
    ),
    Setting(
        "--insecure",
        switch(),
        "speak plain TCP on an address that other machines reach: the network sees tokens and blocks",
        default=False,
    ),
    Setting(
        "--arena",
        path("/dev/shm/kvpager.arena"),
        "the file that holds the memory (default: one of the socket's own in /dev/shm); "
        f"{NO_FILE}: memory without a file, which does not outlive this process",
        metavar="PATH",
    ),
    Setting("--fresh", switch(), "give up what an earlier process left in the arena", default=False),
    Setting(
        "--keep-arena",
        switch(),
        "leave the arena for the next process when it is stopped",
        default=False,
    ),
    Setting(
        "--drain",
        seconds(_MOST_DRAIN, "30"),
        "for commits and writes to the cold tier when it is stopped (default: 30)",
        default=30.0,
        metavar="SECONDS",
    ),
    Setting(
        "--with-process",
        integer(1, _MOST_PID, "4711"),
        "stop when this process is gone, however it ended (default: serve until it is asked to stop)",
        metavar="PID",
    ),
    Setting(
        "--admin",
        text(DEFAULT_ADDRESS),
        f"where operators look and change things over HTTP; {NO_ADMIN}: nowhere (default: {DEFAULT_ADDRESS})",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
    ),
    Setting(
        "--admin-token-file",
        path("/etc/kvpager/admin.tokens"),
        "what operators say, in a file that only its owner can read; each line read:TOKEN or "
        "operate:TOKEN (default: the socket's path with .admin.token, made at the first start)",
        metavar="FILE",
    ),
    Setting(
        "--admin-tls-cert",
        path("/etc/kvpager/admin.crt"),
        "HTTPS: the certificate and its chain",
        metavar="FILE",
    ),
    Setting(
        "--admin-tls-key",
        path("/etc/kvpager/admin.key"),
        "the certificate's key, which only its owner can read",
        metavar="FILE",
    ),
    Setting(
        "--trace",
        path("/var/log/kvpager/trace.jsonl.gz"),
        "write down which blocks are looked up and put, by names that tell nothing of prompts, for kvpager "
        "simulate; gzipped if it ends with .gz (default: nowhere)",
        metavar="PATH",
    ),
    Setting(
        "--trace-bytes",
        size("4G"),
        "where the trace ends, in bytes before they are zipped (default: 1G)",
        metavar="SIZE",
    ),
    Setting("--quiet", switch(), "say nothing unless something is wrong", default=False),
)
"""In the order in which help and docs tell them."""


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and the flags of all settings to a command."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"the file with settings (default: ${CONFIG_VARIABLE}, or kvpager/kvpager.toml in "
        "$XDG_CONFIG_HOME, ~/.config or /etc, if it is there)",
    )
    add_flags(parser, SERVE_SETTINGS)


def find_settings(flags: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Given]:
    """What is given for each setting, by its name: as a flag, in the environment, in ``kvpager.toml``.

    Args:
        flags: parsed options, with ``config``.
        environment: variables.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or has a key that is none.
    """
    file = read_config(config_path(flags.config, environment), (one.name for one in SERVE_SETTINGS))
    if file.problems:
        raise file.problems[0]
    return look_up(SERVE_SETTINGS, flags, environment, file.given)


def serving(name: str, environment: Mapping[str, str]) -> Any:
    """What a sidecar that is started without flags has for one setting.

    Raises:
        ConfigError: as of `find_settings`, or the value is none.
    """
    return find_settings(argparse.Namespace(config=None), environment)[name].value()


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a sidecar whose flags say everything: no variable and no file says more.

    Args:
        environment: variables; secrets among them stay.
    """
    variables = {one.variable for one in SERVE_SETTINGS}
    rest = {name: value for name, value in environment.items() if name not in variables}
    return {**rest, CONFIG_VARIABLE: os.devnull}
