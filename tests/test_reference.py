"""The reference names what the code has: every argument, field, counter and error, with its default."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import kvpager
import pytest
from kvpager.api import doctor, serve
from kvpager.api.client import connect
from kvpager.api.client_async import AsyncConnection
from kvpager.engine import LLM, Completion, SamplingParams
from kvpager.engine.sequence import FinishReason
from kvpager.kvstore.hashing import ChainIdentity, hash_blocks
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.space import HostSpace
from kvpager.kvstore.stats import HostStats, StoreStats
from kvpager.kvstore.store import TieredStore
from kvpager.tiers import errors
from kvpager.tiers.cold import ColdStats
from kvpager.tiers.cold_url import open_cold_tier
from kvpager.tiers.layout import KVLayout
from kvpager.tiers.pinned import arena_sizes, capacity_for

PAGE = (Path(__file__).parents[1] / "docs" / "reference.md").read_text()
CODE = re.findall(r"`([^`]+)`", PAGE)


def section(title: str) -> set[str]:
    """The words in code of one section, those of calls and signatures one by one."""
    part = re.split(rf"^##+ .*{re.escape(title)}.*$", PAGE, flags=re.MULTILINE)[1]
    code = re.findall(r"`([^`]+)`", re.split(r"^##", part, flags=re.MULTILINE)[0])
    return set(re.findall(r"\w+", " ".join(code)))


def signature(called: Callable[..., Any]) -> str:
    """Arguments and defaults as the page writes them, without types."""
    shown = []
    for argument in inspect.signature(called).parameters.values():
        if argument.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = "" if argument.default is argument.empty else f"={argument.default!r}"
        shown.append(argument.name + default.replace("'", '"'))
    return ", ".join(one for one in shown if one != "self")


@pytest.mark.parametrize(
    "called", [KVLayout, ChainIdentity, hash_blocks, HostStore, TieredStore, open_cold_tier, connect]
)
def test_signatures_are_as_they_are_written(called: Callable[..., Any]) -> None:
    assert f"{called.__name__}({signature(called)})" in CODE


def test_the_sizes_of_blocks_that_a_pool_takes_are_those_of_its_extents() -> None:
    written = re.findall(r"(\d+) MiB from `(\d+)([MG])`", PAGE)
    assert len(written) == 6
    for block, size, unit in written:
        least = int(size) << {"M": 20, "G": 30}[unit]
        assert arena_sizes(least, None)[1] == capacity_for(int(block) << 20) // 16 == int(block) << 20
        assert arena_sizes(least - (1 << 20), None)[1] == int(block) << 19


@pytest.mark.parametrize(
    ("of", "names"),
    [
        (LLM, ("generate", "stream", "submit", "step", "completion", "abort", "fork", "encode_chat")),
        (LLM, ("save_sessions", "session_tokens", "end_session", "reset_cache", "close")),
        (HostStore, ("space", "match", "flush", "subscribe", "close", "check_integrity", "status")),
        (HostStore, ("configure", "evict_where", "attach_cold", "detach_cold", "find_space")),
        (AsyncConnection, ("find_space", "disconnect", "drain", "attach_cold", "detach_cold", "status")),
        (HostSpace, ("load", "start_load", "put", "get", "reserve", "addresses", "view")),
        (HostSpace, ("pin", "unpin", "evict", "demote", "hint", "purge")),
        (HostSpace, ("lineage", "chain_of", "hits")),
        (TieredStore, ("open", "reserve", "advance", "append", "close_row", "poll", "fork", "sleep", "wake")),
        (TieredStore, ("promote", "spill", "evict", "sharing", "flush", "close", "check_integrity")),
    ],
)
def test_calls_are_as_they_are_written(of: type, names: tuple[str, ...]) -> None:
    for name in names:
        written = f"{name}({signature(getattr(of, name))})"
        # A long one may be cut: open(tokens, ...).
        assert written in CODE or any(
            one.endswith(", ...)") and written.startswith(one.removesuffix("...)")) for one in CODE
        ), written


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_every_option_of_a_command_is_there_and_no_other(command: str) -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    for one in (serve, doctor):
        one.add_parser(commands)
    options = {name for one in commands.choices[command]._actions for name in one.option_strings}
    part = PAGE.partition(f"## `kvpager {command}`")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`--.*?) \|", part, flags=re.MULTILINE)
    assert set(re.findall(r"--[\w-]+", " ".join(rows))) == options - {"-h", "--help"}


def test_every_name_that_kvpager_hands_on_is_there() -> None:
    assert set(kvpager.__all__) - {"__version__"} <= section("`kvpager`")


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("`LLM(model, ...)`", {*inspect.signature(LLM).parameters}),
        ("`SamplingParams(...)`", {item.name for item in fields(SamplingParams)}),
        ("`Completion`", {item.name for item in fields(Completion)}),
        ("`Completion`", {reason.value for reason in FinishReason}),
        ("Counters", {item.name for one in (StoreStats, HostStats, ColdStats) for item in fields(one)}),
        ("Cold tiers", {*inspect.signature(open_cold_tier).parameters}),
        ("Errors", set(errors.__all__)),
    ],
)
def test_every_argument_field_counter_and_error_is_there(title: str, names: set[str]) -> None:
    assert names - section(title) == set()


def test_no_counter_or_error_is_there_that_the_code_does_not_have() -> None:
    table = PAGE.partition("## Counters")[2].partition("## Errors")
    first = re.findall(r"^\| (`.*?) \|", table[0], flags=re.MULTILINE)
    known = {item.name for one in (StoreStats, HostStats, ColdStats) for item in fields(one)}
    assert set(re.findall(r"\w+", " ".join(first))) == known
    named = set(re.findall(r"^\| `(\w+)` \|", table[2], flags=re.MULTILINE))
    assert named == set(errors.__all__)


def test_defaults_of_sampling_are_as_they_are_written() -> None:
    for item in fields(SamplingParams):
        default = "none" if item.default == () else repr(item.default)
        assert f"| `{item.name}` | {default} |" in PAGE
