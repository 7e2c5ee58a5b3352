"""The Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM) over paged KV.

One forward pass takes the tokens of many sequences in one row: first those that decode, one token each,
then the chunks of those that prefill. Each layer writes the keys and values of all of them to their blocks
and then attends to the blocks, so nothing but the store's blocks carries state from step to step.

The architecture: Touvron et al., LLaMA (arXiv:2302.13971); rotary positions: Su et al., RoFormer
(arXiv:2104.09864), halves rotated as in the published checkpoints; grouped queries: Ainslie et al.
(arXiv:2305.13245); sliding windows: Jiang et al., Mistral 7B (arXiv:2310.06825).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from ..kernels import (
    AttentionPlan,
    DecodePlan,
    PrefillPlan,
    WritePlan,
    decode_attention,
    decode_plan,
    prefill_attention,
    prefill_plan,
    write_kv,
    write_plan,
)
from ..tiers.layout import KVLayout

__all__ = ["CausalLM", "ForwardBatch", "ModelConfig"]

_MOST_GROUP: Final = 16
"""Query heads of a KV head up to which the kernel of decoding answers, and not the reference."""


@dataclass(frozen=True)
class ModelConfig:
    """What a model of the family is made of.

    Attributes:
        family: ``llama``, ``mistral``, ``qwen2`` or ``qwen3``.
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: sizes.
        norm_eps: what RMS norms add to the mean square.
        qkv_bias, output_bias, mlp_bias: which linear layers have a bias.
        qk_norm: whether each head of queries and keys is normalised before it is rotated.
        tied_embeddings: whether the output matrix is the embedding.
        windows: each layer's sliding window in tokens, None for full attention.
        inv_freq: [head_dim / 2] radians a position turns each pair of elements by.
        rope_factor: what rotated queries and keys are multiplied by.
        max_positions: tokens a sequence may have.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    inv_freq: tuple[float, ...]
    rope_factor: float
    max_positions: int


@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one step, and where their KV goes and is.

    Attributes:
        tokens: int32 or int64 [tokens], ids: first one of each decoding sequence, then the prefill chunks.
        positions: int64 [tokens], each token's position in its sequence.
        addresses: int64 [tokens], the address of the block that each token's KV is written to.
        offsets: int64 [tokens], its row in that block.
        num_decode: how many of the tokens decode.
        decode_table: int64 [num_decode, max_blocks] of block addresses.
        decode_lens: int32 [num_decode], tokens of each sequence, this step's included.
        prefill_table: int64 [prefills, max_blocks] of block addresses.
        prefill_lens: int32 [prefills], tokens of each sequence, this step's chunk included.
        cu_seqlens_q: int32 [prefills + 1], where each chunk begins, counted from token `num_decode`.
        logits_at: int64 [samples], indices of the tokens whose logits are wanted; may be empty. None: all.
        decode_install: int64, shape of `decode_table`, where the blocks whose words are tagged *install* are
            copied to as they are read; None where no word is.
        prefill_install: the same, shape of `prefill_table`.
        prefill_far: False where no word of `prefill_table` is of a block in host memory.
        decode_alone: whether no two tokens that decode are of one sequence. Where some are, each is in its
            own row of `decode_table`, with the length that ends at it.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    addresses: torch.Tensor
    offsets: torch.Tensor
    num_decode: int
    decode_table: torch.Tensor
    decode_lens: torch.Tensor
    prefill_table: torch.Tensor
    prefill_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    logits_at: torch.Tensor | None
    decode_install: torch.Tensor | None = None
    prefill_install: torch.Tensor | None = None
    prefill_far: bool = True
    decode_alone: bool = True


@dataclass(frozen=True)
class _Step:
    """What all layers of one step share.

    Attributes:
        cos, sin: [tokens, 1, head_dim / 2] in the model's dtype.
        write, decode, prefill: plans of the kernels; None where there is nothing to attend.
    """

    batch: ForwardBatch
    layout: KVLayout
    cos: torch.Tensor
    sin: torch.Tensor
    write: WritePlan
    decode: AttentionPlan | DecodePlan | None
    prefill: AttentionPlan | PrefillPlan | None


class _RMSNorm(nn.Module):
    """Root mean square norm over the last dimension; the weight may span further dimensions."""

    def __init__(self, shape: tuple[int, ...], eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.ndim == 1:
            return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        normed: torch.Tensor = self.weight * functional.rms_norm(x, x.shape[-1:], eps=self.eps)
        return normed


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` [..., head_dim] with its halves rotated: in four launches, which a small step counts."""
    one, two = x.chunk(2, -1)
    rotated = x.new_empty(x.shape)
    first, second = rotated.chunk(2, -1)
    torch.mul(one, cos, out=first).addcmul_(two, sin, value=-1)
    torch.mul(two, cos, out=second).addcmul_(one, sin)
    return rotated


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = config.windows[layer]
        self.heads = config.num_heads
        self.kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.output = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=config.output_bias)
        # One weight row for each query head and then each key head, so that one call norms them all.
        shape = (self.heads + self.kv_heads, self.head_dim)
        self.head_norm = _RMSNorm(shape, config.norm_eps) if config.qk_norm else None

    def forward(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        batch, layout = step.batch, step.layout
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        turned = qkv[:, : self.heads + self.kv_heads]
        if self.head_norm is not None:
            turned = self.head_norm(turned)
        turned = _rotated(turned, step.cos, step.sin)
        kv_dtype = getattr(torch, layout.dtype)
        turned, v = turned.to(kv_dtype), qkv[:, self.heads + self.kv_heads :].to(kv_dtype)
        q, k = turned[:, : self.heads], turned[:, self.heads :]
        write_kv(k, v, batch.addresses, batch.offsets, self.layer, layout, plan=step.write)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decodes = batch.num_decode
        if step.decode is not None:
            decode_attention(
                q[:decodes],
                batch.decode_table,
                batch.decode_lens,
                self.layer,
                layout,
                window=self.window,
                install=batch.decode_install,
                plan=step.decode,
                out=out[:decodes],
            )
        if step.prefill is not None:
            prefill_attention(
                q[decodes:],
                batch.cu_seqlens_q,
                batch.prefill_table,
                batch.prefill_lens,
                self.layer,
                layout,
                window=self.window,
                install=batch.prefill_install,
                plan=step.prefill,
                out=out[decodes:],
            )
        projected: torch.Tensor = self.output(out.to(x.dtype).view(x.shape[0], -1))
        return projected


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = _RMSNorm((config.hidden_size,), config.norm_eps)
        self.attention = _Attention(config, layer)
        self.mlp_norm = _RMSNorm((config.hidden_size,), config.norm_eps)
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), step)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        added: torch.Tensor = x + self.down(functional.silu(gate) * up)
        return added


class CausalLM(nn.Module):
    """A decoder-only model whose KV lies in blocks.

    Parameters are made without values; `load_model` fills them from a checkpoint.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, layer) for layer in range(config.num_layers))
        self.norm = _RMSNorm((config.hidden_size,), config.norm_eps)
        self.head = (
            None if config.tied_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self._inv_freq: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.weight.device

    def kv_layout(self, block_size: int = 16, dtype: str | None = None) -> KVLayout:
        """The layout of this model's blocks; `dtype` None keeps KV as the model computes it.

        Raises:
            ConfigError: the block size or dtype is not one that a layout can have.
        """
        return KVLayout(
            self.config.num_layers,
            self.config.num_kv_heads,
            self.config.head_dim,
            block_size,
            dtype or str(self.dtype).removeprefix("torch."),
        )

    def kernels_for(self, layout: KVLayout) -> tuple[str, ...]:
        """Which attention over blocks of this layout runs on kernels where the model is.

        Returns:
            of ``decode`` and ``prefill`` those that do; the reference in plain torch computes the others.
        """
        device = self.device
        table = torch.empty((0, 1), dtype=torch.int64, device=device)
        lengths = torch.empty(0, dtype=torch.int32, device=device)
        none = torch.zeros(1, dtype=torch.int32, device=device)
        found = []
        # Steps ask for their plans in the same way.
        if self.config.num_heads <= _MOST_GROUP * self.config.num_kv_heads and isinstance(
            decode_plan(table, lengths, layout), DecodePlan
        ):
            found.append("decode")
        if isinstance(prefill_plan(none, table, lengths, layout), PrefillPlan):
            found.append("prefill")
        return tuple(found)

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, layout: KVLayout, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one step: write the KV of all its tokens, return the logits that are wanted.

        Args:
            out: where they are written, float32 [samples, vocab_size]; None for a new tensor.

        Returns:
            float32 [samples, vocab_size].

        Raises:
            KernelError: a table, address or length does not fit the layout or the batch.
        """
        step = self._step(batch, layout)
        x = self.embedding(batch.tokens)
        for layer in self.layers:
            x = layer(x, step)
        x = self.norm(x if batch.logits_at is None else x[batch.logits_at])
        weight = self.embedding.weight if self.head is None else self.head.weight
        logits = functional.linear(x, weight)
        return logits.float() if out is None else out.copy_(logits)

    def _frequencies(self) -> torch.Tensor:
        """The model's `inv_freq` on its device: a step that copied them there would wait for it."""
        if self._inv_freq is None or self._inv_freq.device != self.device:
            self._inv_freq = torch.tensor(self.config.inv_freq, dtype=torch.float32, device=self.device)
        return self._inv_freq

    def _step(self, batch: ForwardBatch, layout: KVLayout) -> _Step:
        angles = (batch.positions[:, None].float() * self._frequencies())[:, None]
        factor = self.config.rope_factor
        decode = prefill = None
        if batch.num_decode:
            decode = decode_plan(batch.decode_table, batch.decode_lens, layout, early=batch.decode_alone)
        if batch.num_decode < batch.tokens.shape[0]:
            prefill = prefill_plan(
                batch.cu_seqlens_q, batch.prefill_table, batch.prefill_lens, layout, far=batch.prefill_far
            )
        return _Step(
            batch,
            layout,
            (angles.cos() * factor).to(self.dtype),
            (angles.sin() * factor).to(self.dtype),
            write_plan(batch.addresses, batch.offsets, layout),
            decode,
            prefill,
        )
