"""How long one more request would wait: what runs, and then the queue, played forward (forecast.py).

Whoever comes last waits until the whole queue is in. One whose turn comes before that of others, because it
is more urgent or its tenant has had less, is let in where they would be: it takes the next one's room.

Made anew when something has changed; with many in the house, at most once in a few steps, and the longer the
wait, the more seldom: a crowd's arrivals cost a walk each and not a replay of the whole queue.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from model_runner.core.fair_queue import Turn
from model_runner.core.forecast import Forecast
from model_runner.core.ledger import Ask, Ledger
from model_runner.core.lengths import Lengths
from model_runner.core.pace import Pace
from model_runner.core.policy import Part, Policy

_MANY = 64  # requests that run or wait
_ENDS = 4  # moments, at most, at which one that runs is foreseen to end, a part of it at each
_FRESH_STEPS = 4  # so long a forecast for many is good enough,
_FRESH_SHARE = 0.005  # and while it is younger than so much of the wait that it foresees


@dataclass(frozen=True, slots=True)
class _Entry:
    """One of the queue, and when it is foreseen to be let in."""

    when: float
    footprint: float  # blocks


class Waits:
    """`pace` may be replaced. Without `lengths` everyone is taken to run to max_tokens."""

    def __init__(self, ledger: Ledger, policy: Policy, pace: Pace, lengths: Lengths | None) -> None:
        self.pace = pace
        self._ledger = ledger
        self._policy = policy
        self._lengths = lengths
        self._forecast: Forecast | None = None  # at the queue's tail
        self._turns: list[Turn] = []  # of the queue, when it was made,
        self._entries: list[_Entry] = []  # and what it foresaw for each
        self._made_at = 0.0
        self._outdated = False
        self._foreseen = 0.0  # seconds, the last that was asked for

    def changed(self) -> None:
        """Something that forecasts depend on has."""
        self._outdated = True

    def forget(self) -> None:
        """So much has changed that nothing foreseen before is of any use."""
        self._forecast = None

    def joined(self, ask: Ask, turn: Turn) -> None:
        """It waits now, and this is its turn."""
        if self._forecast is not None:
            if self._turns and turn < self._turns[-1]:
                self._outdated = True  # others have moved back
            self._enter(self._forecast, ask, turn)

    def predict(
        self,
        ask: Ask,
        turn: Turn,
        queue: Iterable[tuple[Turn, Ask]],
        *,
        num_waiting: int,
        free_blocks: int,
        now: float,
    ) -> float:
        """Seconds until there would be room for `ask`, whose turn is this, among the `queue`."""
        many = num_waiting + len(self._ledger.reservations) > _MANY
        good_for = max(_FRESH_STEPS * self.pace.decode_seconds(1), _FRESH_SHARE * self._foreseen)
        fresh = many and now - self._made_at <= good_for
        if self._forecast is None or (self._outdated and not fresh):
            self._turns, self._entries = [], []
            self._forecast = self._make(free_blocks, now)
            for of, waiting in queue:
                self._enter(self._forecast, waiting, of)
            self._made_at, self._outdated = now, False
        footprint = sum(self._policy.footprint(part, 0) for part in ask.parts)
        when = self._where_others_would_be(turn, footprint)
        if when is None:
            when = self._forecast.room_at(footprint, self._ledger.places(ask.sequences))
        self._foreseen = max(0.0, when - now)
        return self._foreseen

    def _where_others_would_be(self, turn: Turn, footprint: float) -> float | None:
        """When those who come after this turn would have been let in, so many that their room is enough. None
        if there are too few of them."""
        for position in range(bisect_right(self._turns, turn), len(self._turns)):
            footprint -= self._entries[position].footprint
            if footprint <= 0:
                return self._entries[position].when
        return None

    def _enter(self, forecast: Forecast, ask: Ask, turn: Turn) -> None:
        """Let it in at the queue's tail; the room of all together is the same wherever it comes."""
        when = self._foresee(forecast, ask)
        position = bisect_right(self._turns, turn)
        if position < len(self._turns):
            when = self._entries[position].when
        footprint = sum(self._policy.footprint(part, 0) for part in ask.parts)
        self._turns.insert(position, turn)
        self._entries.insert(position, _Entry(when, footprint))

    def let_in(self, queue: Sequence[Ask], free_blocks: int, now: float) -> list[float]:
        """Seconds until each of the `queue` is let in, in this order."""
        forecast = self._make(free_blocks, now)
        return [max(0.0, self._foresee(forecast, ask) - now) for ask in queue]

    def tokens_left(self, part: Part, generated: int) -> float:
        """Of a part whose longest choice has come so far."""
        left = max(part.max_tokens - generated, 1)
        if self._lengths is None:
            return left
        return self._lengths.of(part.prompt_tokens, part.tenant).mean_left(generated, left)

    def _ends(self, part: Part, generated: int, moments: int) -> float | Sequence[float]:
        if self._lengths is None or moments == 1:
            return self.tokens_left(part, generated)
        left = max(part.max_tokens - generated, 1)
        return self._lengths.of(part.prompt_tokens, part.tenant).quantiles_left(generated, left, moments)

    def _make(self, free_blocks: int, now: float) -> Forecast:
        """Of those that run; nobody of the queue has been let in yet."""
        running = list(self._ledger.with_places())
        footprints = [self._policy.footprint(one.part, one.generated_tokens) for one, _ in running]
        free = self._policy.free_for_forecast(sum(footprints), free_blocks)
        forecast = Forecast(
            self.pace,
            now=now,
            free_blocks=free,
            free_sequences=self._ledger.max_num_seqs - self._ledger.reserved_places,
            token_seconds=self._token_seconds([one.part for one, _ in running], free + sum(footprints)),
        )
        # The first of many ends long before the mean; one alone does not come back in parts.
        moments = min(_ENDS, len(running))
        for (one, places), footprint in zip(running, footprints, strict=True):
            generated = one.generated_tokens
            forecast.running(
                blocks=footprint,
                sequences=places,
                prompt_tokens_left=0 if generated or one.ending else one.part.prompt_tokens,
                tokens_left=1 if one.ending else self._ends(one.part, generated, moments),
                since=now,
            )
        return forecast

    def _token_seconds(self, parts: Sequence[Part], room: float) -> float | None:
        """Of a full house, before any step was seen: N sequences at once, in whose every step N / length of
        them end, and the prompts of as many others are computed. None once it is measured."""
        if self.pace.token_seconds is not None or self._lengths is None or not parts:
            return None
        mean = room / sum(self._policy.footprint(part, 0) for part in parts)
        sequences = min(mean * sum(part.sequences for part in parts), self._ledger.max_num_seqs)
        length = sum(self.tokens_left(part, 0) for part in parts) / len(parts)
        prefill = sum(self.pace.prefill_seconds(part.prompt_tokens) for part in parts) / len(parts)
        return self.pace.decode_step_seconds + sequences * (self.pace.sequence_seconds + prefill / length)

    def _foresee(self, forecast: Forecast, ask: Ask) -> float:
        """Let it in as soon as there is room. Returns when."""
        places_left = self._ledger.places(ask.sequences)
        footprints = [self._policy.footprint(part, 0) for part in ask.parts]
        since = forecast.let_in(sum(footprints), places_left)
        for part, footprint in zip(ask.parts, footprints, strict=True):
            places = min(part.sequences, places_left)
            places_left -= places
            forecast.running(
                blocks=footprint,
                sequences=places,
                prompt_tokens_left=part.prompt_tokens,
                tokens_left=self.tokens_left(part, 0),
                since=since,
            )
        return since
