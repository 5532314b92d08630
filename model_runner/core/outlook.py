"""The cache's use in time to come: what all who run will hold, and how sure that is.

Of each sequence it is known what it holds after so many more tokens (the price list), and how likely it still
runs then (the length model). At a moment t steps ahead the sum of all has the

    mean       Σ p_i(t) · blocks_i(t)
    variance   Σ p_i(t) · (1 - p_i(t)) · blocks_i(t)²        (lengths are independent)

and is close to a normal distribution. The peak that is reckoned with is the highest mean + z · deviation over
all moments: short answers have given their blocks back before long ones need them. From one moment to the
next, p is taken as it is at the first and the blocks as they are at the second: no peak hides in between.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import TypeAlias

from model_runner.core.block_layout import BlockLayout
from model_runner.core.lengths import STEP, LengthModel

# The chance that a sequence still runs at a moment, and the blocks that it holds then.
Share: TypeAlias = tuple[float, int]


@dataclass(frozen=True, slots=True)
class Running:
    """A prompt with its n choices, the longest of which has `generated` tokens."""

    prompt_tokens: int
    generated: int
    max_tokens: int
    n: int
    lengths: LengthModel


@dataclass(slots=True)
class _Sums:
    """Of all shares, at each moment."""

    mean: list[float]
    variance: list[float]
    most: list[int]

    @classmethod
    def zero(cls, moments: int) -> _Sums:
        return cls([0.0] * moments, [0.0] * moments, [0] * moments)

    def copy(self) -> _Sums:
        return _Sums(self.mean.copy(), self.variance.copy(), self.most.copy())

    def add(self, shares: list[Share], sign: int) -> None:
        mean, variance, most = self.mean, self.variance, self.most
        for index, (p, blocks) in enumerate(shares):
            expected = sign * p * blocks
            mean[index] += expected
            variance[index] += (1.0 - p) * expected * blocks
            most[index] += sign * blocks


class Outlook:
    """Sums over moments ahead, in blocks, of all who run, by their names. What came in or left costs a walk
    over the moments; that those who run get on is seen only by making it anew."""

    def __init__(self, layout: BlockLayout, longest: int) -> None:
        self._layout = layout
        self._moments = _moments(longest)
        block_size = layout.block_size
        # What a single sequence holds, by its blocks' number: asked for very often.
        self._held = [
            layout.sequence_blocks(blocks * block_size) for blocks in range(-(-longest // block_size) + 2)
        ]
        self.make({})

    def make(self, running: Mapping[str, Running]) -> None:
        """Anew, of these."""
        self._shares: dict[str, list[Share]] = {}
        self._sums = _Sums.zero(len(self._moments))
        for name, one in running.items():
            self.add(name, one)

    def add(self, name: str, one: Running) -> None:
        self._shares[name] = shares = self._share(one)
        self._sums.add(shares, 1)

    def remove(self, name: str) -> None:
        self._sums.add(self._shares.pop(name), -1)

    def peak(self, z: float, more: Sequence[Running] = ()) -> float:
        """Blocks that the sum will pass only with the risk that `z` deviations stand for; never more than if
        all ran on."""
        sums = self._sums
        if more:
            sums = sums.copy()
            for one in more:
                sums.add(self._share(one), 1)
        return max(
            # Sums that others were taken out of again may be a hair below nothing.
            min(mean + z * sqrt(max(variance, 0.0)), most)
            for mean, variance, most in zip(sums.mean, sums.variance, sums.most, strict=True)
        )

    def _share(self, one: Running) -> list[Share]:
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
            # As if it ended only at the next moment, and had grown until then: what is between two moments is
            # no more than that, whoever else ends or grows there.
            at = min(moments[index + 1], left) - 1
            position = (one.generated + moments[index]) // STEP
            p = exp(table[position if position < last else last] - now)
            if n == 1:
                blocks = held[-(-(tokens + at) // block_size)]
            else:
                p = 1.0 - (1.0 - p) ** n
                blocks = self._layout.request_blocks(one.prompt_tokens, one.generated + at + 1, n)
            shares.append((p, blocks))
        return shares


def _moments(longest: int) -> list[int]:
    """Tokens ahead: every 8 at first, then by a quarter more each time; the last is past every end."""
    moments = list(range(0, 72, 8))
    while moments[-1] <= longest:
        moments.append(-(-moments[-1] * 5 // 4 // 8) * 8)
    return moments
