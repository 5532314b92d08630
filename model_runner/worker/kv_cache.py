"""The one tensor that holds every key and value."""

from __future__ import annotations

import torch
from torch import Tensor

from model_runner.core.block_layout import BlockLayout
from model_runner.errors import DoesNotFit, StartupError
from model_runner.worker.huge_pages import advise_huge_pages


def allocate_kv_cache(
    layout: BlockLayout, blocks_total: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[blocks, layers of a group, 2 (keys, values), kv_heads, block_size, head_dim].

    Written to once, so that its pages are the process's own before the first request. Raises DoesNotFit when
    the memory can't be had, StartupError when its size is not the price list's to the byte.
    """
    group = layout.groups[0]
    shape = (blocks_total, len(group.layers), 2, group.kv_heads, layout.block_size, group.head_dim)
    priced = blocks_total * layout.block_bytes
    try:
        cache = torch.empty(shape, dtype=dtype, device=device)
        advise_huge_pages(cache)
        cache.zero_()
    except RuntimeError as error:  # torch's out-of-memory errors, on any device
        raise DoesNotFit(
            f"The KV cache of {priced:,} bytes could not be allocated on {device}: {error}"
        ) from error
    if cache.nbytes != priced:
        raise StartupError(
            f"The KV cache is {cache.nbytes:,} bytes, but the price list says {priced:,} "
            f"({blocks_total} blocks of {layout.block_bytes:,} bytes). Not starting: the books must match."
        )
    return cache


def copy_blocks(kv_cache: Tensor, copies: list[tuple[int, int]]) -> None:
    """Copy whole blocks, all layers of the group, from source to destination: first read all, then write."""
    sources, destinations = (torch.tensor(side, device=kv_cache.device) for side in zip(*copies, strict=True))
    kv_cache[destinations] = kv_cache[sources]
