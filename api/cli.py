"""The command line: ``kvpager COMMAND``."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Final

from .. import __version__
from ..tiers.errors import KVPagerError
from .option_words import error_in_options

__all__ = ["main"]

_COMMANDS: Final = ("demo", "serve", "config", "doctor", "bench", "size")
"""Each is a module beside this one, with an `add_parser`."""
_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        the exit code: 0 done, 1 it failed and said why, 2 wrong usage, 130 interrupted.
    """
    with _interrupted_at_once():
        options = _options(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        code: int = options.run(options)
    except KVPagerError as error:
        said = error_in_options(error, options.settings(options))
        print(f"kvpager {options.command}: {said}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Who read what is printed has gone (`| head`), and nothing more can be flushed into his pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _options(given: Sequence[str]) -> argparse.Namespace:
    """What is asked for, with the command that does it, whose imports take a while."""
    parser = argparse.ArgumentParser(
        prog="kvpager", description="A tiered KV-cache offload service for LLM inference."
    )
    parser.add_argument("--version", action="version", version=f"kvpager {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    # A sidecar that is started again does not import what looks at the machine.
    for name in given[:1] if given[:1] and given[0] in _COMMANDS else _COMMANDS:
        import_module(f".{name}", __package__).add_parser(commands)
    options, unknown = parser.parse_known_args(given)
    if unknown:
        # argparse itself tells the usage of all commands, not that of the one whose arguments they are.
        told = commands.choices[options.command] if given[0] == options.command else parser
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
