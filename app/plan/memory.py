"""The memory that a plan is made for: a card's, a size, or this machine's as a server would use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.plan.cards import Card
from app.plan.options import PlanOptions
from app.settings import Settings
from model_runner.core.block_layout import BlockLayout
from model_runner.core.capacity import ample_kv_bytes, cached_tokens
from model_runner.errors import StartupError
from model_runner.sizes import format_size


@dataclass(frozen=True, slots=True)
class Memory:
    """Of each device. `server_share` is what a server on a CPU takes for its cache of what the weights leave;
    None where the cache takes all of that."""

    card: Card
    usable_bytes: int  # by weights and cache
    how_limited: str
    server_share: float | None = None

    @property
    def how_used(self) -> str:
        if self.server_share is None:
            return self.how_limited
        return (
            f"{self.how_limited}; of what the weights leave, the cache takes {self.server_share:.0%}, as a "
            "server's does, and no more than a server takes unasked"
        )

    def kv_bytes(self, weights_bytes: int, layout: BlockLayout | None, limit: int) -> int:
        """What the cache may take, all of it; `limit` is the model's longest context."""
        left = self.usable_bytes - weights_bytes
        if self.server_share is None:
            return left
        share = int(left * self.server_share)
        if layout is None:
            return share
        settings = Settings()
        blocks = share // layout.block_bytes - layout.headroom_blocks(settings.max_num_batched_tokens)
        longest = layout.longest_context(1, max(blocks, 0) * layout.block_bytes, cached_tokens(limit))
        ample = ample_kv_bytes(
            layout,
            min(longest + 1, limit),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
        )
        return min(share, ample)


def find_memory(options: PlanOptions, machine: Mapping[str, Any]) -> Memory:
    """`machine` is worker.machine.describe_machine's. Raises StartupError for more devices than a CPU is."""
    card = options.device_memory
    if card is None and machine["on_cpu"]:
        if options.tensor_parallel > 1:
            raise StartupError(
                "This machine has no accelerator, and its CPU is one device: --tensor-parallel needs "
                "--device-memory."
            )
        here = Card(f"this machine ({machine['device']})", machine["memory_bytes"], 0.0)
        return Memory(here, here.memory_bytes, "available now", Settings().cpu_memory_utilization)
    if card is None:
        card = Card(f"this machine ({machine['device']})", machine["memory_bytes"], 0.0)
    share, overhead = options.gpu_memory_utilization, options.overhead
    return Memory(
        card,
        int(card.memory_bytes * share) - overhead,
        f"{share:.0%} of {format_size(card.memory_bytes)} used, {format_size(overhead)} of it overhead",
    )
