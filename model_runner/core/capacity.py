"""The arithmetic of a plan: what fits beside a model's weights, and how fast memory lets it be.

A decode step reads every weight that some sequence needs, and every sequence's cache, once. So, of a batch b
at a context c, on one device:

    step seconds ≥ (weights(b) + b · cache(c)) / bandwidth        tokens/s ≤ b / step seconds

The batch pays while weights outweigh the caches: where b · cache(c) = weights(b), half of the ceiling that
bandwidth / cache(c) sets is reached, and doubling the batch brings less and less.

A **context** is what a request asks for, prompt and answer together; its last token is drawn and never
written, so a sequence at context c caches c - 1 tokens. That is the lifetime which the door prices
(BlockLayout.request_blocks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from model_runner.core.block_layout import BlockLayout
from model_runner.core.kv_spec import KVCacheSpec
from model_runner.core.weights import WeightsRead
from model_runner.errors import ModelNotPriced

# No one looks for a fit among more devices.
_MOST_RANKS = 1024


def cached_tokens(context: int) -> int:
    """What a sequence of `context` tokens, prompt and answer, has in the cache at its end. The least that can
    be asked for is a prompt of one token, which is cached."""
    return max(1, context - 1)


@dataclass(frozen=True, slots=True)
class Device:
    """One device's memory, and how fast it is read where that is known."""

    memory_bytes: int
    bandwidth: float | None = None  # bytes per second

    def step_seconds(self, weights: WeightsRead, batch: int, sequence_bytes: int) -> float | None:
        if self.bandwidth is None:
            return None
        return (weights.step_bytes(batch) + batch * sequence_bytes) / self.bandwidth


@dataclass(frozen=True, slots=True)
class AtContext:
    """How much fits at one context. None where a sequence costs nothing, or Plimsoll does not serve the
    model."""

    context: int
    cached_tokens: int
    sequence_bytes: int  # what one sequence needs
    allocated_bytes: int | None  # what Plimsoll allocates for it
    max_sequences: int | None  # by what is needed
    max_sequences_allocated: int | None
    step_seconds: float | None  # of the largest batch
    tokens_per_second: float | None
    half_ceiling_batch: float | None  # where the caches read weigh as much as the weights


@dataclass(frozen=True, slots=True)
class AtBatch:
    sequences: int
    longest_context: int
    longest_context_allocated: int | None
    step_seconds: float | None  # at that context
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a model can do on one device, of which there are `tensor_parallel`."""

    spec: KVCacheSpec
    layout: BlockLayout | None
    weights: WeightsRead
    device: Device
    kv_budget_bytes: int
    headroom_blocks: int  # that Plimsoll keeps aside for prefills in flight
    contexts: tuple[AtContext, ...]
    batches: tuple[AtBatch, ...]

    @property
    def num_blocks(self) -> int | None:
        """What Plimsoll has for requests; None where it does not serve the model."""
        if self.layout is None:
            return None
        return max(0, self.kv_budget_bytes // self.layout.block_bytes - self.headroom_blocks)

    def at_context(self, context: int) -> AtContext:
        tokens = cached_tokens(context)
        need = self.spec.sequence_bytes(tokens)
        most = self.spec.max_sequences(tokens, self.kv_budget_bytes)
        allocated = most_allocated = None
        if self.layout is not None:
            allocated = self.layout.sequence_blocks(tokens) * self.layout.block_bytes
            assert self.num_blocks is not None
            most_allocated = self.layout.max_sequences(tokens, self.num_blocks)
        step, speed = self._speed(most, need)
        half = half_ceiling_batch(self.weights, need) if need else None
        return AtContext(context, tokens, need, allocated, most, most_allocated, step, speed, half)

    def at_batch(self, sequences: int, limit: int, served_limit: int) -> AtBatch:
        most = cached_tokens(limit)
        longest = _context_of(self.spec.longest_context(sequences, self.kv_budget_bytes, most), limit)
        allocated = None
        if self.layout is not None:
            assert self.num_blocks is not None
            budget = self.num_blocks * self.layout.block_bytes
            most = cached_tokens(served_limit)
            allocated = _context_of(self.layout.longest_context(sequences, budget, most), served_limit)
        need = self.spec.sequence_bytes(cached_tokens(longest))
        step, speed = self._speed(sequences if longest else 0, need)
        return AtBatch(sequences, longest, allocated, step, speed)

    def _speed(self, batch: int | None, sequence_bytes: int) -> tuple[float | None, float | None]:
        if not batch:
            return None, None
        step = self.device.step_seconds(self.weights, batch, sequence_bytes)
        return step, None if step is None else batch / step


def half_ceiling_batch(weights: WeightsRead, sequence_bytes: int) -> float:
    """The batch b whose caches weigh as much as the weights that it reads: b · sequence_bytes =
    weights.step_bytes(b).

    Of a mixture of experts, a larger batch reads more of them, with less and less that is new: step_bytes
    bends down, so the caches overtake it once and for all.
    """
    low, high = 0.0, weights.total_bytes / sequence_bytes
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if middle * sequence_bytes < weights.step_bytes(middle) else (low, middle)
    return high


def _context_of(tokens: int, limit: int) -> int:
    """The context, at most `limit`, whose sequences cache `tokens` tokens; 0 of none."""
    return min(tokens + 1, limit) if tokens else 0


def make_plan(
    spec: KVCacheSpec,
    layout: BlockLayout | None,
    weights: WeightsRead,
    device: Device,
    *,
    kv_budget_bytes: int,
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    limit: int,
    served_limit: int | None = None,
    headroom_blocks: int = 0,
) -> Plan:
    """`layout` is None where Plimsoll does not serve the model; `limit` is its longest context, in tokens,
    and `served_limit` the longest that Plimsoll takes, where that is less. `headroom_blocks` of the budget
    are kept aside for prefills in flight."""
    empty = Plan(spec, layout, weights, device, kv_budget_bytes, headroom_blocks, (), ())
    return Plan(
        spec,
        layout,
        weights,
        device,
        kv_budget_bytes,
        headroom_blocks,
        tuple(empty.at_context(context) for context in contexts),
        tuple(empty.at_batch(sequences, limit, served_limit or limit) for sequences in batches),
    )


_COMMON_TOKENS = 512
_LONG_SEQUENCES = 4


def ample_kv_bytes(
    layout: BlockLayout, max_model_len: int, *, max_num_seqs: int, max_num_batched_tokens: int
) -> int:
    """More than this a server on a CPU does not take unasked: a small model would claim gigabytes that it
    hardly ever uses.

    Room for `max_num_seqs` sequences of a common length, or for a few of the longest, whichever is more.
    """
    common = max_num_seqs * layout.sequence_blocks(min(_COMMON_TOKENS, max_model_len))
    longest = min(_LONG_SEQUENCES, max_num_seqs) * layout.sequence_blocks(cached_tokens(max_model_len))
    headroom = layout.headroom_blocks(max_num_batched_tokens)
    return (max(common, longest) + headroom) * layout.block_bytes


def fewest_devices(
    weights_bytes: int, usable_bytes: int, context: int, price: Callable[[int], KVCacheSpec]
) -> int | None:
    """How many devices must share a model for its weights to fit, and one sequence of `context` tokens beside
    them; None where no number does.

    `weights_bytes` are the whole model's, `usable_bytes` one device's. `price(ranks)` is the price list among
    so many; it raises ModelNotPriced where the heads can't be divided among them.
    """
    if usable_bytes <= 0:
        return None
    for ranks in range(max(1, -(-weights_bytes // usable_bytes)), _MOST_RANKS + 1):
        try:
            cache = price(ranks).sequence_bytes(cached_tokens(context))
        except ModelNotPriced:
            continue
        if -(-weights_bytes // ranks) + cache <= usable_bytes:
            return ranks
    return None
