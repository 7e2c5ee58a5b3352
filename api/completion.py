"""``kvpager completion SHELL``: prints what has the shell complete commands, options and files.

bash: eval "$(kvpager completion bash)" in ~/.bashrc, or the output as a file in
      /usr/share/bash-completion/completions/kvpager
zsh:  the output as a file _kvpager in a folder of $fpath
fish: kvpager completion fish > ~/.config/fish/completions/kvpager.fish
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any, Final

__all__ = ["add_parser"]

_SHELLS: Final = ("bash", "zsh", "fish")
_FILES: Final = frozenset({"FILE", "PATH", "MODEL"})
_FOLDERS: Final = frozenset({"FOLDER"})
"""What options call values that are completed as files and as folders."""


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "completion",
        help="have the shell complete commands and options",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(run=_run, settings=lambda options: {})


def _run(options: argparse.Namespace) -> int:
    # Here, since this command alone needs them; the second has this module among its own.
    import shtab

    from .cli import command_parser

    parser, _ = command_parser()
    _prepare(parser, shtab.FILE, shtab.DIRECTORY)
    print(shtab.complete(parser, options.shell))
    return 0


def _prepare(parser: argparse.ArgumentParser, file: object, folder: object) -> None:
    """Say of all arguments what completes them, and of commands what they are in a word."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for told in action._choices_actions:
                action.choices[told.dest].description = told.help
            for below in action.choices.values():
                _prepare(below, file, folder)
        elif action.metavar in _FILES:
            action.complete = file  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = folder  # type: ignore[attr-defined]
        elif isinstance(action.metavar, str):
            action.metavar = action.metavar.replace(":", " ")  # a colon ends a message of zsh
