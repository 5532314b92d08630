"""What there is room for: the question that tells one kind of admission from another.

Strict      a request's whole lifetime is set aside for it; what is free is what nobody has set aside
Predictive  it is let in while the peak of the cache in time to come stays under the line, but for a
            stated risk; `max_tokens` bounds what it may grow to and is never the estimate
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from model_runner.core.block_layout import BlockLayout
from model_runner.core.lengths import Lengths
from model_runner.core.outlook import Outlook, Running
from model_runner.core.tenants import DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class Part:
    """One prompt of a request, with its choices: what is released as one."""

    part_id: str
    blocks: int  # the price of its lifetime
    sequences: int
    prompt_tokens: int
    max_tokens: int
    tenant: str = DEFAULT_TENANT


class Policy(Protocol):
    """Told of everything that the door lets in, and of what becomes of it."""

    grows: bool  # the engine grants blocks as requests grow; else their price is reserved when they come in

    def fits(self, parts: Sequence[Part], free_blocks: int) -> bool:
        """Whether all of them may come in now. `free_blocks` are neither reserved nor granted."""

    def came_in(self, part: Part) -> None: ...

    def granted(self, part_id: str, blocks: int) -> None: ...

    def progressed(self, part_id: str, generated_tokens: int) -> None:
        """Its longest choice has come so far."""

    def ending(self, part_id: str) -> None:
        """Nobody wants more of it: the engine gives its blocks back in its next step."""

    def left(self, part_id: str) -> None: ...

    def free_for_forecast(self, footprints: float, free_blocks: int) -> float:
        """Blocks, in footprints, that forecasts of waiting times may hand out at once, where those who are in
        have these `footprints`."""

    def preempted(self, requests: int) -> None:
        """The line was reached, and so many had to give their blocks back."""

    def footprint(self, part: Part, generated_tokens: int) -> float:
        """Blocks that it takes up, in the mean over what is left of its life: what forecasts of waiting
        times count in."""


class Strict:
    grows = False

    def fits(self, parts: Sequence[Part], free_blocks: int) -> bool:
        return sum(part.blocks for part in parts) <= free_blocks

    def footprint(self, part: Part, generated_tokens: int) -> float:
        return part.blocks

    def free_for_forecast(self, footprints: float, free_blocks: int) -> float:
        return free_blocks

    def came_in(self, part: Part) -> None: ...

    def granted(self, part_id: str, blocks: int) -> None: ...

    def progressed(self, part_id: str, generated_tokens: int) -> None: ...

    def ending(self, part_id: str) -> None: ...

    def left(self, part_id: str) -> None: ...

    def preempted(self, requests: int) -> None: ...


_FULL = 0.9  # footprints of a full house, in the mean: the rest is the distance kept from the line
_FRESH_TOKENS = 4  # so many steps an outlook stays good enough


class OverflowRisk:
    """How many deviations to keep from the line so that, in the long run, the stated share of all requests
    let in is preempted, and not more.

    The share is counted over requests, not over the times the door was asked: asking at every step picks the
    luckiest moment of many, and a bound on each single answer would say little about what follows. So the
    distance is set by what did follow: each preemption widens it, each request that ends without one narrows
    it a little, in the proportion at which both balance at the stated share.

    What a distance is worth depends on how many run. Among many somebody soon ends, and most crossings of the
    line pass while the newest are held; among a few that is a long wait. So a crossing is taken to pass as
    often as there are others to end, and what is learned is how far off that is.

    Source: H. Robbins and S. Monro, "A Stochastic Approximation Method" (1951), for a quantile.
    """

    _STEP = 0.25  # deviations for one preemption
    _CROSSINGS = 42  # of the line, at most, for one that leads to a preemption; as many as run, if fewer do
    _LEAST, _MOST = 0.25, 6.0

    def __init__(self, share: float) -> None:
        """`share` lies between 0 and 1, both excluded."""
        self.share = share
        self._learned = 0.0  # deviations, beyond what is expected
        expected = (1.0 - min(crossings * share, 0.4) for crossings in range(1, self._CROSSINGS + 1))
        self._expected = [NormalDist().inv_cdf(quantile) for quantile in expected]

    def deviations(self, running: int) -> float:
        """To keep from the line while so many run."""
        return min(max(self._expect(running) + self._learned, self._LEAST), self._MOST)

    def preempted(self, running: int) -> None:
        """One, while so many ran."""
        self._learn(1.0 - self.share, running)

    def ended(self, running: int) -> None:
        """One, whether it had been preempted or not."""
        self._learn(-self.share, running)

    def _learn(self, part: float, running: int) -> None:
        # No further than the distance follows, or it would have to be unlearned before anything happened.
        expected = self._expect(running)
        low, high = self._LEAST - expected, self._MOST - expected
        self._learned = min(max(self._learned + self._STEP * part, low), high)

    def _expect(self, running: int) -> float:
        return self._expected[min(max(running, 1), self._CROSSINGS) - 1]


class Predictive:
    grows = True

    def __init__(
        self, layout: BlockLayout, lengths: Lengths, *, num_blocks: int, overflow_risk: float
    ) -> None:
        self.lengths = lengths
        self.risk = OverflowRisk(overflow_risk)
        self.num_blocks = num_blocks
        self._layout = layout
        self._outlook = Outlook(layout, lengths.limit)
        self._running: dict[str, Running] = {}
        self._tokens_since = 0  # that the outlook was made
        self._refused: set[tuple[Part, ...]] = set()  # that don't fit this outlook

    @property
    def predicted_peak_blocks(self) -> float:
        """The peak in time to come that is passed only with the stated risk."""
        self._look_again()
        return self._outlook.peak(self.margin_deviations)

    @property
    def margin_deviations(self) -> float:
        """That are kept from the line now."""
        return self.risk.deviations(len(self._running))

    def fits(self, parts: Sequence[Part], free_blocks: int) -> bool:
        if not self._running:
            return True  # alone it always fits: its price is no more than all blocks
        self._look_again()
        asked = tuple(parts)
        if asked in self._refused:
            return False
        deviations = self.risk.deviations(len(self._running) + len(parts))
        peak = self._outlook.peak(deviations, [self._arriving(part) for part in parts])
        if peak > self.num_blocks:
            self._refused.add(asked)
            return False
        return True

    def came_in(self, part: Part) -> None:
        one = self._running[part.part_id] = self._arriving(part)
        self._outlook.add(part.part_id, one)

    def granted(self, part_id: str, blocks: int) -> None: ...

    def progressed(self, part_id: str, generated_tokens: int) -> None:
        one = self._running.get(part_id)
        if one is not None and generated_tokens > one.generated:
            self._running[part_id] = Running(
                one.prompt_tokens,
                generated_tokens,
                max(one.max_tokens, generated_tokens),
                one.n,
                one.lengths,
            )
            self._tokens_since += 1

    def ending(self, part_id: str) -> None:
        if self._running.pop(part_id, None) is not None:
            self._outlook.remove(part_id)
            self._refused.clear()

    def left(self, part_id: str) -> None:
        self.ending(part_id)
        self.risk.ended(len(self._running))

    def preempted(self, requests: int) -> None:
        for _ in range(requests):
            self.risk.preempted(len(self._running))

    def footprint(self, part: Part, generated_tokens: int) -> float:
        lengths = self.lengths.of(part.prompt_tokens, part.tenant)
        left = lengths.mean_left(generated_tokens, part.max_tokens - generated_tokens)
        return self._layout.request_blocks(
            part.prompt_tokens, max(round(generated_tokens + left / 2), 1), part.sequences
        )

    def free_for_forecast(self, footprints: float, free_blocks: int) -> float:
        free = max(_FULL * self.num_blocks - footprints, 0.0)
        # A house that is nearly full and lets nobody in has room for half of one, in the mean.
        if self._running and footprints > _FULL / 2 * self.num_blocks:
            free = min(free, footprints / len(self._running) / 2)
        return free

    def _look_again(self) -> None:
        if self._tokens_since > _FRESH_TOKENS * len(self._running):
            self._tokens_since = 0
            self._refused.clear()
            self._outlook.make(self._running)

    def _arriving(self, part: Part) -> Running:
        lengths = self.lengths.of(part.prompt_tokens, part.tenant)
        return Running(part.prompt_tokens, 0, part.max_tokens, part.sequences, lengths)
