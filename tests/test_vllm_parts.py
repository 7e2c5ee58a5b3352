"""Parts of the connector that need no vLLM: names, adapters, what is announced, how a model is laid out."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvpager.api.integrations.vllm.identity import _Adapters
from kvpager.api.integrations.vllm.naming import RequestNames

pytestmark = pytest.mark.timeout(60)

BLOCK = 16


class LongPrompt:
    """A request whose tokens after the first block are awaited."""

    mm_features: tuple[()] = ()

    def __init__(self) -> None:
        self.asked, self.come = threading.Event(), threading.Event()

    @property
    def all_token_ids(self) -> LongPrompt:
        return self

    def __getitem__(self, at: slice) -> list[int]:
        if at.start:
            self.asked.set()
            assert self.come.wait(30)
        return list(range(at.start, at.stop))


def test_names_that_are_known_are_had_while_a_thread_makes_others() -> None:
    prompt: Any = LongPrompt()
    names = RequestNames(prompt, BLOCK, bytes(16))
    first = names.first(1)
    others = threading.Thread(target=names.first, args=(9,))
    others.start()
    assert prompt.asked.wait(30)
    asker = threading.Thread(target=lambda: seen.extend(names.first(1)))
    seen: list[bytes] = []
    asker.start()
    asker.join(10)
    assert seen == first
    prompt.come.set()
    others.join()
    assert names.known == 9


@dataclass(frozen=True)
class Adapter:
    """vLLM's `LoRARequest`, which needs none of its environment."""

    lora_int_id: int
    lora_path: str
    load_inplace: bool = False
    lora_name: str = "mine"


def write_adapter(folder: Path, content: bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)


def test_an_adapter_that_is_newer_than_the_engine_is_not_shared_as_it_may_have_been_loaded_before(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "one")
    write_adapter(tmp_path / "one", b"a")
    time.sleep(0.05)  # the clock of files goes by steps

    def digest(adapters: _Adapters, *values: Any) -> bytes | None:
        adapter: Any = Adapter(*values)
        return adapters.digest(adapter)

    engines = [_Adapters(logging.getLogger("kvpager.test-adapters")) for _ in range(2)]
    first, second = (digest(engine, 1, path) for engine in engines)
    assert first is not None
    assert first == second
    # Loaded as it was, and written again before its first request, with any date.
    write_adapter(tmp_path / "one", b"b")
    os.utime(tmp_path / "one" / "adapter_model.safetensors", (1, 1))
    first, second = (digest(engine, 2, path) for engine in engines)
    assert first is not None
    assert second is not None
    assert first != second
    assert digest(engines[0], 2, path) == first
    # A request that has it loaded finds what others keep of these files, and an engine that starts now does.
    inplace = digest(engines[0], 3, path, True)
    time.sleep(0.05)
    assert inplace == digest(_Adapters(logging.getLogger("kvpager.test-adapters")), 1, path)
    # Renamed into its place.
    write_adapter(tmp_path / "other", b"c")
    time.sleep(0.05)
    engine = _Adapters(logging.getLogger("kvpager.test-adapters"))
    elsewhere = digest(engine, 1, str(tmp_path / "other"))
    time.sleep(0.05)
    (tmp_path / "other").rename(tmp_path / "third")
    assert digest(engine, 2, str(tmp_path / "third")) not in (None, elsewhere)


def test_an_adapter_whose_files_are_not_here_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = _Adapters(logging.getLogger("kvpager.test-adapters"))
    for path in (str(tmp_path / "nowhere"), "some-user/adapter-that-is-not-here"):
        caplog.clear()
        adapter: Any = Adapter(len(path), path)
        assert [adapters.digest(adapter) for _ in range(3)] == [None] * 3
        (said,) = caplog.records
        assert "nothing is found or kept of adapter mine" in said.getMessage()
