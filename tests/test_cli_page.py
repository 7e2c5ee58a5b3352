"""docs/cli.md names what the commands have: every option, setting, figure and exit code."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from kvpager.api.cli import command_parser
from kvpager.api.serve_settings import SERVE_SETTINGS

PAGE = (Path(__file__).parents[1] / "docs" / "cli.md").read_text()
PARSERS = command_parser()[1]
COMMON = {"--socket", "--url", "--token-file", "--ca", "--json"}
OPERATORS = ("status", "top", "pin", "unpin", "evict", "policy")
ELSEWHERE = {"serve", "doctor", "demo"}
"""Other pages tell their options."""


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}


def first_column(text: str) -> list[str]:
    """What stands first in each row of a text's tables."""
    return re.findall(r"^\| (.+?) \|", text, flags=re.MULTILINE)


def named(text: str) -> set[str]:
    """Options that are named in the first column."""
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", " ".join(first_column(text))))


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_command_is_there() -> None:
    listed = " ".join(first_column(PAGE.partition("## Exit codes")[0]))
    assert set(re.findall(r"[a-z]+", listed)) >= {*PARSERS}


@pytest.mark.parametrize("command", ["bench", "simulate", "size"])
def test_every_option_of_a_command_is_there_and_no_other(command: str) -> None:
    assert named(section(f"`kvpager {command}`")) == options_of(PARSERS[command])


def test_every_option_of_operators_is_there_and_no_other() -> None:
    text = section("A sidecar that runs")
    assert all(options_of(PARSERS[command]) >= COMMON for command in OPERATORS)
    assert named(text) == set().union(*(options_of(PARSERS[command]) for command in OPERATORS))
    rows = re.split(r"^\| `kvpager (?=\w)", text, flags=re.MULTILINE)[1:]
    found: dict[str, set[str]] = {}
    for row in rows:
        # Its own options follow a command, up to the next one; one row has two of them.
        for command in re.findall(r"(?:^|`kvpager )(\w+)", row.split("|")[0]):
            found[command] = named(f"| {row}") | {"--by"} & options_of(PARSERS[command])
    assert found == {command: options_of(PARSERS[command]) - COMMON for command in OPERATORS}


def test_commands_without_options_of_their_own_have_none() -> None:
    assert {*PARSERS} == {*OPERATORS, *ELSEWHERE, "bench", "simulate", "size", "config", "completion"}
    assert options_of(PARSERS["config"]) == options_of(PARSERS["completion"]) == set()


def test_the_table_of_settings_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `\w+` \| `--.*$", section("Settings of a sidecar"), flags=re.MULTILINE)
    assert rows == [
        f"| `{one.name}` | `{one.flag}` | `{one.variable}` | {one.kind.words} | `{one.kind.example}` |"
        for one in SERVE_SETTINGS
    ]


def test_links_lead_to_pages_and_headings_that_are_there() -> None:
    folder = Path(__file__).parents[1] / "docs"
    for file, heading in re.findall(r"\]\(([\w.]*)(?:#([\w-]+))?\)", PAGE):
        text = (folder / file).read_text() if file else PAGE
        headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", one).strip().lower().replace(" ", "-") for one in headings}
        assert not heading or heading in anchors, (file, heading)
