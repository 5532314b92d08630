"""Large tensors on large pages.

A decode step reads every weight and every cached key once. On pages of 4 KiB a good part of that time goes
into looking the pages up, on a virtual machine twice over; on pages of 2 MiB it does not. Linux gives them to
whoever asks (transparent huge pages); elsewhere nothing changes.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

HUGE_PAGE_BYTES = 2 << 20
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages under a CPU tensor. Before it is first written to: pages that exist stay small."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or sys.platform != "linux" or tensor.device.type != "cpu":
        return
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - first
    if size >= HUGE_PAGE_BYTES:
        # Advice may be declined (a kernel without it), and then the pages are as they would have been.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(advice))


def move_together(owners: Sequence[tuple[nn.Module, str]]) -> None:
    """Move the named buffers of modules into one allocation on huge pages, one by one.

    Weights of a megabyte each never fill a page of two; side by side they do. No more than one of them is in
    memory twice at any time.
    """
    sizes = [-(-module.get_buffer(name).nbytes // _ALIGNMENT) * _ALIGNMENT for module, name in owners]
    slab = torch.empty(sum(sizes), dtype=torch.uint8)
    advise_huge_pages(slab)
    offset = 0
    for (module, name), size in zip(owners, sizes, strict=True):
        buffer = module.get_buffer(name)
        room = slab[offset : offset + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
        setattr(module, name, room.copy_(buffer))
        offset += size
