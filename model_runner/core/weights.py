"""A model's weights as a decode step reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# How configurations spell the number of routed experts, and how many of them a token uses.
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_USED = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)


@dataclass(frozen=True, slots=True)
class WeightsRead:
    """Bytes of weights on one device. `expert_bytes` of them belong to `experts` routed experts a layer, of
    which each token uses `experts_per_token`; `unread_bytes` are held and not read by a decode step: an
    embedding of which one row is looked up for each token, towers for pictures and sound, layers that
    predict more than the next token."""

    total_bytes: int
    expert_bytes: int = 0
    experts: int = 0
    experts_per_token: int = 0
    unread_bytes: int = 0

    def step_bytes(self, batch: float) -> float:
        """Bytes that a step of `batch` tokens reads, if each token's experts are drawn evenly: of E experts,
        E · (1 - (1 - k/E) ^ batch) are drawn by some token, each of which draws k."""
        read = self.total_bytes - self.unread_bytes
        if not self.experts or not self.expert_bytes:
            return read
        unread: float = (1 - min(self.experts_per_token / self.experts, 1)) ** batch
        return read - self.expert_bytes * unread


def read_experts(config: Mapping[str, Any]) -> tuple[int, int]:
    """(routed experts of a layer, how many of them a token uses) of a resolved configuration; (0, 0) where
    it has none, or does not say."""
    found = [
        next((config[name] for name in names if _is_count(config.get(name))), 0)
        for names in (_EXPERTS, _USED)
    ]
    return (found[0], found[1]) if all(found) else (0, 0)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
