"""The cache's use in time to come: what all who run will hold, and how sure that is.

Of each sequence it is known what it holds after so many more tokens (the price list), and how likely it still
runs then (the length model). At a moment t steps ahead the sum of all has the

    mean       Σ p_i(t) · blocks_i(t)
    variance   Σ p_i(t) · (1 - p_i(t)) · blocks_i(t)²        (lengths are independent)

and is close to a normal distribution. The peak that is reckoned with is the highest mean + z · deviation over
all moments: short answers have given their blocks back before long ones need them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, sqrt

from model_runner.core.block_layout import BlockLayout
from model_runner.core.lengths import STEP, LengthModel


@dataclass(frozen=True, slots=True)
class Running:
    """A prompt with its n choices, the longest of which has `generated` tokens."""

    prompt_tokens: int
    generated: int
    max_tokens: int
    n: int
    lengths: LengthModel


class Outlook:
    """Sums over moments ahead, in blocks. Made from all who run; `add` one more costs the moments only."""

    def __init__(self, layout: BlockLayout, longest: int) -> None:
        self._layout = layout
        self._moments = _moments(longest)
        block_size = layout.block_size
        # What a single sequence holds, by its blocks' number: asked for very often.
        self._held = [
            layout.sequence_blocks(blocks * block_size) for blocks in range(-(-longest // block_size) + 2)
        ]
        self.clear()

    def clear(self) -> None:
        self._mean = [0.0] * len(self._moments)
        self._variance = [0.0] * len(self._moments)
        self._most = [0] * len(self._moments)

    def add(self, running: Iterable[Running]) -> None:
        _add(running, self._share, self._mean, self._variance, self._most)

    def peak(self, z: float, more: Sequence[Running] = ()) -> float:
        """Blocks that the sum will pass only with the risk that `z` deviations stand for; never more than if
        all ran on."""
        mean, variance, most = self._mean, self._variance, self._most
        if more:
            mean, variance, most = mean.copy(), variance.copy(), most.copy()
            _add(more, self._share, mean, variance, most)
        return max(
            min(expected + z * sqrt(spread), bound)
            for expected, spread, bound in zip(mean, variance, most, strict=True)
        )

    def _share(self, one: Running) -> list[tuple[float, int]]:
        """(the chance that it still runs, blocks that it holds then), at each moment until it must have
        ended."""
        table = one.lengths.log_survival()
        last = len(table) - 1
        now = table[min(one.generated // STEP, last)]
        left = one.max_tokens - one.generated
        tokens = one.prompt_tokens + one.generated
        block_size, held, n = self._layout.block_size, self._held, one.n
        shares = []
        moments = self._moments
        end = bisect_left(moments, left)  # it has ended by this one
        for index in range(end):
            moment = at = moments[index]
            if index == end - 1:
                at = left - 1  # at its largest
            position = (one.generated + moment) // STEP
            p = exp(table[position if position < last else last] - now)
            if n == 1:
                blocks = held[-(-(tokens + at) // block_size)]
            else:
                p = 1.0 - (1.0 - p) ** n
                blocks = self._layout.request_blocks(one.prompt_tokens, one.generated + at + 1, n)
            shares.append((p, blocks))
        return shares


def _add(
    running: Iterable[Running],
    share: Callable[[Running], list[tuple[float, int]]],
    mean: list[float],
    variance: list[float],
    most: list[int],
) -> None:
    for one in running:
        for index, (p, blocks) in enumerate(share(one)):
            expected = p * blocks
            mean[index] += expected
            variance[index] += (1.0 - p) * expected * blocks
            most[index] += blocks


def _moments(longest: int) -> list[int]:
    """Tokens ahead: every 8 at first, then by a quarter more each time; the last is past every end."""
    moments = list(range(0, 72, 8))
    while moments[-1] <= longest:
        moments.append(-(-moments[-1] * 5 // 4 // 8) * 8)
    return moments
