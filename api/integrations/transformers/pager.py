"""What a user of transformers makes: `KVPager`, which gives caches for prompts."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from types import TracebackType
from typing import Any, Final

import numpy as np
import torch

from ....kvstore.calls import HostCalls
from ....kvstore.hashing import ChainIdentity, hash_blocks
from ....tiers.errors import ClosedError, ConfigError
from ....tiers.settings import expect_integer, expect_seconds, expect_text
from .cache import KVPagerCache
from .homes import GivenHome, Home, SidecarHome, folder_home
from .identity import ModelIdentity
from .keeper import Keeper, PagerStats
from .model_shape import decoder_of, shape_of, unwrapped
from .rows import TokenRows

__all__ = ["KVPager", "PagerStats"]

_log = logging.getLogger("kvpager")

_ANSWER_SECONDS: Final = 1.0
"""That a sidecar may take to answer."""
_KNOWN: Final = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position"})
"""What a decoder may be given in tensors where token ids name its KV."""

_BY_ROW: Final = ("adapter_names", "alora_offsets")
"""What hooks of peft's layers are given where rows are not computed alike."""


class KVPager:
    """Keeps what a model computes of prompts, and gives it back to later calls, also of other processes.

        pager = KVPager(model)
        model.generate(**inputs, past_key_values=pager.cache(**inputs))

    It is kept in a sidecar (``kvpager serve``), the default; in `folder`, by this process alone; or in a
    `store`. Without the sidecar, or where it goes away, everything is computed, which is said once. A context
    manager; it ends by itself with the process, or when nobody has it or its caches any more.

    Args:
        model: a decoder of transformers, or of peft around one, whose layers all have full attention.
        url: of a sidecar of this machine, ``unix:///path``; empty: where ``kvpager serve`` listens by itself.
        folder: where blocks are on disk; one process at a time has it.
        store: a `HostStore` or a connection (`kvpager.connect`), which stays its owner's.
        host_bytes: of memory for blocks on their way to and from `folder`.
        disk_bytes: that blocks in `folder` may take.
        block_size: tokens of a block.
        salt: KV is shared only between pagers of the same salt.
        tenant: whose the blocks are, in a sidecar: quotas go by it.
        load_seconds: how long a prompt waits at most for its KV to come up from a disk or a Redis.

    Raises:
        LayoutError: the model's KV cannot be kept, and why.
        ConfigError: an argument is of a wrong type or out of range, or the folder is another process's.
        MemoryUnavailableError: the machine does not have `host_bytes`.
    """

    def __init__(
        self,
        model: Any,
        *,
        url: str = "",
        folder: str | os.PathLike[str] | None = None,
        store: HostCalls | None = None,
        host_bytes: int = 1 << 30,
        disk_bytes: int = 32 << 30,
        block_size: int = 16,
        salt: str = "",
        tenant: str = "",
        load_seconds: float = 10.0,
    ) -> None:
        expect_text("url", url, empty=True)
        if bool(url) + (folder is not None) + (store is not None) > 1:
            raise ConfigError("url", "and folder and store exclude each other: blocks are kept in one place")
        self._block_size = expect_integer("block_size", block_size, 1)
        self._salt = expect_text("salt", salt, empty=True).encode()
        self._load_seconds = seconds = expect_seconds("load_seconds", load_seconds)
        self._model = unwrapped(model)
        self._shape = shape_of(self._model, self._block_size)
        self._identity = ModelIdentity(self._model, self._shape.devices[0].type)
        decoder = decoder_of(self._model)
        Keeper.wait_abandoned()
        if store is not None:
            home: Home = GivenHome(store)
        elif folder is not None:
            home = folder_home(folder, host_bytes, disk_bytes)
        else:
            home = SidecarHome(url, expect_text("tenant", tenant, empty=True), _ANSWER_SECONDS, _log)
        self._keeper = Keeper(home, self._shape, seconds, _log)
        hooks: list[Any] = []
        self._end = weakref.finalize(self, _abandon, hooks, self._keeper)
        self._hooks = hooks
        try:
            watch = _Watch(self._keeper, self._model)
            hooks.append(decoder.register_forward_pre_hook(watch.before, with_kwargs=True))
            hooks.append(decoder.register_forward_hook(watch.after, with_kwargs=True))
            # Threads of pools, which keeping to disk takes, end before functions of `atexit` are called.
            threading._register_atexit(_close_at_exit, weakref.ref(self._keeper))  # type: ignore[attr-defined]
            home.space(self._shape.layout)
        except BaseException:
            self.close()
            raise

    def cache(
        self, input_ids: Any, attention_mask: Any = None, inputs_embeds: Any = None, **others: Any
    ) -> KVPagerCache:
        """A cache for a prompt, with what was kept of it: for a call of ``generate``, or several that go on.

        The last token of a prompt is always left to be computed.

        Args:
            input_ids: int [rows, n], the prompt, or several of one length: what ``generate`` is then given.
            attention_mask: int [rows, n], ones.
            inputs_embeds: none.
            others: what a tokenizer gives beside these, and does not matter here.

        Raises:
            ConfigError: `input_ids` are no token ids, or prompts of different lengths.
            LayoutError: the model's weights cannot be digested.
            ClosedError: the pager was closed.
        """
        if self._keeper.closed:
            raise ClosedError("the pager was closed")
        if inputs_embeds is not None:
            raise ConfigError("inputs_embeds", "cannot be kept: token ids name what is kept")
        prompt = _as_rows(input_ids)
        if attention_mask is not None and not bool((torch.as_tensor(attention_mask) == 1).all()):
            raise ConfigError(
                "attention_mask",
                "has zeros: prompts that are padded to one length are not kept; give them one by one, or "
                "those of one length together",
            )
        # Caches that nobody has any more are kept from wherever they went; here it can be waited for that.
        self._keeper.wait_room(self._load_seconds)
        state = self._identity.state()
        root = ChainIdentity(self._identity.digest(state), salt=self._salt).root
        usable = max(prompt.shape[1] - 1, 0)
        size = self._block_size
        chains = [hash_blocks(row[:usable], size, root) for row in prompt]
        tensors, blocks = self._keeper.load(chains, prompt.shape[1])
        rows = TokenRows(prompt[:, : blocks * size], size, root)
        # It has the pager, whose hooks tell it what is computed.
        return KVPagerCache(self._keeper, self._shape, self._identity, state, prompt, rows, tensors, self)

    @property
    def stats(self) -> PagerStats:
        """What was done so far."""
        return self._keeper.stats

    def flush(self) -> None:
        """Have what caches have kept, and wait for it."""
        self._keeper.offer_all()
        self._keeper.flush()

    def weights_changed(self) -> None:
        """Weights were written to through ``.data``, of which torch takes no note: digest them again."""
        self._identity.forget()

    def close(self) -> None:
        """Keep what caches have, then end. Idempotent. Caches go on, and are kept no more."""
        self._end.detach()
        _close(self._hooks, self._keeper)

    def __enter__(self) -> KVPager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(hooks: list[Any], keeper: Keeper) -> None:
    try:
        keeper.close()
    finally:
        for hook in hooks:
            hook.remove()


def _close_at_exit(keeper: weakref.ref[Keeper]) -> None:
    one = keeper()
    if one is not None:
        one.close()


def _abandon(hooks: list[Any], keeper: Keeper) -> None:
    """What the garbage collector may call, in any thread: it waits for nothing."""
    try:
        keeper.abandon()
    finally:
        for hook in hooks:
            hook.remove()


class _Watch:
    """A decoder's hooks: they tell the caches of one pager what was computed into them."""

    def __init__(self, keeper: Keeper, model: Any) -> None:
        self._keeper = keeper
        self._model = weakref.ref(model)

    def before(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What the decoder is given instead, see `KVPagerCache.begins`; None: what it was given."""
        cache, tokens = self._cache(args, kwargs), _given(args, kwargs)
        skipped = 0 if cache is None else cache.begins(tokens)
        if tokens is None or not skipped:
            return None
        changed = {**kwargs, "input_ids": tokens[:, skipped:]}
        for name in ("position_ids", "cache_position"):
            if isinstance(kwargs.get(name), torch.Tensor):
                changed[name] = kwargs[name][..., skipped:]
        return args[1:], changed

    def after(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: object,
    ) -> None:
        """See `KVPagerCache.computed`."""
        cache = self._cache(args, kwargs)
        if cache is None:
            return
        others = any(isinstance(value, torch.Tensor) for name, value in kwargs.items() if name not in _KNOWN)
        named = not others and len(args) <= 1 and not module.training and not self._chosen_by_row()
        tokens = _given(args, kwargs) if named else None
        cache.computed(tokens, kwargs.get("attention_mask"), kwargs.get("position_ids"))

    def _cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KVPagerCache | None:
        for value in (*kwargs.values(), *args):
            if isinstance(value, KVPagerCache) and value._keeper is self._keeper:
                return value
        return None

    def _chosen_by_row(self) -> bool:
        """Whether peft computes rows or parts of them each in its own way (``adapter_names``, aLoRA)."""
        model = self._model()
        if model is None or not hasattr(model, "peft_config"):
            return False
        # It tells its layers by hooks, for as long as a call lasts.
        return any(
            name in _BY_ROW and any(one is not None for one in chosen or ())
            for module in model.modules()
            if hasattr(module, "active_adapters")
            for hook in module._forward_pre_hooks.values()
            for name, chosen in getattr(hook, "keywords", {}).items()
        )


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The token ids that a decoder is given, int [rows, n]."""
    given = kwargs.get("input_ids", args[0] if args else None)
    return given if isinstance(given, torch.Tensor) and given.ndim == 2 else None


def _as_rows(input_ids: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    try:
        given = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError("input_ids", f"must be token ids, all prompts of one length: {error}") from error
    if given.ndim == 1:
        given = given[None]
    if given.ndim != 2 or not given.numel() or given.is_floating_point() or given.is_complex():
        raise ConfigError("input_ids", f"must be int [rows, n], got {given.dtype} {list(given.shape)}")
    info = np.iinfo(np.int32)
    if int(given.min()) < info.min or int(given.max()) > info.max:
        raise ConfigError("input_ids", "must fit 32 bits")
    return np.ascontiguousarray(given.cpu().numpy().astype(np.int32))
