"""The price list of any decoder: what its cache needs, in bytes, group of like layers by group.

    KV bytes = 2 · layers · kv_heads · head_dim · tokens · sequences · bytes_per_element

is exact for plain attention. Half of today's models slide, chunk, compress, share or replace it, so a model
is a list of groups of like layers, each priced by its kind:

    full       kv_heads · (key_dim + value_dim) elements a token, for ever
    sliding    the same, for at most `reach` tokens: the window
    chunked    the same, for at most `reach` tokens: the chunk
    latent     latent_dim + rope_dim elements a token, and an indexer's key: no factor 2, and no heads
    recurrent  a state that does not grow
    shared     nothing

This is what the model **needs**, the floor of any engine. What Plimsoll **allocates** when it serves the
model, in whole blocks, is `BlockLayout`, made from this.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from model_runner.core.config_layers import has_position_biases, query_heads, read_layers
from model_runner.core.kv_dtypes import KV_DTYPES, KVDtype
from model_runner.core.layer_cache import LayerCache, LayerKind, heads_per_rank
from model_runner.errors import ModelNotPriced

_MOST_RANKS = 1024  # no one divides a model among more


@dataclass(frozen=True)
class LayerGroup:
    """Like layers. All bytes are of all its layers together, of one sequence, on one device."""

    cache: LayerCache
    # The model's layer indices. One with attention and a state is in two groups; one that is run several
    # times for each token keeps a cache for each time, and is here as often.
    layers: tuple[int, ...]
    kv_dtype: str
    model_dtype: str  # of states that are kept as the model runs
    tensor_parallel: int

    @property
    def kind(self) -> LayerKind:
        return self.cache.kind

    @property
    def reach(self) -> int | None:
        """The most tokens kept; None keeps all."""
        return self.cache.reach

    @property
    def grows(self) -> bool:
        """Whether it grows for as long as the context does."""
        return self.reach is None and self.bytes_per_entry > 0

    @cached_property
    def bytes_per_entry(self) -> int:
        """Bytes of one entry: of one cached token, or of `stride` tokens compressed into one."""
        cache, dtype = self.cache, KV_DTYPES[self.kv_dtype]
        heads = heads_per_rank(cache.kv_heads, self.tensor_parallel) if cache.kv_heads else 0
        assert heads is not None, "from_config refuses heads that can't be shared out"
        per_head = dtype.vector_bytes(cache.key_dim) + dtype.vector_bytes(cache.value_dim)
        # A latent and an indexer's keys belong to no head: every rank keeps them whole.
        whole = sum(map(dtype.vector_bytes, (cache.latent_dim, cache.rope_dim, cache.indexer_dim)))
        return len(self.layers) * (heads * per_head + whole)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token costs while the group grows, the mean where several make one entry."""
        return self.bytes_per_entry // self.cache.stride

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state, which are held from the first token on."""
        total = 0
        for tensor in self.cache.state:
            heads = heads_per_rank(tensor.heads, self.tensor_parallel)
            assert heads is not None, "from_config refuses heads that can't be shared out"
            element_bytes = KV_DTYPES[self.model_dtype if tensor.dtype == "model" else tensor.dtype].bits // 8
            total += heads * tensor.elements_per_head * element_bytes
        return len(self.layers) * total

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes that `tokens` tokens of one sequence hold: min(tokens, reach) / stride entries, and the
        state."""
        if tokens == 0:
            return 0
        kept = tokens + self.cache.own_tokens
        if self.reach is not None:
            kept = min(kept, self.reach)
        return kept // self.cache.stride * self.bytes_per_entry + self.state_bytes


@dataclass(frozen=True)
class KVCacheSpec:
    """What a model's cache needs. All bytes are of one device."""

    model_type: str
    groups: tuple[LayerGroup, ...]
    kv_dtype: str
    tensor_parallel: int
    position_biases: bool = False  # ALiBi: costs nothing in the cache, and is not every engine's attention

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        kv_dtype: str = "bfloat16",
        model_dtype: str | None = None,
        tensor_parallel: int = 1,
    ) -> KVCacheSpec:
        """Read the price list off a resolved configuration (worker.model_config.resolved), weights unseen.

        `kv_dtype` is a key of KV_DTYPES. `model_dtype` is what the model runs in, and convolution states are
        kept in; left out, it is `kv_dtype`, or bfloat16 beside a quantised cache. Raises ModelNotPriced,
        naming the model type and the field it stumbled on.
        """
        if kv_dtype not in KV_DTYPES:
            raise ValueError(f"unknown kv_dtype {kv_dtype!r}: it is one of {', '.join(KV_DTYPES)}")
        if model_dtype is None:
            model_dtype = "bfloat16" if KV_DTYPES[kv_dtype].quantised else kv_dtype
        if model_dtype not in KV_DTYPES or KV_DTYPES[model_dtype].quantised:
            raise ValueError(f"a model does not run in {model_dtype!r}")
        if tensor_parallel < 1:
            raise ValueError(f"tensor_parallel is {tensor_parallel}, and must be at least 1")
        model_type = str(config.get("model_type", "unknown"))
        layers_of: dict[LayerCache, list[int]] = {}
        for layer, caches in read_layers(config):
            for cache in caches:
                layers_of.setdefault(cache, []).append(layer)
        attending = {layer for cache, layers in layers_of.items() if not cache.state for layer in layers}
        _refuse_uneven(model_type, layers_of, query_heads(config, attending), tensor_parallel)
        groups = tuple(
            LayerGroup(cache, tuple(layers), kv_dtype, model_dtype, tensor_parallel)
            for cache, layers in layers_of.items()
        )
        return cls(model_type, groups, kv_dtype, tensor_parallel, has_position_biases(config))

    @property
    def dtype(self) -> KVDtype:
        return KV_DTYPES[self.kv_dtype]

    @property
    def growing_bytes_per_token(self) -> int:
        """Bytes that one more token costs, however long the context is."""
        return sum(group.bytes_per_token for group in self.groups if group.grows)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token while every layer still grows: windows and chunks not reached."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def fixed_bytes_per_sequence(self) -> int:
        """Bytes of state, which a sequence of any length holds."""
        return sum(group.state_bytes for group in self.groups)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes that one sequence holds with `tokens` tokens in the cache."""
        if tokens < 0:
            raise ValueError(f"{tokens} tokens are less than none")
        return sum(group.sequence_bytes(tokens) for group in self.groups)

    def max_sequences(self, tokens: int, budget_bytes: int) -> int | None:
        """How many sequences of `tokens` tokens fit the budget at once; None where they cost nothing."""
        price = self.sequence_bytes(tokens)
        return budget_bytes // price if price else None

    def longest_context(self, sequences: int, budget_bytes: int, limit: int) -> int:
        """The most tokens, at most `limit`, that each of `sequences` sequences may hold; 0 if not even
        one."""
        return bisect_right(
            range(1, limit + 1), budget_bytes, key=lambda tokens: sequences * self.sequence_bytes(tokens)
        )


def _refuse_uneven(
    model_type: str, caches: Iterable[LayerCache], query_heads: Mapping[str, int], ranks: int
) -> None:
    """Raises ModelNotPriced for a number of ranks that the heads can't be shared out among."""
    kept: dict[str, int] = {}
    for cache in caches:
        kept |= {"num_key_value_heads": cache.kv_heads} if cache.kv_heads else {}
        kept |= {f"the heads of its {tensor.name}": tensor.heads for tensor in cache.state}

    def uneven(ranks: int) -> list[str]:
        asked = [f"{name} is {heads}" for name, heads in query_heads.items() if heads % ranks]
        return asked + [
            f"{name} {'are' if ' ' in name else 'is'} {heads}"
            for name, heads in kept.items()
            if heads_per_rank(heads, ranks) is None
        ]

    if not (why := uneven(ranks)):
        return
    below = next(fewer for fewer in range(ranks - 1, 0, -1) if not uneven(fewer))
    above = next((more for more in range(ranks + 1, _MOST_RANKS + 1) if not uneven(more)), None)
    nearest = f"{below} and {above} do" if above else f"{below} does, and no greater number"
    raise ModelNotPriced(
        f"{model_type} can't be divided among {ranks} devices: {', '.join(why)}. Devices must divide the "
        "query heads, and divide what is cached by heads or be a multiple of it. Of the numbers nearest to "
        f"{ranks}, {nearest}."
    )
