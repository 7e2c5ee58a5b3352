"""Folders of demos: what was killed leaves one, and the next demo removes that, and nothing else."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvpager.api.demo_folder import COLD, demo_folder, remove_abandoned
from kvpager.api.processes import Interruptions
from kvpager.tests.process_tree import await_child
from kvpager.tiers.cold_disk import DiskColdTier

SCRIPT = str(Path(sys.executable).with_name("kvpager"))
_HOLD = """
import sys, time
from kvpager.api.demo_folder import demo_folder
from kvpager.api.processes import Interruptions
with Interruptions() as interruptions, demo_folder(interruptions) as folder:
    print(folder, flush=True)
    time.sleep(100)
"""


@contextmanager
def holder(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has a folder of its own, as a demo does."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _HOLD],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(parent)},
    ) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def abandoned(parent: Path) -> Path:
    """The folder of a process that was killed."""
    with holder(parent) as (process, folder):
        process.kill()
        process.wait()
    assert folder.parent == parent
    assert folder.is_dir()
    return folder


def test_a_folder_goes_with_its_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Interruptions() as interruptions, demo_folder(interruptions) as folder:
        assert Path(folder).parent == tmp_path
        assert os.stat(folder).st_mode & 0o777 == 0o700
        Path(folder, "file").write_text("x")
        assert remove_abandoned() == []
        assert Path(folder, "file").exists()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_demo_that_was_killed_is_removed_and_that_of_one_that_lives_is_not(
    tmp_path: Path,
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    left = abandoned(tmp_path)
    (left / COLD / "ab").mkdir(parents=True)
    (left / COLD / "ab" / "record").write_text("x")
    (left / "link").symlink_to(outside)
    (left / COLD / "link").symlink_to(outside / "kept")
    with holder(tmp_path) as (_, alive):
        assert remove_abandoned(str(tmp_path)) == [str(left)]
        assert not left.exists()
        assert alive.is_dir()
        assert remove_abandoned(str(tmp_path)) == []
    assert (outside / "kept").read_text() == "x"


def test_a_removal_that_was_interrupted_is_completed_by_the_next(tmp_path: Path) -> None:
    left = abandoned(tmp_path)
    # The lock goes last, so what is left can be told for what it is.
    assert [path.name for path in left.iterdir()] == ["kvpager-demo.lock"]
    assert remove_abandoned(str(tmp_path)) == [str(left)]


def test_a_folder_whose_cold_tier_somebody_has_open_stays(tmp_path: Path) -> None:
    left = abandoned(tmp_path)
    tier = DiskColdTier(left / COLD, capacity_bytes=1 << 20)
    assert remove_abandoned(str(tmp_path)) == []
    tier.close()
    assert remove_abandoned(str(tmp_path)) == [str(left)]


def test_what_is_not_plainly_a_folder_of_a_demo_stays(tmp_path: Path) -> None:
    (tmp_path / "kvpager-demo-empty").mkdir(mode=0o700)
    (tmp_path / "kvpager-demo-file").write_text("x")
    (tmp_path / "kvpager-other").mkdir(mode=0o700)
    (tmp_path / "kvpager-other" / "kvpager-demo.lock").touch(0o600)
    (tmp_path / "kvpager-demo-link").symlink_to(tmp_path / "kvpager-other")
    for name, folder_mode, lock_mode in (("open", 0o755, 0o600), ("lock", 0o700, 0o666)):
        folder = tmp_path / f"kvpager-demo-{name}"
        folder.mkdir()
        (folder / "kvpager-demo.lock").touch()
        (folder / "kvpager-demo.lock").chmod(lock_mode)
        folder.chmod(folder_mode)
    linked = tmp_path / "kvpager-demo-linked"
    linked.mkdir(mode=0o700)
    (linked / "kvpager-demo.lock").symlink_to(tmp_path / "kvpager-other" / "kvpager-demo.lock")
    pipe = tmp_path / "kvpager-demo-pipe"
    pipe.mkdir(mode=0o700)
    os.mkfifo(pipe / "kvpager-demo.lock", 0o600)
    before = sorted(tmp_path.rglob("*"))
    assert remove_abandoned(str(tmp_path)) == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes files of other users")
def test_another_users_folder_stays_even_for_root(tmp_path: Path) -> None:
    theirs, lock = abandoned(tmp_path), abandoned(tmp_path)
    os.chown(theirs, 12345, 12345)
    os.chown(lock / "kvpager-demo.lock", 12345, 12345)
    assert remove_abandoned(str(tmp_path)) == []
    assert theirs.is_dir()
    assert lock.is_dir()


def test_a_demo_that_is_killed_ends_its_sidecar_and_the_next_one_removes_its_folders(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "300"}
    demo = subprocess.Popen(
        [SCRIPT, "demo", "--sidecar", "--sessions", "2", "--device", "cpu", "--model", "/no/model"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    sidecar = await_child(demo.pid, "serve", 60.0)
    serving = os.pidfd_open(sidecar)
    os.kill(demo.pid, signal.SIGKILL)
    demo.wait()
    left = set(map(str, tmp_path.glob("kvpager-demo-*")))
    assert len(left) == 2
    assert select.select([serving], [], [], 30.0)[0], "the sidecar goes on without its demo"
    os.close(serving)
    done = subprocess.run(
        [SCRIPT, "demo", "--model", "/no/model"], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    for folder in left:
        assert f"{folder}, which a demo that was killed had left, is removed." in done.stdout
    assert not list(tmp_path.glob("kvpager-demo-*"))
