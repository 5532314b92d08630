"""Attention over the block-paged cache, registered as one of transformers' attention implementations.

Models are transformers' own; all that Plimsoll changes in them is the function their attention layers call.
That function writes the step's keys and values into blocks and attends through block tables. It sees one
packed batch: `T` tokens of `S` sequences, one after the other, of any lengths.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from model_runner.core.block_layout import BlockLayout

IMPLEMENTATION = "plimsoll_paged"
LAYER_ATTRIBUTE = "plimsoll_layer"
# Scores held at once by the paths that materialise them, in elements.
_MAX_SCORES = 1 << 24
# Keys (and as many values) copied out of the cache at once for decodes, in elements. All are padded to the
# longest, so one long sequence would make hundreds of short ones as large as itself.
_MAX_GATHERED = 1 << 24


@dataclass(frozen=True, slots=True)
class Reads:
    """Some of a step's query tokens, and which of the cache they see. The same for all layers of a group."""

    rows: Tensor  # [B, R] int64: packed rows of R consecutive tokens of B sequences
    blocks: Tensor  # [B, N] int32
    visible: Tensor  # [B, R, N · block_size] bool


@dataclass(slots=True)
class AttentionMetadata:
    """Where the packed tokens of one step belong. Integer tensors, on the model's device."""

    query_start_loc: Tensor  # [S + 1] int32: sequence s owns the packed rows [s] … [s + 1] - 1
    seq_lens: Tensor  # [S] int32: tokens in the cache after this step's are written
    block_tables: (
        Tensor  # [groups, S, max_blocks] int32, freed and padding entries are 0 (and never attended to)
    )
    slot_mapping: Tensor  # [groups, T] int64: block · block_size + offset of each token
    # The same facts, sorted: the sequences that run several tokens, and those that run exactly one.
    prefills: list[tuple[int, int, int, int]]  # (sequence, first row, rows, tokens in the cache)
    decode_sequences: Tensor  # [D] int64
    decode_rows: Tensor  # [D] int64
    max_decode_len: int  # the longest of the decodes' seq_lens, 0 when there are none
    _plans: dict[tuple[int, int | None], list[Reads]] = field(default_factory=dict)

    def plan(self, group: int, window: int | None, block_size: int, max_blocks: int) -> list[Reads]:
        """Made for a group's first layer, and read by all others."""
        key = group, window
        if key not in self._plans:
            self._plans[key] = _plan_reads(self, group, window, block_size, max_blocks)
        return self._plans[key]


class PagedAttention(Protocol):
    """Writes this step's keys and values, then attends. Implementations are interchangeable to rounding."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        group: int,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """query [T, Hq, D]; key, value [T, Hkv, D]; caches [blocks, Hkv, block_size, D] (strided views).

        `window` counts the tokens attended to, the query's own included; `sinks` [Hq] are logits that take
        part in the softmax and carry no value. Returns [T, Hq, D] in the query's dtype.
        """


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store key and value [T, Hkv, D] at `slots` [T] of the caches [blocks, Hkv, block_size, D]."""
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key
    value_cache[blocks, :, offsets] = value


def torch_paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    group: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The reference PagedAttention, in plain torch, for any device. Decodes are batched."""
    write_kv(key, value, key_cache, value_cache, metadata.slot_mapping[group])
    output = torch.empty_like(query)
    block_size = key_cache.shape[2]
    plans = metadata.plan(group, window, block_size, max(1, _MAX_GATHERED // key_cache[0].numel()))
    for plan in plans:
        keys, values = _gather(key_cache, plan.blocks), _gather(value_cache, plan.blocks)
        attended = _softmax_attention(query[plan.rows], keys, values, plan.visible, scale, softcap, sinks)
        output[plan.rows] = attended
    return output


def _plan_reads(
    metadata: AttentionMetadata, group: int, window: int | None, block_size: int, max_blocks: int
) -> list[Reads]:
    """How to read the cache for all of a step's tokens: decodes together, each prefill by itself.

    At most `max_blocks` blocks are gathered at once, as far as single sequences allow.
    """
    tables, device = metadata.block_tables[group], metadata.seq_lens.device

    def reads(rows: Tensor, sequences: Tensor, last: Tensor, longest: int) -> Reads:
        """rows [B, R]: R consecutive tokens of B sequences, the last at position `last` [B]."""
        first_block, num_blocks = _visible_blocks(last, rows.shape[1], longest, window, block_size)
        columns = first_block[:, None] + torch.arange(num_blocks, device=device)
        blocks = tables[sequences[:, None], columns.clamp(max=tables.shape[1] - 1)]
        key_positions = first_block[:, None] * block_size + torch.arange(
            num_blocks * block_size, device=device
        )
        query_positions = last[:, None] + torch.arange(1 - rows.shape[1], 1, device=device)
        distance = query_positions[:, :, None] - key_positions[:, None, :]
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return Reads(rows, blocks, visible)

    plans = []
    if metadata.max_decode_len:
        last = metadata.seq_lens[metadata.decode_sequences].long() - 1
        _, count = _visible_blocks(last, 1, metadata.max_decode_len, window, block_size)
        step = max(1, max_blocks // count)
        for start in range(0, len(last), step):
            some = slice(start, start + step)
            rows, sequences = metadata.decode_rows[some, None], metadata.decode_sequences[some]
            plans.append(reads(rows, sequences, last[some], metadata.max_decode_len))
    for sequence, row, length, cached in metadata.prefills:
        rows = torch.arange(row, row + length, device=device)[None]
        one = torch.tensor([sequence], device=device), torch.tensor([cached - 1], device=device)
        plans.append(reads(rows, *one, cached))
    return plans


def _visible_blocks(
    last: Tensor, rows: int, longest: int, window: int | None, block_size: int
) -> tuple[Tensor, int]:
    """The first block [B] that any of the last `rows` queries sees, and how many to gather from there."""
    blocks = -(-longest // block_size)
    if window is None:
        return torch.zeros_like(last), blocks
    first = (last - (rows - 1) - (window - 1)).clamp(min=0) // block_size
    return first, min(blocks, (window + rows - 3 + block_size) // block_size + 1)


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """[blocks, Hkv, block_size, D] by a table [B, N] -> [B, Hkv, N · block_size, D]."""
    return cache[blocks].transpose(1, 2).flatten(2, 3)


def _softmax_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [B, R, Hq, D], keys and values [B, Hkv, L, D], visible [B, R, L] -> [B, R, Hq, D]."""
    if softcap is None and sinks is None:
        attended = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=visible[:, None], scale=scale, enable_gqa=True
        )
        return attended.transpose(1, 2)
    batch, rows, heads, _ = query.shape
    step = max(1, _MAX_SCORES // (batch * heads * keys.shape[2]))
    parts = [
        _capped_attention(
            query[:, i : i + step], keys, values, visible[:, i : i + step], scale, softcap, sinks
        )
        for i in range(0, rows, step)
    ]
    return torch.cat(parts, dim=1)


def _capped_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """_softmax_attention with a cap on the scores (Gemma 2) or sinks in the softmax (gpt-oss)."""
    batch, rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(batch, rows, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("brhgd,bhld->bhgrl", grouped, keys).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, kv_heads, heads // kv_heads, 1, 1).expand(batch, -1, -1, rows, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    attended = torch.einsum("bhgrl,bhld->brhgd", weights.to(values.dtype), values)
    return attended.reshape(batch, rows, heads, head_dim)


class StepContext:
    """Holds the metadata of the step in flight. One per runner; every layer of its model reads it."""

    __slots__ = ("metadata",)

    def __init__(self) -> None:
        self.metadata: AttentionMetadata | None = None


class PagedLayer:
    """One attention layer's part of the cache, and the implementation it attends with."""

    def __init__(
        self,
        context: StepContext,
        attention: PagedAttention,
        key_cache: Tensor,
        value_cache: Tensor,
        group: int,
        window: int | None,
    ) -> None:
        self._context = context
        self._attention = attention
        self.key_cache = key_cache
        self.value_cache = value_cache
        self.group = group
        self.window = window

    @property
    def metadata(self) -> AttentionMetadata:
        """Of the step in flight."""
        assert self._context.metadata is not None, "the model is only run by its ModelRunner"
        return self._context.metadata

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        return self._attention(
            query,
            key,
            value,
            self.key_cache,
            self.value_cache,
            self.metadata,
            self.group,
            scale=scale,
            window=self.window,
            softcap=softcap,
            sinks=sinks,
        )


def bind_layers(
    modules: Iterable[nn.Module],
    layout: BlockLayout,
    kv_cache: Tensor,
    context: StepContext,
    attention: PagedAttention,
) -> None:
    """Give each attention module (in layer order) its views of the cache."""
    placed = {
        layer: (g, j, group.window)
        for g, group in enumerate(layout.groups)
        for j, layer in enumerate(group.layers)
    }
    for layer, module in enumerate(modules):
        group, index, window = placed.pop(layer)
        views = kv_cache[:, index, 0], kv_cache[:, index, 1]
        setattr(module, LAYER_ATTRIBUTE, PagedLayer(context, attention, *views, group, window))
    assert not placed, f"layers without an attention module: {sorted(placed)}"


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D].

    What else may come in `kwargs`, and that the window there is the cache's, is checked once, before the
    model is served (see servable.py).
    """
    layer: PagedLayer = getattr(module, LAYER_ATTRIBUTE)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    return layer(query, key, value, scale=scale, softcap=softcap, sinks=s_aux)[None], None


def register() -> None:
    """Make IMPLEMENTATION known to transformers. It registers no mask function, so models build no masks."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, paged_attention_forward)
