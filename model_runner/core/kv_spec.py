"""The price list: what a model's KV cache costs, in blocks and bytes. The only place where cache is priced.

The one equation, for plain attention (keys and values give the 2):

    KV bytes = 2 · layers · kv_heads · head_dim · tokens · sequences · bytes_per_element

Real models mix layers that keep everything with layers that keep a window, and both must draw on one pool without a
split that strands memory. So like layers are cut into groups of equal size (the greatest common divisor of the
counts: 13 full and 13 sliding layers make two groups of 13; 4 full and 22 sliding make two and eleven groups of 2).
A **block** holds `block_size` tokens of one group; every group's block has the same `block_bytes`, so any free block
serves any group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

LayerKind: TypeAlias = Literal["full", "sliding"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Like layers that share one block table. `layers` are the model's layer indices, in order."""

    kind: LayerKind
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int | None = None  # tokens a sliding layer attends to, itself included


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Prices sequences and requests in blocks and bytes.

    `groups` all have the same number of layers and the same bytes per token, so that `block_bytes` is one number.
    """

    groups: tuple[LayerGroup, ...]
    block_size: int  # tokens
    element_bytes: int

    @property
    def layers_per_group(self) -> int:
        return len(self.groups[0].layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of any group: 2 · layers · kv_heads · head_dim · block_size · element_bytes."""
        group = self.groups[0]
        return 2 * len(group.layers) * group.kv_heads * group.head_dim * self.block_size * self.element_bytes
