"""Reads by a kernel in place: that every word of a region is read once, wherever it lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvpager.kernels.read_words import read_words
from kvpager.tiers.errors import KernelError
from kvpager.tiers.pinned import PinnedArena


@pytest.mark.parametrize("ctas", [1, 16])
@pytest.mark.parametrize("nbytes", [16, 4096, 65536 + 48, 1 << 20])
def test_every_word_of_host_memory_is_read_once(device: str, nbytes: int, ctas: int) -> None:
    with PinnedArena(4 << 20, device=None if device == "cpu" else device) as arena:
        arena.wait_ready()
        data = np.frombuffer(arena.view(0, nbytes), np.uint8)
        data[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        out = torch.zeros(1, dtype=torch.int32, device=device)
        read_words(arena.base, nbytes, out, ctas=ctas)
        expected = int(np.bitwise_xor.reduce(data.view(np.int32)))
        assert out.item() == expected
        read_words(arena.base, nbytes, out, ctas=ctas)
        assert out.item() == 0
        del data


@pytest.mark.parametrize(("address", "nbytes"), [(0, 16), (8, 16), (16, 0), (16, 24), (-16, 16)])
def test_a_region_that_is_none_is_refused(address: int, nbytes: int) -> None:
    with pytest.raises(KernelError, match="multiples of 16"):
        read_words(address, nbytes, torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("out", [torch.zeros(2, dtype=torch.int32), torch.zeros(1)])
def test_a_result_of_another_shape_or_type_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(KernelError, match=r"int32 \[1\]"):
        read_words(16, 16, out)
