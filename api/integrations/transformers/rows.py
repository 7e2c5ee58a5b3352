"""The tokens that a cache has keys and values of, row by row, and the names of their blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ....kvstore.hashing import hash_blocks

__all__ = ["TokenRows"]


class TokenRows:
    """Tokens of every row of a batch, all of one length, as far as they are known.

    What a forward pass was given is noted where it is, and looked at when names are asked for: a GPU is not
    waited for in between.

    Args:
        tokens: int32 [rows, n], which are there already.
        block_size: tokens of a block.
        root: of the chains.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], block_size: int, root: bytes) -> None:
        self._tokens = tokens
        self._block_size = block_size
        self._root = root
        self._names: list[list[bytes]] = [[] for _ in tokens]
        self._noted: list[_Noted] = []
        self.length = tokens.shape[1]
        """Of every row, those included that are only noted."""
        self.known = True
        """Whether all of them can be named."""

    @property
    def rows(self) -> int:
        """How many there are; 0 before anything is known of any."""
        return len(self._tokens)

    def note(
        self, tokens: torch.Tensor | None, count: int, mask: object = None, positions: object = None
    ) -> None:
        """A forward pass computed `count` more of every row.

        Args:
            tokens: int [rows, count]; None: they are not known.
            mask: the attention mask that it was given.
            positions: the position ids that it was given.
        """
        self._noted.append(_Noted(tokens, self.length, mask, positions))
        self.length += count

    def names(self) -> list[list[bytes]]:
        """Of the full blocks of every row, as far as they are known. Waits for what is noted."""
        self._read()
        size = self._block_size
        for row, names in zip(self._tokens, self._names, strict=True):
            parent = names[-1] if names else self._root
            names += hash_blocks(row[len(names) * size :], size, parent)
        return self._names

    def crop(self, length: int) -> None:
        """Only the first `length` are left."""
        self._read()
        if length <= self._tokens.shape[1]:
            self._tokens = self._tokens[:, :length]
            for names in self._names:
                del names[length // self._block_size :]
            self.known = True
        self.length = length

    def select(self, rows: Sequence[int]) -> None:
        """The rows are these from now on."""
        self._read()
        self._tokens = self._tokens[list(rows)]
        self._names = [list(self._names[at]) for at in rows]

    def _repeat(self, times: int) -> None:
        self._tokens = np.repeat(self._tokens, times, axis=0)
        self._names = [list(names) for names in self._names for _ in range(times)]

    def copy(self) -> TokenRows:
        """One that goes its own way."""
        self._read()
        other = TokenRows(self._tokens, self._block_size, self._root)
        other.length, other.known = self.length, self.known
        other._names = [list(names) for names in self._names]
        return other

    def _read(self) -> None:
        noted, self._noted = self._noted, []
        for one in noted:
            tokens = one.read() if self.known else None
            if tokens is None:
                self.known = False
                return
            if not self._tokens.shape[1]:
                self._tokens, self._names = tokens, [[] for _ in tokens]
            else:
                if len(tokens) > len(self._tokens):
                    # Each row of a prompt became several, one after the other, in the pass.
                    self._repeat(len(tokens) // len(self._tokens))
                self._tokens = np.concatenate([self._tokens, tokens], axis=1)


class _Noted:
    """What a forward pass was given of tokens that begin at `start`."""

    def __init__(self, tokens: torch.Tensor | None, start: int, mask: object, positions: object) -> None:
        self._tokens = tokens
        self._start = start
        self._mask = mask
        self._positions = positions

    def read(self) -> npt.NDArray[np.int32] | None:
        """The tokens, int32 [rows, n]; None where their keys and values are not those that tokens name."""
        if self._tokens is None:
            return None
        end = self._start + self._tokens.shape[1]
        if self._mask is not None:
            mask = self._mask
            if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not bool((mask[:, :end] == 1).all()):
                return None
        if self._positions is not None:
            positions = self._positions
            if not isinstance(positions, torch.Tensor) or positions.ndim != 2:
                return None
            if not bool((positions == torch.arange(self._start, end, device=positions.device)).all()):
                return None
        return np.ascontiguousarray(self._tokens.cpu().numpy().astype(np.int32))
