"""The cache that transformers calls: a `DynamicCache` that begins with what was kept of a prompt."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from ....tiers.errors import ConfigError
from .copying import KVTensors, Snapshot
from .identity import ModelIdentity, ModelState
from .keeper import Keeper
from .model_shape import ModelShape
from .rows import TokenRows

__all__ = ["KVPagerCache"]


class KVPagerLayer(DynamicLayer):
    """A layer's keys and values, [rows, heads, tokens, head_dim]: at first those that were kept."""

    def begin_with(self, tensors: KVTensors) -> None:
        """Have these."""
        self.keys, self.values = tensors
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of more tokens, and return all.

        Where each prompt has become several rows, as beam search makes of it, what was kept is repeated.
        """
        if self.is_initialized and self.keys.numel():
            rows, had = key_states.shape[0], self.keys.shape[0]
            if rows > had and rows % had == 0:
                self.batch_repeat_interleave(rows // had)
            if self.keys.device != key_states.device:
                self.keys = self.keys.to(key_states.device)
                self.values = self.values.to(key_states.device)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values


class KVPagerCache(DynamicCache):
    """A `DynamicCache` for one prompt, or several of one length. Made by `KVPager.cache`.

    What is computed into it is kept as its blocks fill, what is generated too. A cache may be used for
    several calls, cropped, reordered by beam search and copied as any other.

    Attributes:
        loaded: tokens of each row that were found and need not be computed.
    """

    def __init__(
        self,
        keeper: Keeper,
        shape: ModelShape,
        identity: ModelIdentity,
        state: ModelState,
        prompt: npt.NDArray[np.int32],
        rows: TokenRows,
        tensors: Sequence[KVTensors],
        owner: object,
    ) -> None:
        layers = [KVPagerLayer() for _ in shape.devices]
        # Past DynamicCache's own, whose arguments are other from release to release.
        super(DynamicCache, self).__init__(layers=layers)
        for layer, some in zip(layers, tensors, strict=False):
            layer.begin_with(some)
        self.loaded: int = rows.length
        self._keeper = keeper
        self._shape = shape
        self._identity = identity
        self._state = state
        self._prompt: npt.NDArray[np.int32] | None = prompt if self.loaded else None
        """Until it is known that the model goes on with it."""
        self._rows = rows
        self._offered = {name for names in rows.names() for name in names}
        """Names of blocks that are kept, or were to be."""
        self._offered_blocks = self.loaded // shape.layout.block_size
        self._owner = owner
        self._ours = True
        keeper.follow(self)

    def save(self) -> int:
        """Keep what is there now, and wait for it; also what was refused before.

        Nothing needs to be saved this way: it is done as blocks fill, when a cache is no longer used, and at
        the end of the process.

        Returns:
            how many tokens of each row have a name to be found by.
        """
        self._offered.clear()
        self.offer_rest()
        self._keeper.flush()
        names = self._rows.names()
        return min(map(len, names), default=0) * self._shape.layout.block_size

    # What transformers calls

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows become those of these indices, [rows]."""
        super().reorder_cache(beam_idx)
        self._rows.select(beam_idx.tolist())

    def crop(self, *args: int, **kwargs: int) -> None:
        """Leave tokens off at the end; what the argument means is other from release to release."""
        super().crop(*args, **kwargs)
        self._rows.crop(self.get_seq_length())
        self._prompt = None  # it may go on with something else
        self._offered_blocks = min(self._offered_blocks, self._rows.length // self._shape.layout.block_size)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows."""
        super().batch_repeat_interleave(repeats)
        self._rows.select([row for row in range(self._rows.rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Rows become those of these indices, or where a mask says so."""
        super().batch_select_indices(indices)
        self._rows.select(torch.arange(self._rows.rows)[indices.cpu()].tolist())

    def reset(self) -> None:
        """Have nothing."""
        super().reset()
        for layer in self.layers:
            layer.keys = layer.values = None
            layer.is_initialized = False
        self._rows.crop(0)
        self._offered_blocks, self._prompt = 0, None

    def __deepcopy__(self, memo: dict[int, Any]) -> KVPagerCache:
        other = object.__new__(type(self))
        memo[id(self)] = other
        shared = {"_keeper", "_shape", "_identity", "_state", "_prompt", "_owner"}
        for name, value in self.__dict__.items():
            if name == "_rows":
                other._rows = self._rows.copy()
            else:
                setattr(other, name, value if name in shared else copy.deepcopy(value, memo))
        self._keeper.follow(other)
        return other

    def __del__(self) -> None:
        if "_ours" in self.__dict__:
            self._offer(late=True)

    # What a model's hooks call

    def begins(self, tokens: torch.Tensor | None) -> int:
        """A forward pass begins with these tokens, int [rows, n].

        Returns:
            how many of them are here already. The first pass of assisted decoding is given a whole prompt.

        Raises:
            ConfigError: they are not of the prompt whose beginning was loaded, or the model is no longer
                the one that computed it.
        """
        if self._prompt is None:
            return 0
        if self._identity.state() != self._state:
            raise ConfigError(
                "cache",
                "has what the model as it was when the cache was made computed: since then its weights, "
                "adapters, configuration or autocast were changed; make another cache",
            )
        if tokens is None:
            return 0
        given, prompt = tokens.cpu().numpy(), self._prompt
        self._prompt = None
        if len(given) > len(prompt):
            prompt = np.repeat(prompt, len(given) // len(prompt), axis=0)
        if _agree(given, prompt[:, self.loaded :]):
            return 0
        if given.shape[1] >= prompt.shape[1] and _agree(given, prompt):
            return self.loaded
        raise ConfigError("input_ids", "are not those of the prompt that this cache was made for")

    def computed(self, tokens: torch.Tensor | None, mask: object, positions: object) -> None:
        """A forward pass is over. Tokens as of `begins`; None: they do not say what was computed."""
        count = self.get_seq_length() - self._rows.length
        if count <= 0:
            return
        whole = tokens is not None and tokens.shape[1] == count
        # An adapter that is switched for some tokens, or autocast: what they and those after them are is not
        # what the names say.
        ours = whole and self._identity.passing() == self._state.passing
        self._rows.note(tokens if ours else None, count, mask, positions)
        if self._rows.length // self._shape.layout.block_size > self._offered_blocks:
            self._offer()

    def offer_rest(self) -> None:
        """Have what is not kept yet kept: nothing may come any more."""
        self._keeper.wait_room()
        self._offer(late=True)

    def _offer(self, *, late: bool = False) -> None:
        """Have kept what is new, unless something is being kept just now; `late`: after that."""
        if not self._ours or self._keeper.closed or (self._keeper.busy and not late):
            return
        size = self._shape.layout.block_size
        if self._identity.passing() != self._state.passing:
            return  # what was computed meanwhile was noted as such, see `computed`
        if self._identity.state() != self._state:
            # What was changed since has computed none of it, or some.
            self._ours = False
            return
        wanted = []
        for row, names in enumerate(self._rows.names()):
            some = [at for at, name in enumerate(names) if name not in self._offered]
            self._offered.update(names[at] for at in some)
            if some:
                wanted.append((row, list(names), some))
        self._offered_blocks = self._rows.length // size
        if wanted and self._fits():
            layers = [(layer.keys, layer.values) for layer in self.layers]
            self._keeper.store(Snapshot(self._shape, layers), wanted)

    def _fits(self) -> bool:
        """Whether keys and values are as they are kept, see `model_shape`."""
        layout = self._shape.layout
        return all(
            layer.keys.dtype == layer.values.dtype == self._shape.dtype
            and layer.keys.shape[1::2] == layer.values.shape[1::2] == (layout.num_kv_heads, layout.head_dim)
            for layer in self.layers
        )


def _agree(given: npt.NDArray[Any], expected: npt.NDArray[np.int32]) -> bool:
    """Whether tokens are the same as far as both go, int [rows, n] each."""
    count = min(given.shape[1], expected.shape[1])
    return len(given) == len(expected) and bool((given[:, :count] == expected[:, :count]).all())
