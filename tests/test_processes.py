"""Processes of a command: results and errors come back, and an interrupt leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from kvpager.api.processes import Interruptions
from kvpager.tests.process_tree import await_child, is_there
from kvpager.tiers.errors import ConfigError, KVPagerError
from kvpager.tiers.settings import expect_integer

# More than a pipe holds: the parent is still handing it over while the other process starts.
PROGRAM = """
import sys
from kvpager.api.processes import Interruptions

try:
    with Interruptions() as interruptions:
        interruptions.run_apart(len, "x" * 4_000_000)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_what_the_work_returns_or_raises_comes_back() -> None:
    with Interruptions() as interruptions:
        assert interruptions.run_apart(len, "four") == 4
        with pytest.raises(ConfigError, match="sheep: must be an integer of at least 3, got 2"):
            interruptions.run_apart(expect_integer, "sheep", 2, 3)


def test_a_process_that_ends_without_a_word_is_told() -> None:
    with (
        Interruptions() as interruptions,
        pytest.raises(KVPagerError, match="the process of _exit ended without a word, exit code 7"),
    ):
        interruptions.run_apart(os._exit, 7)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_interrupt_and_are_put_off_where_that_is_asked_for(number: int) -> None:
    before = signal.getsignal(number)
    done = []
    with Interruptions() as interruptions:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)

        def work() -> None:
            with interruptions.put_off():
                os.kill(os.getpid(), number)
                done.append("to the end")

        with pytest.raises(KeyboardInterrupt):
            work()
    assert done == ["to the end"]
    assert signal.getsignal(number) == before


def to_one(process: int) -> None:
    os.kill(process, signal.SIGTERM)


def to_all(process: int) -> None:
    """As a terminal does for Ctrl-C."""
    os.killpg(process, signal.SIGINT)


@pytest.mark.parametrize("send", [to_one, to_all])
def test_an_interrupt_while_a_process_starts_ends_both_without_a_word(send: Callable[[int], Any]) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    child = await_child(parent.pid, "spawn_main")
    send(parent.pid)
    shown = parent.communicate(timeout=60)
    assert parent.returncode == 130
    assert shown == ("", "")
    assert not is_there(child)


# Works until somebody stops it.
ENDLESS = """
from kvpager.api.processes import Interruptions

with Interruptions() as interruptions:
    interruptions.run_apart(exec, "import signal; print('begun', flush=True); signal.pause()")
"""


def test_a_process_whose_parent_is_killed_ends_without_a_word() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "begun\n"
    parent.kill()
    # The pipes are closed when the last process that has them is gone.
    assert parent.communicate(timeout=60) == ("", "")
