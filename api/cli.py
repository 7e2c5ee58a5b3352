"""The command line: ``kvpager COMMAND``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from .. import __version__
from ..tiers.errors import KVPagerError
from .demo import add_parser as add_demo
from .doctor import add_parser as add_doctor
from .option_words import error_in_options
from .serve import add_parser as add_serve

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        the exit code: 0 done, 1 it failed and said why, 2 wrong usage, 130 interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="kvpager", description="A tiered KV-cache offload service for LLM inference."
    )
    parser.add_argument("--version", action="version", version=f"kvpager {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    add_demo(commands)
    add_serve(commands)
    add_doctor(commands)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        code: int = options.run(options)
    except KVPagerError as error:
        said = error_in_options(error, options.settings(options))
        print(f"kvpager {options.command}: {said}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
