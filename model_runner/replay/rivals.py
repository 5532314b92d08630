"""Policies that are not on offer: one that knows the future, and one that doesn't look ahead at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from model_runner.core.policy import Part


class _Rival:
    """What both remember: who runs, and how far it has come."""

    grows = True

    def __init__(self, num_blocks: int, block_size: int, groups: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._groups = groups
        self._running: dict[str, tuple[Part, int]] = {}

    def came_in(self, part: Part) -> None:
        self._running[part.part_id] = part, 0

    def granted(self, part_id: str, blocks: int) -> None: ...

    def progressed(self, part_id: str, generated_tokens: int) -> None:
        part, _ = self._running[part_id]
        self._running[part_id] = part, generated_tokens

    def ending(self, part_id: str) -> None: ...

    def left(self, part_id: str) -> None:
        del self._running[part_id]

    def preempted(self, requests: int) -> None: ...

    def free_for_forecast(self, footprints: float, free_blocks: int) -> float:
        return max(self._num_blocks - footprints, 0.0)

    def footprint(self, part: Part, generated_tokens: int) -> float:
        return self._blocks(part.prompt_tokens + generated_tokens)

    def _blocks(self, tokens: int) -> int:
        return self._groups * -(-tokens // self._block_size)


class Greedy(_Rival):
    """Lets in whoever's prompt fits what is free now."""

    def __init__(self, num_blocks: int, block_size: int, groups: int) -> None:
        super().__init__(num_blocks, block_size, groups)
        self._pending: dict[str, int] = {}  # let in, and granted nothing yet

    def fits(self, parts: Sequence[Part], free_blocks: int) -> bool:
        wanted = sum(self._blocks(part.prompt_tokens) for part in parts)
        return wanted + sum(self._pending.values()) <= free_blocks

    def came_in(self, part: Part) -> None:
        super().came_in(part)
        self._pending[part.part_id] = self._blocks(part.prompt_tokens)

    def granted(self, part_id: str, blocks: int) -> None:
        if blocks:
            self._pending.pop(part_id, None)
        else:  # preempted: it will want everything back
            part, generated = self._running[part_id]
            self._pending[part_id] = self._blocks(part.prompt_tokens + generated)

    def left(self, part_id: str) -> None:
        super().left(part_id)
        self._pending.pop(part_id, None)


class Oracle(_Rival):
    """Knows every answer's length, and lets in the next while the cache's exact future peak, if all who run
    advance by one token a step, stays within the budget. One choice to a request."""

    def __init__(self, num_blocks: int, block_size: int, groups: int, lengths: Sequence[int]) -> None:
        """`lengths` are those of all requests, in the order in which they are submitted."""
        super().__init__(num_blocks, block_size, groups)
        self._lengths = lengths

    def fits(self, parts: Sequence[Part], free_blocks: int) -> bool:
        rows = [*self._running.values(), *((part, 0) for part in parts)]
        held = np.array([part.prompt_tokens + generated for part, generated in rows])
        left = np.array([self._length(part) - generated for part, generated in rows])
        # The peak is reached just before one of them ends.
        moments = np.unique(left) - 1
        tokens = held[None, :] + moments[:, None]
        blocks = np.where(left[None, :] > moments[:, None], -(-tokens // self._block_size), 0)
        return bool(blocks.sum(axis=1).max() * self._groups <= self._num_blocks)

    def _length(self, part: Part) -> int:
        return min(self._lengths[int(part.part_id.split("-")[0]) - 1], part.max_tokens)
