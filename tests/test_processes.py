"""Processes of a command: results and errors come back, and an interrupt leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvpager.api import processes
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


def test_a_process_that_is_gone_before_it_has_its_work_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_do_work", os._exit)
    with (
        Interruptions() as interruptions,
        pytest.raises(KVPagerError, match="the process of len ended without a word, exit code 1"),
    ):
        # More than a pipe holds. A connection is no exit code, so the process complains and ends.
        interruptions.run_all_apart(len, [("x" * 4_000_000,), ("y" * 4_000_000,)])


def test_nothing_is_imported_from_the_current_folder(tmp_path: Path) -> None:
    # What a process imports before it has its parent's path, and after.
    for module in ("pickle", "re", "numpy"):
        (tmp_path / f"{module}.py").write_text("import nothing_of_the_kind")
    # As a command is that lies in another folder, whose path alone it has.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "command.py").write_text(
        "import sys\nfrom kvpager.api.cli import main\n"
        "if __name__ == '__main__':\n    sys.exit(main(sys.argv[1:]))\n"
    )
    unsafe = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    simulate = [
        *("simulate", "--generate", "chats", "--sessions", "300", "--jobs", "2"),
        *("--policy", "lru", "--beside", "LRU", "--blocks", "9"),
    ]
    done = subprocess.run(
        [sys.executable, tmp_path / "bin" / "command.py", *simulate],
        cwd=tmp_path,
        env=unsafe,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "host memory: 9 blocks" in done.stdout


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
