"""What Plimsoll allocates for a model that it serves: the price list (KVCacheSpec) in whole, equal blocks.

Models mix layers that keep everything with layers that keep a window, and both must draw on one pool
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
from dataclasses import dataclass
from math import gcd
from typing import Literal

from model_runner.core.kv_dtypes import KV_DTYPES
from model_runner.core.kv_spec import KVCacheSpec, LayerGroup
from model_runner.core.layer_cache import LayerCache, LayerKind
from model_runner.errors import ModelNotServable


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Like layers that share one block table. `layers` are the model's layer indices, in order."""

    kind: Literal["full", "sliding"]
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
    def from_spec(cls, spec: KVCacheSpec, *, block_size: int) -> BlockLayout:
        """What Plimsoll allocates for a model that it serves.

        Raises ModelNotServable, with the reason, for one whose layers are not all full or sliding, of one
        shape and with values as wide as keys, kept unquantised on one device, or whose attention is biased
        by distance (ALiBi).
        """
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, and must be positive")
        shape = _one_shape(spec)
        size = gcd(*(len(group.layers) for group in spec.groups))
        groups = tuple(
            BlockGroup(
                kind="full" if group.reach is None else "sliding",
                layers=group.layers[first : first + size],
                kv_heads=shape.kv_heads,
                head_dim=shape.key_dim,
                window=group.reach,
            )
            for group in spec.groups
            for first in range(0, len(group.layers), size)
        )
        return cls(groups=groups, block_size=block_size, element_bytes=spec.dtype.bits // 8)

    def needs(self, model_type: str) -> KVCacheSpec:
        """What this was laid out for: `from_spec`'s inverse, but for the order of the groups."""
        dtype = next(name for name, dtype in KV_DTYPES.items() if dtype.bits == 8 * self.element_bytes)
        layers: dict[LayerCache, list[int]] = {}
        for group in self.groups:
            kind: LayerKind = "full" if group.window is None else "sliding"
            cache = LayerCache(kind, group.kv_heads, group.head_dim, group.head_dim, reach=group.window)
            layers.setdefault(cache, []).extend(group.layers)
        groups = tuple(LayerGroup(cache, tuple(sorted(of)), dtype, dtype, 1) for cache, of in layers.items())
        return KVCacheSpec(model_type, groups, dtype, 1)

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
        return sum(self.group_blocks(group, prompt_tokens, max_tokens, n) for group in self.groups)

    def group_blocks(self, group: BlockGroup, prompt_tokens: int, max_tokens: int, n: int = 1) -> int:
        """The part of `request_blocks` that is one group's."""
        if prompt_tokens < 1 or max_tokens < 1 or n < 1:
            raise ValueError(f"nothing to price: {prompt_tokens=} {max_tokens=} {n=}")
        shared = prompt_tokens // self.block_size
        own = _ceil_div(prompt_tokens + max_tokens - 1, self.block_size) - shared
        if group.window is None:
            return shared + n * own
        cap = self.cap_blocks(group.window)
        own_max = min(own, cap)
        return n * own_max + min(shared, cap - own_max)

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

    def longest_context(self, sequences: int, budget_bytes: int, limit: int) -> int:
        """The most tokens, at most `limit`, that each of `sequences` sequences may hold; 0 if not even
        one."""
        budget_blocks = budget_bytes // self.block_bytes
        return bisect_right(
            range(1, limit + 1), budget_blocks, key=lambda tokens: sequences * self.sequence_blocks(tokens)
        )

    def max_sequences(self, tokens: int, budget_blocks: int) -> int:
        """How many single sequences of `tokens` cached tokens fit `budget_blocks` at once."""
        return budget_blocks // self.sequence_blocks(tokens)


_WHY_NOT: dict[LayerKind, str] = {
    "chunked": "attend within chunks",
    "latent": "cache a compressed latent (MLA), not keys and values per head",
    "recurrent": "keep a recurrent state",
    "shared": "read another layer's cache",
}


# Models of transformers whose layers would fit the blocks, and whose attention would not be run right.
_WHY_NOT_MODEL: dict[str, str] = {
    **dict.fromkeys(
        (
            *("big_bird", "falcon", "git", "gpt_neo", "gpt_neox_japanese", "megatron-bert", "openai-gpt"),
            *("rembert", "roformer", "trocr", "xglm"),
        ),
        "its attention is code of its own, which can't be led to a block cache",
    ),
    "diffllama": "each of its layers attends twice and subtracts",
    "doge": "its attention leaves out tokens that it chooses itself",
    "hrm_text": "some of its layers share one attention module",
    "jetmoe": "its attention has experts, which repeat the cached heads",
    "moshi": "its layers don't attend to exactly the window that its configuration states",
}


def _one_shape(spec: KVCacheSpec) -> LayerCache:
    """A full or sliding layer's cache, which but for its reach is every layer's."""
    if spec.model_type in _WHY_NOT_MODEL:
        raise ModelNotServable(
            f"Plimsoll does not serve the model type {spec.model_type!r} yet, because "
            f"{_WHY_NOT_MODEL[spec.model_type]}."
        )
    for group in spec.groups:
        layer = group.layers[0]
        if group.kind in _WHY_NOT:
            raise _not_served(
                spec.model_type, f"some of its layers (the first is {layer}) {_WHY_NOT[group.kind]}"
            )
        if group.cache.own_tokens or group.cache.indexer_dim or group.cache.stride > 1:
            raise _not_served(spec.model_type, f"layer {layer} caches more than its tokens' keys and values")
        key_dim, value_dim = group.cache.key_dim, group.cache.value_dim
        if key_dim != value_dim:
            raise _not_served(
                spec.model_type, f"layer {layer} has keys of {key_dim} and values of {value_dim} elements"
            )
    caches = [group.cache for group in spec.groups]
    if not caches:
        raise _not_served(spec.model_type, "none of its layers has a cache")
    if len({(cache.kv_heads, cache.key_dim) for cache in caches}) > 1:
        raise _not_served(spec.model_type, "its layers differ in their numbers of heads or head sizes")
    if sum(len(group.layers) for group in spec.groups) != len({n for g in spec.groups for n in g.layers}):
        raise _not_served(spec.model_type, "some of its layers run several times for each token")
    if spec.position_biases:
        raise _not_served(spec.model_type, "its attention adds ALiBi position biases")
    if spec.dtype.quantised:
        raise ModelNotServable(
            f"Plimsoll keeps no quantised cache yet, so for {spec.kv_dtype} only what is needed is told."
        )
    if spec.tensor_parallel != 1:
        raise ModelNotServable(
            f"Plimsoll runs a model on one device yet, so for {spec.tensor_parallel} only what is needed is "
            "told."
        )
    return caches[0]


def _not_served(model_type: str, reason: str) -> ModelNotServable:
    return ModelNotServable(
        f"Plimsoll does not serve the model type {model_type!r} yet, because {reason}. "
        "It serves decoders whose layers are all full or sliding attention of one shape."
    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
