"""What one layer keeps for one sequence: the vocabulary in which every model's cache is described."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

LayerKind: TypeAlias = Literal["full", "sliding", "chunked", "latent", "recurrent", "shared"]

# What a state is kept in: a type by name, or the one that the model runs in.
StateDtype: TypeAlias = Literal["float32", "model"]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A part of a recurrent layer's state that does not grow with the context.

    `heads` is what tensor-parallel ranks divide among themselves (heads, groups or channels); each has
    `elements_per_head`.
    """

    name: str
    heads: int
    elements_per_head: int
    dtype: StateDtype


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache. Equal ones are like layers.

    full       `kv_heads` keys of `key_dim` and values of `value_dim` for each token; a `value_dim` of 0 says
    sliding    that the values are the keys, stored once
    chunked
    latent     one latent of `latent_dim` and one rotated key of `rope_dim` for each token
    recurrent  `state`, of a fixed size
    shared     nothing: it reads another layer's

    `reach` is the most tokens kept, and None keeps all. `stride` tokens make one entry (compressed
    attention). `indexer_dim` is a sparse indexer's key beside each entry. `own_tokens` are put before every
    prompt by the model.
    """

    kind: LayerKind
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    latent_dim: int = 0
    rope_dim: int = 0
    indexer_dim: int = 0
    reach: int | None = None
    stride: int = 1
    own_tokens: int = 0
    state: tuple[StateTensor, ...] = ()


def heads_per_rank(heads: int, ranks: int) -> int | None:
    """How many of `heads` one of `ranks` holds; None where they can't be shared out.

    Heads are divided where the ranks divide them. With more ranks than heads, in multiples, each rank holds
    one head, which is then kept several times (Megatron-LM's rule, and vLLM's).
    """
    if heads % ranks == 0:
        return heads // ranks
    return 1 if ranks % heads == 0 else None
