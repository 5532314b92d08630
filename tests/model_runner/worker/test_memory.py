"""Sizing: what is left out of the cache never goes unsaid."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model_runner.config import EngineConfig
from model_runner.core.block_layout import BlockGroup, BlockLayout
from model_runner.core.capacity import ample_kv_bytes
from model_runner.errors import DoesNotFit, StartupError
from model_runner.worker import memory
from model_runner.worker.kv_cache import allocate_kv_cache

FULL = BlockGroup("full", (0, 1), kv_heads=2, head_dim=64)
SLIDING = BlockGroup("sliding", (2, 3), kv_heads=2, head_dim=64, window=128)
PLAIN = BlockLayout((FULL,), block_size=16, element_bytes=2)
MIXED = BlockLayout((FULL, SLIDING), block_size=16, element_bytes=2)


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(model="", cache_dir="", **changes)


def test_blocks_are_what_the_bytes_hold_less_the_headroom() -> None:
    plan = memory.plan(config(), MIXED, 1000 * MIXED.block_bytes + 17, context=2048)
    assert plan.blocks_total == 1000
    assert plan.headroom_blocks == MIXED.headroom_blocks(512) > 0
    assert plan.max_model_len == 2048


def test_one_request_too_long_fails_with_the_figures_and_the_ways_out() -> None:
    with pytest.raises(DoesNotFit) as failure:
        memory.plan(config(), PLAIN, 100 * PLAIN.block_bytes, context=2048)
    assert str(failure.value) == (
        "One request of 2048 tokens needs 2 MiB of KV cache, but only 1.56 MiB are left for requests "
        "(of 1.56 MiB, less 0 B kept for prefills in flight). Give --kv-cache-memory 2MiB or more, "
        "or --max-model-len 1601 or less (`auto` chooses it)."
    )


@pytest.mark.parametrize("layout", [PLAIN, MIXED])
def test_auto_chooses_the_longest_that_fits(layout: BlockLayout) -> None:
    plan = memory.plan(config(max_model_len_auto=True), layout, 100 * layout.block_bytes, context=1 << 20)
    # As the door prices them: the last token of a request is never written.
    assert layout.request_blocks(1, plan.max_model_len - 1) <= plan.num_blocks
    assert layout.request_blocks(1, plan.max_model_len) > plan.num_blocks


def test_auto_keeps_the_model_s_context_when_it_fits() -> None:
    plan = memory.plan(config(max_model_len_auto=True), PLAIN, 100 * PLAIN.block_bytes, context=1001)
    assert plan.max_model_len == 1001


def test_auto_does_not_go_to_nothing() -> None:
    with pytest.raises(DoesNotFit, match="0 B are left"):
        memory.plan(config(max_model_len_auto=True), PLAIN, PLAIN.block_bytes - 1, context=1001)


def test_longer_than_the_model_s_context_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="more than the model's own context of 1000 tokens"):
        memory.plan(config(max_model_len=1001), PLAIN, 1 << 30, context=1000)


def test_a_model_without_a_context_needs_one_given() -> None:
    with pytest.raises(DoesNotFit, match="set --max-model-len"):
        memory.plan(config(), PLAIN, 1 << 30, context=None)
    assert memory.plan(config(max_model_len=500), PLAIN, 1 << 30, context=None).max_model_len == 500


def test_weights_come_first() -> None:
    assert memory.cpu_kv_bytes(config(cpu_memory_utilization=0.5), 1000, 200) == 400
    with pytest.raises(DoesNotFit, match="weights take 3 MiB, and only 2 MiB"):
        memory.cpu_kv_bytes(config(), 2 << 20, 3 << 20)


def test_an_unasked_cache_is_bounded_but_holds_the_longest_request() -> None:
    tokens = config().max_num_batched_tokens
    ample = ample_kv_bytes(MIXED, 131_072, max_num_seqs=256, max_num_batched_tokens=tokens)
    assert memory.plan(config(), MIXED, ample, 131_072).num_blocks >= 4 * MIXED.sequence_blocks(131_072)
    one = ample_kv_bytes(MIXED, 131_072, max_num_seqs=1, max_num_batched_tokens=tokens)
    assert memory.plan(config(), MIXED, one, 131_072).num_blocks == MIXED.sequence_blocks(131_072)


def test_the_cache_is_exactly_what_is_priced() -> None:
    cache = allocate_kv_cache(MIXED, 10, torch.bfloat16, torch.device("cpu"))
    assert cache.nbytes == 10 * MIXED.block_bytes
    assert cache.shape == (10, 2, 2, 2, 16, 64)


def test_books_that_do_not_match_the_memory_stop_the_server() -> None:
    with pytest.raises(StartupError, match="the books must match"):
        allocate_kv_cache(MIXED, 10, torch.float32, torch.device("cpu"))


def test_memory_that_can_not_be_had() -> None:
    with pytest.raises(DoesNotFit, match="could not be allocated"):
        allocate_kv_cache(MIXED, 1 << 40, torch.bfloat16, torch.device("cpu"))
