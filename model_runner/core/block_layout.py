"""The price list: what a model's KV cache costs, in blocks and bytes. The only place where cache is priced.

The one equation, for plain attention (keys and values give the 2):

    KV bytes = 2 · layers · kv_heads · head_dim · tokens · sequences · bytes_per_element

Real models mix layers that keep everything with layers that keep a window, and both must draw on one pool
without a split that strands memory. So like layers are cut into groups of equal size (the greatest common
divisor of the counts: 13 full and 13 sliding layers make two groups of 13; 4 full and 22 sliding make two and
eleven groups of 2). A **block** holds `block_size` tokens of one group; every group's block has the same
`block_bytes`, so any free block serves any group.

What a sequence holds of a sliding group. The token at position p attends to positions p - window + 1 … p.
Blocks below are freed before p runs, so it needs the blocks that `window` consecutive positions touch: at the
worst alignment (p is the first token of its block) that is ceil((window - 1) / block_size) + 1, the group's
**cap**. A prefill chunk runs many positions in one forward pass and needs more for that one step; the excess
over the reservation is borrowed from a headroom that exists once per engine, and is back in the pool when the
step ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, TypeAlias

from model_runner.errors import ModelNotServable

LayerKind: TypeAlias = Literal["full", "sliding"]


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Like layers that share one block table. `layers` are the model's layer indices, in order."""

    kind: LayerKind
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int | None = None  # tokens a sliding layer attends to, itself included


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Prices sequences and requests in blocks and bytes.

    `groups` all have the same number of layers and bytes per token, so that `block_bytes` is one number.
    """

    groups: tuple[BlockGroup, ...]
    block_size: int  # tokens
    element_bytes: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, block_size: int, element_bytes: int) -> BlockLayout:
        """Read the price list off a decoder's resolved configuration (`transformers`' `config.to_dict()`).

        Raises ModelNotServable, naming the field or the layer, for whatever would be priced or run wrongly.
        """
        if block_size < 1 or element_bytes < 1:
            raise ValueError(f"block_size {block_size} and element_bytes {element_bytes} must be positive")
        _refuse_unservable(config)
        kv_heads, head_dim = _kv_shape(config)
        layers_by_window: dict[int | None, list[int]] = {}
        for layer, window in enumerate(_windows(config)):
            layers_by_window.setdefault(window, []).append(layer)
        size = gcd(*(len(layers) for layers in layers_by_window.values()))
        groups = tuple(
            BlockGroup(
                kind="full" if window is None else "sliding",
                layers=tuple(layers[first : first + size]),
                kv_heads=kv_heads,
                head_dim=head_dim,
                window=window,
            )
            for window, layers in layers_by_window.items()
            for first in range(0, len(layers), size)
        )
        return cls(groups=groups, block_size=block_size, element_bytes=element_bytes)

    @property
    def layers_per_group(self) -> int:
        return len(self.groups[0].layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of any group: 2 · layers · kv_heads · head_dim · block_size · element_bytes."""
        group = self.groups[0]
        return 2 * len(group.layers) * group.kv_heads * group.head_dim * self.block_size * self.element_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token while every layer grows: 2 · layers · kv_heads · head_dim · element_bytes."""
        return len(self.groups) * self.block_bytes // self.block_size

    def cap_blocks(self, window: int) -> int:
        """The most blocks that `window` consecutive positions touch: ceil((window - 1) / block_size) + 1."""
        return _ceil_div(window - 1, self.block_size) + 1

    def sequence_blocks(self, tokens: int) -> int:
        """The most blocks that one sequence holds between steps until `tokens` tokens are in the cache."""
        blocks = _ceil_div(tokens, self.block_size)
        return sum(
            blocks if group.window is None else min(blocks, self.cap_blocks(group.window))
            for group in self.groups
        )

    def request_blocks(self, prompt_tokens: int, max_tokens: int, n: int = 1) -> int:
        """The most blocks that a prompt and its n choices hold at once: the price of the request.

        A choice's lifetime is `prompt_tokens + max_tokens - 1` tokens (the last one drawn is never written),
        E blocks of each group; the F full blocks of the prompt are shared by the choices, and the other E - F
        are each one's own. For n > 1 choices that end in the block that the prompt began this is an upper
        bound, by less than n blocks of a group; in all other cases it is what is held at the peak.

        - A full group keeps all: F + n·(E - F).
        - In a sliding group no choice ever needs more than `cap` blocks: o of its own and, while the window
          still reaches back into the prompt, at most cap - o shared ones. The choices advance together, so
          what they hold is n·o + min(F, cap - o), which grows with o, and o ends at min(E - F, cap).
        """
        if prompt_tokens < 1 or max_tokens < 1 or n < 1:
            raise ValueError(f"nothing to price: {prompt_tokens=} {max_tokens=} {n=}")
        shared = prompt_tokens // self.block_size
        own = _ceil_div(prompt_tokens + max_tokens - 1, self.block_size) - shared
        total = 0
        for group in self.groups:
            if group.window is None:
                total += shared + n * own
            else:
                cap = self.cap_blocks(group.window)
                own_max = min(own, cap)
                total += n * own_max + min(shared, cap - own_max)
        return total

    def request_bytes(self, prompt_tokens: int, max_tokens: int, n: int = 1) -> int:
        return self.request_blocks(prompt_tokens, max_tokens, n) * self.block_bytes

    def headroom_blocks(self, max_num_batched_tokens: int) -> int:
        """Blocks to keep aside, once per engine, for the prefill chunk in flight. 0 without sliding layers.

        A chunk of c tokens touches at most ceil((window + c - 2) / block_size) + 1 blocks of a sliding group:
        no more than ceil((c - 1) / block_size) over the cap. With this much, one sequence can use the whole
        token budget of a step; several that share it may find the headroom exhausted, and then run shorter
        chunks.
        """
        sliding_groups = sum(group.window is not None for group in self.groups)
        return sliding_groups * _ceil_div(max(max_num_batched_tokens - 1, 0), self.block_size)

    def largest_max_tokens(self, prompt_tokens: int, n: int, budget_blocks: int, limit: int) -> int:
        """The largest max_tokens, at most `limit`, whose price fits `budget_blocks`; 0 when not even 1
        does."""
        return bisect_right(
            range(1, limit + 1),
            budget_blocks,
            key=lambda max_tokens: self.request_blocks(prompt_tokens, max_tokens, n),
        )

    def max_sequences(self, tokens: int, budget_blocks: int) -> int:
        """How many single sequences of `tokens` cached tokens fit `budget_blocks` at once."""
        return budget_blocks // self.sequence_blocks(tokens)


_WHY_NOT = {
    "kv_lora_rank": "latent attention (MLA) caches a compressed vector, not keys and values per head",
    "num_kv_shared_layers": "some of its layers read another layer's cache",
    "attention_chunk_size": "chunked attention",
    "per_layer_config": "its layers differ in their numbers of heads or head sizes",
    "attention_k_eq_v": "its layers keep one tensor for keys and values",
    "layers_block_type": "it mixes attention with other kinds of layers",
    "block_types": "it mixes attention with other kinds of layers",
    "hybrid_override_pattern": "it mixes attention with other kinds of layers",
    "is_encoder_decoder": "it is an encoder-decoder",
    "use_bidirectional_attention": "its attention is not causal",
    "alibi": "ALiBi position biases",
}
_WHY_NOT_PREFIX = {
    "mamba": "it has state-space layers",
    "ssm_": "it has state-space layers",
    "conv_L_cache": "it has convolution layers with a state",
    "swa_": "its sliding layers have their own numbers of heads or head sizes",
}
_WHY_NOT_SUFFIX = {"_per_layer": "its layers differ"}


def _refuse_unservable(config: Mapping[str, Any]) -> None:
    for field, value in config.items():
        if not value:
            continue
        why = _WHY_NOT.get(field)
        why = why or next((why for prefix, why in _WHY_NOT_PREFIX.items() if field.startswith(prefix)), None)
        why = why or next((why for suffix, why in _WHY_NOT_SUFFIX.items() if field.endswith(suffix)), None)
        if why is not None:
            raise _not_servable(config, f"its config sets {field}: {why}")


def _windows(config: Mapping[str, Any]) -> list[int | None]:
    """Each layer's window, in tokens; None where a layer attends to everything."""
    num_layers = _positive_int(config, "num_hidden_layers")
    layer_types = config.get("layer_types")
    slides = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    if layer_types is None:
        # The families without layer_types (Mistral, Phi-3, Qwen3-MoE …) apply a window to all layers.
        if slides and config.get("max_window_layers") is not None:
            raise _not_servable(config, "its config sets max_window_layers but not layer_types")
        layer_types = ["sliding_attention" if slides else "full_attention"] * num_layers
    if len(layer_types) != num_layers:
        raise _not_servable(config, f"it has {num_layers} layers and {len(layer_types)} layer_types")
    windows: list[int | None] = []
    for layer, layer_type in enumerate(layer_types):
        if layer_type == "full_attention":
            windows.append(None)
        elif layer_type == "sliding_attention":
            if not slides:
                raise _not_servable(config, f"layer {layer} slides, but no sliding_window is in use")
            windows.append(_positive_int(config, "sliding_window"))
        else:
            raise _not_servable(config, f"layer {layer} is {layer_type!r}")
    return windows


def _kv_shape(config: Mapping[str, Any]) -> tuple[int, int]:
    """(kv_heads, head_dim), the same for every layer."""
    heads = _positive_int(config, "num_attention_heads")
    has_kv_heads = config.get("num_key_value_heads") is not None
    kv_heads = _positive_int(config, "num_key_value_heads") if has_kv_heads else heads
    if heads % kv_heads:
        raise _not_servable(config, f"{heads} query heads are not a multiple of {kv_heads} key-value heads")
    if config.get("head_dim") is not None:
        head_dim = _positive_int(config, "head_dim")
    else:
        head_dim = _positive_int(config, "hidden_size") // heads
    if config.get("v_head_dim") not in (None, head_dim):
        raise _not_servable(
            config, f"its keys have {head_dim=} and its values v_head_dim={config['v_head_dim']}"
        )
    return kv_heads, head_dim


def _positive_int(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _not_servable(config, f"its config's {field} is {value!r}, not one positive number")
    return value


def _not_servable(config: Mapping[str, Any], reason: str) -> ModelNotServable:
    return ModelNotServable(
        f"Plimsoll can't serve the model type {config.get('model_type', 'unknown')!r}: {reason}. "
        "It serves decoders whose layers are all 'full_attention' or 'sliding_attention' of one shape."
    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
