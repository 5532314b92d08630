"""Tensors moved to large pages are the same tensors to whoever uses them."""

from __future__ import annotations

import torch
from torch import nn

from model_runner.worker.huge_pages import advise_huge_pages, move_together


class Owner(nn.Module):
    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weights", torch.randn(shape).to(dtype))


def test_values_shapes_and_types_survive_the_move() -> None:
    owners = [
        Owner(3, 5, dtype=torch.bfloat16),
        Owner(7, dtype=torch.float32),
        Owner(1024, 4096, dtype=torch.bfloat16),
    ]
    before = [owner.weights.clone() for owner in owners]
    move_together([(owner, "weights") for owner in owners])
    for owner, expected in zip(owners, before, strict=True):
        assert owner.weights.dtype == expected.dtype
        assert torch.equal(owner.weights, expected)
        assert owner.weights.data_ptr() % 64 == 0
        assert owner.weights.is_contiguous()
    storages = {owner.weights.untyped_storage().data_ptr() for owner in owners}
    assert len(storages) == 1


def test_nothing_to_move_is_nothing_done() -> None:
    move_together([])


def test_advice_changes_no_value() -> None:
    tensor = torch.full((3 << 20,), 7, dtype=torch.uint8)
    advise_huge_pages(tensor[5:])  # also when it does not begin at a page
    advise_huge_pages(torch.empty(0))
    assert bool((tensor == 7).all())
