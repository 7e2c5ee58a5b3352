"""Arrays of a step on their way to its device: together in one copy, which nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["upload"]

_WORD_BYTES: Final = 8


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Tensors of these arrays on a device, in stream order.

    To a GPU they go through one page-locked buffer in one copy. Torch's allocator of such buffers hands one
    out again only when the copy from it is over, so the arrays are the caller's again at once. On a CPU the
    tensors are the arrays themselves.

    Args:
        arrays: of numbers of 4 or 8 bytes, in any shape.
        device: ``cpu`` or ``cuda:N``.
    """
    arrays = [np.ascontiguousarray(array) for array in arrays]
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    # Each begins on 8 bytes, so that it can be viewed as what it is.
    words = [-(-array.nbytes // _WORD_BYTES) for array in arrays]
    staged = torch.empty(sum(words), dtype=torch.int64, pin_memory=True)
    flat = staged.numpy()
    first = 0
    for array, count in zip(arrays, words, strict=True):
        flat[first : first + count].view(array.dtype)[: array.size] = array.reshape(-1)
        first += count
    parts = torch.split(staged.to(device, non_blocking=True), words)
    return [
        part.view(torch.from_numpy(array).dtype)[: array.size].view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]
