"""The command line: ``kvpager COMMAND``."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Final

from .. import __version__
from ..tiers.errors import KVPagerError, ServiceUnavailableError
from .option_words import error_in_options

__all__ = ["command_parser", "main"]

_COMMANDS: Final = {
    "demo": "demo",
    "serve": "serve",
    "config": "config",
    "status": "status",
    "top": "top",
    "pin": "pin",
    "unpin": "pin",
    "evict": "evict",
    "policy": "policy",
    "doctor": "doctor",
    "bench": "bench",
    "size": "size",
    "simulate": "simulate",
    "completion": "completion",
}
"""The module beside this one that has each, with an `add_parser`."""
_UNREACHABLE: Final = 3
_UNPRINTED: Final = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What fails where something is printed: a pipe that nobody reads, a full disk, a terminal that is gone."""
_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        the exit code: 0 done, 1 it failed and said why, 2 wrong usage, 3 the sidecar or its admin process
        cannot be reached, 130 interrupted.
    """
    with _interrupted_at_once():
        options = _options(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except KVPagerError as error:
        said = error_in_options(error, options.settings(options))
        print(f"kvpager {options.command}: {said}", file=sys.stderr)
        return _UNREACHABLE if isinstance(error, ServiceUnavailableError) else 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        if error.errno not in _UNPRINTED or error.filename is not None:
            raise
        if error.errno != errno.EPIPE:
            print(f"kvpager {options.command}: the output was not written: {error.strerror}", file=sys.stderr)
        # Else who read what is printed has gone (`| head`). What is left would be flushed there once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def command_parser(
    commands: Iterable[str] = tuple(_COMMANDS),
) -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """The parser of the command line, and that of each command.

    Args:
        commands: those that it is to have; their modules are imported.
    """
    parser = ArgumentParser(
        prog="kvpager", description="A tiered KV-cache offload service for LLM inference."
    )
    parser.add_argument("--version", action="version", version=f"kvpager {__version__}")
    added = parser.add_subparsers(title="commands", dest="command", required=True)
    for name in dict.fromkeys(_COMMANDS[command] for command in commands):
        import_module(f".{name}", __package__).add_parser(added)
    return parser, added.choices


def _options(given: Sequence[str]) -> Namespace:
    """What is asked for, with the command that does it, whose imports take a while."""
    # A sidecar that is started again does not import what looks at the machine.
    parser, commands = command_parser(given[:1] if given and given[0] in _COMMANDS else _COMMANDS)
    options, unknown = parser.parse_known_args(given)
    if unknown:
        # argparse itself tells the usage of all commands, not that of the one whose arguments they are.
        told = commands[options.command] if given[0] == options.command else parser
        told.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


@contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """Nothing is there yet that an interruption (Ctrl-C) would have to end: it ends the process, and quietly.

    An exception might be raised in the midst of any import, and come out of it as another one.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # somebody else's business, or ignored (nohup)
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


if __name__ == "__main__":
    sys.exit(main())
