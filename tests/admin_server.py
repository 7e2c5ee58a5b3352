"""A real ``kvpager serve`` with its admin process, and who asks it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import numpy as np
from kvpager.api.admin.discovery import find_admin, place_file
from kvpager.api.client import Connection, connect
from kvpager.kvstore.hashing import ChainIdentity, hash_blocks
from kvpager.kvstore.lineage import Lineage
from kvpager.tests.raw_client import LAYOUT
from kvpager.tests.serve_process import ServeProcess
from kvpager.tiers.errors import ServiceUnavailableError

__all__ = ["ROOT", "AdminServer", "blocks_of", "prompt", "store_prompt"]

ROOT = ChainIdentity(b"a model").root
_START_SECONDS = 60.0


class AdminServer:
    """A sidecar with its admin process, until the end of a ``with``.

    Attributes:
        serve: the sidecar.
        url: of the admin process.
        tokens: by role.
    """

    def __init__(self, path: Path, *options: str, host_bytes: int = 8 << 20) -> None:
        self.serve = ServeProcess(path, "--admin=127.0.0.1:0", *options, host_bytes=host_bytes)
        self.path = path
        self.url = ""
        self.tokens: dict[str, str] = {}
        self._client = httpx.Client(timeout=30)

    def await_admin(self, other_than: str = "") -> None:
        """Wait until the admin process serves, on another URL than this."""
        until = time.monotonic() + _START_SECONDS
        while True:
            assert time.monotonic() < until, "the admin process does not serve"
            try:
                place = find_admin(str(self.path))
                if place.url != other_than and httpx.get(f"{place.url}/readyz").status_code == 200:
                    break
            except (ServiceUnavailableError, httpx.TransportError):
                pass
            time.sleep(0.02)
        self._client.close()  # connections to another one are of no use
        self._client = httpx.Client(timeout=30)
        self.url = place.url
        lines = Path(place.token_file).read_text().split()
        self.tokens = dict(line.split(":", 1) for line in lines)

    def ask(self, method: str, path: str, role: str | None = None, **more: Any) -> httpx.Response:
        """Ask it, with the token of a role or none."""
        headers = {"Cache-Control": "no-cache", **more.pop("headers", {})}
        if role is not None:
            headers["Authorization"] = f"Bearer {self.tokens[role]}"
        return self._client.request(method, f"{self.url}{path}", headers=headers, **more)

    def get(self, path: str, **more: Any) -> Any:
        """What a GET says."""
        answer = self.ask("GET", path, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def operate(self, method: str, path: str, body: object = None) -> Any:
        """What is said to a change."""
        answer = self.ask(method, path, "operate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def admin_pid(self) -> int:
        """The admin process."""
        (pid,) = [
            int(one)
            for one in Path(f"/proc/{self.serve.running.pid}/task/{self.serve.running.pid}/children")
            .read_text()
            .split()
        ]
        return pid

    def kill_admin(self) -> None:
        """It ends without a word."""
        os.kill(self.admin_pid, signal.SIGKILL)

    @contextmanager
    def client(self, **options: Any) -> Iterator[Connection]:
        """An engine's connection."""
        with connect(str(self.path), timeout=20, strict=True, **options) as made:
            yield made

    def __enter__(self) -> AdminServer:
        self.serve.start()
        self.await_admin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self.serve.terminate()
        self.serve.__exit__(kind, error, trace)
        assert not Path(place_file(str(self.path))).exists()


def prompt(number: int, blocks: int, shared: int = 0) -> list[int]:
    """Token ids of a prompt of so many blocks, of which the first ones are every prompt's."""
    size = LAYOUT.block_size
    own = range(number * 100_000, number * 100_000 + size * (blocks - shared))
    return [*range(size * shared), *own]


def store_prompt(client: Connection, tokens: list[int], *, tenant: str = "", shard: str = "") -> list[bytes]:
    """Have the blocks of a prompt in host memory; returns their hashes."""
    space = client.space(LAYOUT, tenant=tenant, shard=shard)
    hashes = hash_blocks(tokens, LAYOUT.block_size, ROOT)
    kept = space.put(hashes, blocks_of(len(hashes)), wait=5.0, lineage=Lineage.of_chain(hashes))
    assert kept == len(hashes)
    return hashes


def blocks_of(count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """So many blocks."""
    return np.zeros((count, LAYOUT.block_bytes), dtype=np.uint8)


def read_json(path: Path) -> Any:
    """What a file says."""
    return json.loads(path.read_text())
