"""The arithmetic of a plan: what fits beside a model's weights, and how fast memory lets it be.

A decode step reads every weight that some sequence needs, and every sequence's cache, once. So, of a batch b
at a context c, on one device:

    step seconds ≥ (weights(b) + b · cache(c)) / bandwidth        tokens/s ≤ b / step seconds

The batch pays while weights outweigh the caches: at b = weights / cache(c) half of the ceiling that bandwidth
/ cache(c) sets is reached, and doubling the batch brings less and less.
"""

from __future__ import annotations

from dataclasses import dataclass

from model_runner.core.block_layout import BlockLayout
from model_runner.core.kv_spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class WeightsRead:
    """Bytes of weights on one device. `expert_bytes` of them belong to `experts` routed experts a layer, of
    which each token uses `experts_per_token`."""

    total_bytes: int
    expert_bytes: int = 0
    experts: int = 0
    experts_per_token: int = 0

    def step_bytes(self, batch: int) -> int:
        """Bytes that a step of `batch` tokens reads, if each token's experts are drawn evenly: an expert is
        left unread with probability (1 - experts_per_token / experts) ^ batch."""
        if not self.experts or not self.expert_bytes:
            return self.total_bytes
        unread = (1 - min(self.experts_per_token / self.experts, 1)) ** batch
        return self.total_bytes - int(self.expert_bytes * unread)


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
    contexts: tuple[AtContext, ...]
    batches: tuple[AtBatch, ...]

    def at_context(self, context: int) -> AtContext:
        need = self.spec.sequence_bytes(context)
        most = self.spec.max_sequences(context, self.kv_budget_bytes)
        allocated = most_allocated = None
        if self.layout is not None:
            allocated = self.layout.sequence_blocks(context) * self.layout.block_bytes
            most_allocated = self.kv_budget_bytes // allocated
        step, speed = self._speed(most, need)
        half = self.weights.total_bytes / need if need else None
        return AtContext(context, need, allocated, most, most_allocated, step, speed, half)

    def at_batch(self, sequences: int, limit: int) -> AtBatch:
        longest = self.spec.longest_context(sequences, self.kv_budget_bytes, limit)
        allocated = None
        if self.layout is not None:
            allocated = self.layout.longest_context(sequences, self.kv_budget_bytes, limit)
        step, speed = self._speed(sequences if longest else 0, self.spec.sequence_bytes(longest))
        return AtBatch(sequences, longest, allocated, step, speed)

    def _speed(self, batch: int | None, sequence_bytes: int) -> tuple[float | None, float | None]:
        if not batch:
            return None, None
        step = self.device.step_seconds(self.weights, batch, sequence_bytes)
        return step, None if step is None else batch / step


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
) -> Plan:
    """`layout` is None where Plimsoll does not serve the model; `limit` is its longest context, in tokens."""
    empty = Plan(spec, layout, weights, device, kv_budget_bytes, (), ())
    return Plan(
        spec,
        layout,
        weights,
        device,
        kv_budget_bytes,
        tuple(empty.at_context(context) for context in contexts),
        tuple(empty.at_batch(sequences, limit) for sequences in batches),
    )
