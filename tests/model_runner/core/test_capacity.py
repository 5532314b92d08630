"""The arithmetic of a plan, by hand and by what must hold for every one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.core.block_layout import BlockLayout
from model_runner.core.capacity import (
    Device,
    Plan,
    cached_tokens,
    fewest_devices,
    half_ceiling_batch,
    make_plan,
)
from model_runner.core.kv_spec import KVCacheSpec
from model_runner.core.weights import WeightsRead

GB = 10**9
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "head_dim": 128,
}
TOKEN = 131_072  # bytes of one token
WEIGHTS = WeightsRead(16 * GB)
SLIDING = {**LLAMA_8B, "layer_types": ["sliding_attention", "full_attention"] * 16, "sliding_window": 1024}


def plan_of(
    config: dict[str, Any],
    budget: int,
    *,
    weights: WeightsRead = WEIGHTS,
    contexts: tuple[int, ...] = (1024,),
    batches: tuple[int, ...] = (1,),
    headroom_blocks: int = 0,
) -> Plan:
    spec = KVCacheSpec.from_config(config)
    return make_plan(
        spec,
        BlockLayout.from_spec(spec, block_size=16),
        weights,
        Device(80 * GB, 1000 * GB),
        kv_budget_bytes=budget,
        contexts=contexts,
        batches=batches,
        limit=131_072,
        headroom_blocks=headroom_blocks,
    )


def test_a_context_by_hand() -> None:
    (at,) = plan_of(LLAMA_8B, 10 * 1024 * TOKEN + 5, contexts=(1025,)).contexts
    assert (at.cached_tokens, at.sequence_bytes, at.max_sequences) == (1024, 1024 * TOKEN, 10)
    assert at.step_seconds == pytest.approx((16 * GB + 10 * 1024 * TOKEN) / (1000 * GB))
    assert at.tokens_per_second == pytest.approx(10 * 1000 * GB / (16 * GB + 10 * 1024 * TOKEN))
    assert at.half_ceiling_batch == pytest.approx(16 * GB / (1024 * TOKEN))


def test_at_the_even_batch_half_of_the_ceiling_is_reached() -> None:
    plan = plan_of(LLAMA_8B, 10 * GB, contexts=(1025,))
    half = plan.contexts[0].half_ceiling_batch
    assert half is not None
    step = plan.device.step_seconds(plan.weights, 1, round(half * 1024 * TOKEN))
    assert step is not None
    assert half / step == pytest.approx(1000 * GB / (1024 * TOKEN) / 2)


def test_what_plimsoll_keeps_aside_is_not_for_requests() -> None:
    budget = 16 * 16 * TOKEN  # sixteen blocks
    at = plan_of(LLAMA_8B, budget, contexts=(17,), headroom_blocks=4).contexts[0]
    assert (at.max_sequences, at.max_sequences_allocated) == (16, 12)
    batch = plan_of(LLAMA_8B, budget, batches=(2,), headroom_blocks=4).batches[0]
    assert (batch.longest_context, batch.longest_context_allocated) == (129, 97)
    none = plan_of(LLAMA_8B, budget, contexts=(17,), headroom_blocks=40).contexts[0]
    assert none.max_sequences_allocated == 0


def test_experts_are_read_as_they_are_used() -> None:
    weights = WeightsRead(1000, expert_bytes=800, experts=8, experts_per_token=2, unread_bytes=100)
    assert weights.step_bytes(0) == 100
    assert weights.step_bytes(1) == 100 + 200  # a quarter of the experts, and of the embedding nothing
    assert weights.step_bytes(2) == 100 + 350  # 1 - (3/4)^2
    assert weights.step_bytes(1000) == 900


@given(
    read=st.integers(1, 1000),
    expert_bytes=st.integers(0, 1000),
    experts=st.integers(1, 256),
    used=st.integers(1, 16),
    price=st.integers(1, 1000),
)
def test_where_half_of_the_ceiling_is_the_caches_weigh_as_much_as_the_weights_that_are_read(
    read: int, expert_bytes: int, experts: int, used: int, price: int
) -> None:
    weights = WeightsRead(
        (read + expert_bytes) * GB, expert_bytes=expert_bytes * GB, experts=experts, experts_per_token=used
    )
    batch = half_ceiling_batch(weights, price * GB // 100)
    assert batch * (price * GB // 100) == pytest.approx(weights.step_bytes(batch), rel=1e-6)


def test_without_a_bandwidth_no_speed_is_told() -> None:
    spec = KVCacheSpec.from_config(LLAMA_8B)
    plan = make_plan(
        spec,
        None,
        WeightsRead(GB),
        Device(GB),
        kv_budget_bytes=GB,
        contexts=(1024,),
        batches=(1,),
        limit=2048,
    )
    assert plan.contexts[0].tokens_per_second is None
    assert plan.batches[0].step_seconds is None
    assert plan.contexts[0].max_sequences_allocated is None
    assert plan.num_blocks is None


@given(
    config=st.sampled_from([LLAMA_8B, SLIDING]),
    budget=st.integers(0, 64 * GB),
    context=st.integers(1, 131_072),
    sequences=st.integers(1, 512),
)
def test_what_is_said_to_fit_fits_and_one_more_does_not(
    config: dict[str, Any], budget: int, context: int, sequences: int
) -> None:
    plan = plan_of(config, budget, contexts=(context,), batches=(sequences,))
    at, by = plan.contexts[0], plan.batches[0]
    assert at.max_sequences is not None
    assert at.max_sequences_allocated is not None
    assert at.max_sequences * at.sequence_bytes <= budget < (at.max_sequences + 1) * at.sequence_bytes
    assert at.max_sequences_allocated <= at.max_sequences  # whole blocks are never less than what is needed
    if by.longest_context:
        assert sequences * plan.spec.sequence_bytes(cached_tokens(by.longest_context)) <= budget
    if by.longest_context < 131_072:
        assert sequences * plan.spec.sequence_bytes(cached_tokens(by.longest_context + 1)) > budget
    assert by.longest_context_allocated is not None
    assert by.longest_context_allocated <= by.longest_context


def test_the_fewest_devices_hold_the_weights_and_one_sequence() -> None:
    def price(ranks: int) -> KVCacheSpec:
        return KVCacheSpec.from_config(LLAMA_8B, tensor_parallel=ranks)

    fewest = partial(fewest_devices, 16 * GB, context=1024, price=price)
    assert fewest(17 * GB) == 1
    assert fewest(16 * GB) == 2  # the weights alone would fit one
    assert fewest(6 * GB) == 4  # not 3, which 8 heads can't be divided among
    assert fewest(0) is None
    assert fewest_devices(16 * GB, GB, 10**7, price) is None  # no rank holds less than one head of it
