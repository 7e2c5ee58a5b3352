"""Sixty-four clients at once on one sidecar, for long: what they read is right, and nothing stays."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kvpager.api.client import connect
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.host import HostStore
from kvpager.tests.crash_workers import name_of
from kvpager.tests.raw_client import LAYOUT, await_true
from kvpager.tests.redis_servers import free_port
from kvpager.tests.serve_process import ServeProcess
from kvpager.tests.soak_clients import PINNED, Crowd, Figures, chain_of, figures_of
from kvpager.tiers.arena_file import ArenaFile
from kvpager.tiers.cold_disk import DiskColdTier

MIB = 1 << 20
HOST = 8 * MIB
COLD = 16 * MIB
CROWDS = 4
LOCAL, REMOTE = 14, 2
"""Clients of a crowd, on the socket and over TCP."""
CLIENTS = CROWDS * (LOCAL + REMOTE)
TOKEN = "a token of a soak of clients"
PAUSE = 0.05
"""Seconds that a client rests between two operations, on average."""
WARM = 0.4
"""Of the time, after which a sidecar's own memory hardly grows."""


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def serving(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServeProcess]:
    monkeypatch.setenv("KVPAGER_TOKEN", TOKEN)
    options = f"--cold=disk://{tmp_path}/cold", f"--cold-bytes={COLD}", f"--listen=127.0.0.1:{port}"
    with ServeProcess(tmp_path / "socket", *options, host_bytes=HOST) as process:
        yield process


@pytest.mark.parametrize(
    ("seconds", "growth"),
    [
        # The threads of a sidecar take their memory in the first minute.
        pytest.param(60.0, 32 * MIB, id="a minute"),
        pytest.param(600.0, 8 * MIB, id="ten minutes", marks=[pytest.mark.full, pytest.mark.timeout(1200)]),
    ],
)
def test_sixty_four_clients_leave_nothing_behind(
    serving: ServeProcess,
    port: int,
    tmp_path: Path,
    seconds: float,
    growth: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert CLIENTS == 64
    rng = random.Random(seconds)
    records = Path(f"{serving.arena}.records")
    process = serving.running.pid
    urls = f"unix://{serving.path}", f"kvpager://127.0.0.1:{port}", TOKEN

    def crowd(seed: int) -> Crowd:
        return Crowd(*urls, seed, LOCAL, REMOTE, PAUSE)

    with connect(serving.path, timeout=20, strict=True) as client:
        space = client.space(LAYOUT)
        await_true(lambda: client.stats()["arena"]["ready_bytes"] == HOST)
        before = figures_of(process)
        crowds = [crowd(seed) for seed in range(CROWDS)]
        killed = 0
        done: Counter[str] = Counter()
        right, processor = 0, 0.0
        try:
            for one in crowds:
                one.await_all()
            await_true(lambda: client.stats()["sidecar"]["clients"] == 1 + CLIENTS)
            began = time.monotonic()
            next_kill = began + seconds / 4
            warm: tuple[Figures, int] | None = None
            while (now := time.monotonic()) < began + seconds:
                for one in crowds:
                    one.check()
                if warm is None and now > began + WARM * seconds:
                    warm = figures_of(process), records.stat().st_blocks
                if now > next_kill:
                    # All of its clients at once, in the midst of whatever they are at.
                    at = rng.randrange(CROWDS)
                    crowds[at].kill()
                    killed += 1
                    crowds[at] = crowd(CROWDS + killed)
                    crowds[at].await_all()
                    next_kill = now + max(seconds / 4, 3.0) * (0.5 + rng.random())
                time.sleep(0.1)
            for one in crowds:
                told = one.stop()
                assert told.lost == 0
                done += told.done
                right += told.right
                processor += told.processor
        finally:
            for one in crowds:
                if one.process.is_alive():
                    one.kill()
        assert warm is not None
        assert killed
        assert right > 100 * seconds**0.5
        wanted = {"store", "match", "load", "abort", "release", "pin", "evict", "purge", "break", "leave"}
        assert wanted <= {name for name, count in done.items() if count}

        # Nobody is left, and nothing is held.
        def left() -> dict[str, int]:
            counts = client.stats()["sidecar"]
            return {name: counts[name] for name in ("leased", "reserved", "groups", "clients")}

        await_true(lambda: left() == {"leased": 0, "reserved": 0, "groups": 1, "clients": 1})
        # Every slot can be had, once pins are ended, of which a block may have many.
        for chain in range(PINNED):
            while space.unpin(chain_of(chain)):
                pass

        def granted() -> bool:
            # What is not in use goes first: what nobody knows may not be worth its place.
            space.evict(space.capacity)
            asked = [name_of(2, 0, serial) for serial in range(space.capacity)]
            with space.reserve(asked, wait=5.0) as reservation:
                return bool((reservation.status == ReserveStatus.NEW).all())

        await_true(granted)
        after, record_blocks = figures_of(process), records.stat().st_blocks
        stats = client.stats()
    with capsys.disabled():
        print(
            f"\n64 clients for {seconds:.0f} s, {killed} times 16 of them killed: {done.total()} operations, "
            f"{right} blocks read and right, {processor:.1f} s of processor time; the sidecar: "
            f"{stats['sidecar']['requests']} requests, {after.processor:.1f} s, descriptors "
            f"{before.descriptors} -> {after.descriptors}, threads {before.threads} -> {after.threads}, "
            f"own memory {before.anonymous / MIB:.1f} MiB, {warm[0].anonymous / MIB:.1f} warm, "
            f"{after.anonymous / MIB:.1f} at the end, records {warm[1] // 2} -> {record_blocks // 2} KiB"
        )
    assert after.descriptors <= before.descriptors + 2
    assert after.anonymous <= warm[0].anonymous + growth
    assert (stats["host"]["damaged"], stats["sidecar"]["protocol_errors"]) == (0, 0)
    assert record_blocks <= 1.5 * warm[1]
    serving.kill()
    with HostStore(HOST, arena=ArenaFile(serving.arena, keep=True)) as host:
        host.check_integrity()
        assert host.stats.damaged == 0
    with closing(DiskColdTier(tmp_path / "cold", capacity_bytes=COLD)) as cold:
        cold.check_integrity()
