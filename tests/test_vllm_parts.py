"""Parts of the connector that need no vLLM: names, adapters, what is announced, how a model is laid out."""

from __future__ import annotations

import threading
from typing import Any

import pytest
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
