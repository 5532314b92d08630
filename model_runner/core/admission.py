"""The door: who may come in now, who waits, and who is turned away. Nothing here runs a model.

A request comes in whole or not at all: when there are places for it in the batch, and room in the cache as
the policy sees it. `decide` answers one of three, and the caller must

    Admitted   hand the request's parts to the engine: its reservation stands from this moment;
    Queued     wait: some later `release`, `cancel`, `expire` or `open` will name it among those let in,
               or `expire` will name it among those too late;
    Rejected   say so to the client; nothing was reserved, nothing is remembered.

Whose turn it is, the fair queue says: first come, first served, within a tenant. A small request may pass one
that doesn't fit yet, a bounded number of times; then the room that comes free is kept for that one, and since
none is larger than the whole budget each gets its turn. A reservation is the request's whole price from the start, or what
the engine says that it has granted it (`grant`), as the policy has it. It ends with `release`, on the
engine's word that the blocks are back, or with `close`, when that engine is dead and its memory gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from model_runner.core.fair_queue import FairQueue, Waiting
from model_runner.core.forecast import Forecast
from model_runner.core.lengths import Lengths
from model_runner.core.pace import Pace
from model_runner.core.policy import Part, Policy, Strict
from model_runner.core.tenants import DEFAULT_TENANT, Tenants
from model_runner.errors import Reason


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as the door sees it: all of its parts come in together."""

    ask_id: str
    parts: tuple[Part, ...]
    tenant: str = DEFAULT_TENANT
    priority: int = 0  # the smaller goes first
    timeout_seconds: float = float("inf")  # it won't wait for longer, whatever the server allows

    @property
    def blocks(self) -> int:
        return sum(part.blocks for part in self.parts)

    @property
    def sequences(self) -> int:
        return sum(part.sequences for part in self.parts)


@dataclass(frozen=True, slots=True)
class Admitted:
    pass


@dataclass(frozen=True, slots=True)
class Queued:
    predicted_wait_seconds: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """`predicted_wait_seconds` is when to come back; infinite if the request can never fit."""

    reason: Reason
    predicted_wait_seconds: float


Decision: TypeAlias = Admitted | Queued | Rejected

_CANDIDATES = 8  # looked at, each time, for one that fits
_MANY = 64  # requests that run or wait
_FRESH_STEPS = 4  # so long a forecast for many is good enough


@dataclass(slots=True)
class _Reservation:
    ask: Ask
    part: Part
    blocks: int
    since: float
    predicted_cost: float
    generated_tokens: int = 0
    ending: bool = False  # nobody wants more of it: the engine gives its blocks back in its next step


class AdmissionController:
    """The ledger of reservations and the queue before it. Holds `0 <= reserved_blocks <= num_blocks`."""

    def __init__(
        self,
        *,
        num_blocks: int,
        max_num_seqs: int,
        max_queue_requests: int,
        max_queue_seconds: float,
        pace: Pace,
        policy: Policy | None = None,
        lengths: Lengths | None = None,
        tenants: Tenants | None = None,
        max_passes: int = 0,
        aging_seconds: float = 10.0,
    ) -> None:
        """`lengths` is told of all answers and asked how long those that run may still take; without it
        everyone is taken to run to max_tokens. `max_passes` and `aging_seconds` bound how often and for how
        long one that doesn't fit may be passed."""
        self.policy: Policy = policy or Strict()
        self.lengths = lengths
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.max_queue_requests = max_queue_requests
        self.max_queue_seconds = max_queue_seconds
        self.pace = pace
        self.reserved_blocks = 0
        self.queued_blocks = 0
        self._open = False
        self._queue: FairQueue[Ask] = FairQueue(
            tenants or Tenants(), aging_seconds=aging_seconds, max_passes=max_passes
        )
        self._reservations: dict[str, _Reservation] = {}
        self._sequences: dict[str, int] = {}  # ask_id -> sequences of its parts not yet released
        self._reserved_sequences = 0
        self._forecast: Forecast | None = None  # at the queue's tail
        self._forecast_made_at = 0.0
        self._forecast_outdated = False  # something has changed since

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    @property
    def free_blocks(self) -> int:
        return self.num_blocks - self.reserved_blocks

    @property
    def reserved_sequences(self) -> int:
        return self._reserved_sequences

    def reservations(self) -> dict[str, int]:
        """Blocks by part_id."""
        return {part_id: reservation.blocks for part_id, reservation in self._reservations.items()}

    def queued_ask_ids(self, now: float) -> list[str]:
        """In turn."""
        return [waiting.ask_id for waiting in self._queue.in_turn(now)]

    def decide(self, ask: Ask, now: float) -> Decision:
        decision = self.judge(ask, now)
        if isinstance(decision, Admitted):
            self._reserve(ask, now)
        elif isinstance(decision, Queued):
            self._enqueue(ask, now)
            self._foresee(self._forecast_at(now), ask)
        return decision

    def judge(self, ask: Ask, now: float) -> Decision:
        """What `decide` would answer. Nothing is reserved, nothing is remembered."""
        blocks = ask.blocks
        if blocks > self.num_blocks:
            return Rejected(Reason.KV_CACHE_BUDGET_EXCEEDED, float("inf"))
        if not self._queue and self._has_room(ask):
            return Admitted()
        wait = self.predict_wait(ask, now)
        if len(self._queue) >= self.max_queue_requests:
            return Rejected(Reason.QUEUE_FULL, wait)
        if wait > self._patience(ask):
            return Rejected(Reason.WAIT_TOO_LONG, wait)
        return Queued(wait)

    def has_place_for(self, sequences: int) -> bool:
        """Whether nobody waits, and the batch has room for so many more: only bytes would be in the way."""
        places = self._reserved_sequences + self._places(sequences)
        return self._open and not self._queue and places <= self.max_num_seqs

    def predict_wait(self, ask: Ask, now: float) -> float:
        """Seconds until there would be room for `ask` behind all who wait now."""
        footprint = sum(self.policy.footprint(part, 0) for part in ask.parts)
        return max(0.0, self._forecast_at(now).room_at(footprint, self._places(ask.sequences)) - now)

    def open(self, now: float) -> list[Ask]:
        """An engine is there. Returns those let in."""
        self._open = True
        return self._admit_from_queue(now)

    def close(self) -> None:
        """The engine is gone and every block with it; nothing is let in until `open`."""
        self._open = False
        for part_id in self._reservations:
            self.policy.left(part_id)
        self._reservations.clear()
        self._sequences.clear()
        self.reserved_blocks = 0
        self._reserved_sequences = 0
        self._forecast = None

    def requeue(self, asks: Sequence[Ask], now: float) -> None:
        """To the queue's head, in this order, with a new deadline: they had been let in once."""
        self._queue.push_front([self._waiting(ask, now) for ask in asks])
        self.queued_blocks += sum(ask.blocks for ask in asks)
        self._forecast_outdated = True

    def release(self, part_ids: Iterable[str], now: float) -> list[Ask]:
        """The engine says that these parts' blocks are back in its pool. Returns those let in by it.

        Raises KeyError for a part that holds no reservation: ledger and engine disagree.
        """
        for part_id in part_ids:
            reservation = self._reservations.pop(part_id)
            self.reserved_blocks -= reservation.blocks
            self._settle(reservation, now)
            self.policy.left(part_id)
            ask_id = reservation.ask.ask_id
            left = self._sequences.pop(ask_id)
            self._reserved_sequences -= self._places(left)
            left -= reservation.part.sequences
            if left:
                self._sequences[ask_id] = left
                self._reserved_sequences += self._places(left)
        self._forecast_outdated = True
        return self._admit_from_queue(now)

    def cancel(self, ask_id: str, now: float) -> list[Ask]:
        """Leave the queue. Returns those let in by it; the head's going may open the way for the next."""
        waiting = self._queue.remove(ask_id)
        if waiting is None:
            return []
        self.queued_blocks -= waiting.ask.blocks
        self._forecast_outdated = True
        return self._admit_from_queue(now)

    def expire(self, now: float) -> tuple[list[Ask], list[Ask]]:
        """(those whose deadline in the queue has passed, those let in by their going)."""
        late = [waiting.ask for waiting in self._queue.expire(now)]
        if not late:
            return [], []
        self.queued_blocks -= sum(ask.blocks for ask in late)
        self._forecast_outdated = True
        return late, self._admit_from_queue(now)

    def grant(self, grants: Iterable[tuple[str, int]]) -> None:
        """The engine says what these parts may hold from now on. One step's grants and releases come
        together: only their sum stays under the line.

        Raises KeyError for a part that was never let in.
        """
        for part_id, blocks in grants:
            reservation = self._reservations[part_id]
            self.reserved_blocks += blocks - reservation.blocks
            reservation.blocks = blocks
            self.policy.granted(part_id, blocks)

    def progress(self, part_id: str, generated_tokens: int, more: int = 1) -> None:
        """A choice of a running part has come so far, by so many tokens `more`."""
        reservation = self._reservations.get(part_id)
        if reservation is None:
            return
        if self.lengths is not None:
            part = reservation.part
            self.lengths.of(part.prompt_tokens, part.tenant).drawn(generated_tokens, more)
        if generated_tokens > reservation.generated_tokens:
            reservation.generated_tokens = generated_tokens
            self.policy.progressed(part_id, generated_tokens)
            self._forecast_outdated = True

    def ended(self, part_id: str, generated_tokens: int) -> None:
        """A choice has come to an end of itself: by a token or a string that stops it."""
        reservation = self._reservations.get(part_id)
        if self.lengths is not None and reservation is not None:
            part = reservation.part
            self.lengths.of(part.prompt_tokens, part.tenant).ended(generated_tokens)

    def ending(self, part_id: str) -> None:
        """Nobody wants any more of this part, and the engine has been told. Only forecasts depend on it."""
        reservation = self._reservations.get(part_id)
        if reservation is not None:
            reservation.ending = True
            self.policy.ending(part_id)
            self._forecast_outdated = True

    def _places(self, sequences: int) -> int:
        # A request of more sequences than the batch has places takes them all; the rest wait inside the
        # engine.
        return min(sequences, self.max_num_seqs)

    def _has_room(self, ask: Ask) -> bool:
        return (
            self._open
            and self._reserved_sequences + self._places(ask.sequences) <= self.max_num_seqs
            and self.policy.fits(ask.parts, self.free_blocks)
        )

    def _reserve(self, ask: Ask, now: float) -> None:
        for part in ask.parts:
            assert part.part_id not in self._reservations
            blocks = 0 if self.policy.grows else part.blocks
            cost = self._predicted_cost(part)
            self._reservations[part.part_id] = _Reservation(ask, part, blocks, now, cost)
            self.reserved_blocks += blocks
            self.policy.came_in(part)
        self._sequences[ask.ask_id] = ask.sequences
        self._reserved_sequences += self._places(ask.sequences)
        self._forecast_outdated = True

    def _patience(self, ask: Ask) -> float:
        """Seconds that it may wait."""
        return min(self.max_queue_seconds, ask.timeout_seconds)

    def _waiting(self, ask: Ask, now: float) -> Waiting[Ask]:
        return Waiting(
            ask_id=ask.ask_id,
            tenant=ask.tenant,
            priority=ask.priority,
            cost=sum(map(self._predicted_cost, ask.parts)),
            arrived_at=now,
            deadline=now + self._patience(ask),
            ask=ask,
        )

    def _enqueue(self, ask: Ask, now: float) -> None:
        self._queue.push(self._waiting(ask, now))
        self.queued_blocks += ask.blocks

    def _admit_from_queue(self, now: float) -> list[Ask]:
        admitted: list[Ask] = []
        while (ask := self._next_that_fits(now)) is not None:
            self._queue.take(ask.ask_id, now)
            self.queued_blocks -= ask.blocks
            self._reserve(ask, now)
            admitted.append(ask)
        return admitted

    def _next_that_fits(self, now: float) -> Ask | None:
        if not self._open:
            return None
        for waiting in islice(self._queue.candidates(now), _CANDIDATES):
            if self._has_room(waiting.ask):
                return waiting.ask
        return None

    def _predicted_cost(self, part: Part) -> float:
        """Block-seconds, as the learned length and the measured pace have them, and its prefill."""
        seconds = self.pace.decode_seconds(self._tokens_left(part, 0))
        return self.policy.footprint(part, 0) * seconds + self._prefill_cost(part)

    def _prefill_cost(self, part: Part) -> float:
        # While a prompt is computed the others wait for it: it is charged as if it had the whole cache.
        return self.num_blocks * self.pace.prefill_seconds(part.prompt_tokens)

    def _settle(self, reservation: _Reservation, now: float) -> None:
        """Charge the tenant what it really took."""
        part, tokens = reservation.part, reservation.generated_tokens
        blocks = self.policy.mean_blocks(part, tokens)
        cost = blocks * (now - reservation.since) + (self._prefill_cost(part) if tokens else 0.0)
        self._queue.settle(reservation.ask.tenant, reservation.predicted_cost, cost)

    def _forecast_at(self, now: float) -> Forecast:
        """The forecast at the queue's tail.

        Made anew when something has changed; with many in the house, at most once in a few steps, so that a
        crowd's arrivals cost a walk each and not a replay of the whole queue.
        """
        forecast = self._forecast
        if forecast is not None and self._forecast_outdated:
            many = len(self._queue) + len(self._reservations) > _MANY
            if not many or now - self._forecast_made_at > _FRESH_STEPS * self.pace.decode_seconds(1):
                forecast = None
        if forecast is None:
            forecast = self._forecast = self._make_forecast(now)
            self._forecast_made_at, self._forecast_outdated = now, False
        return forecast

    def _make_forecast(self, now: float) -> Forecast:
        footprints = {
            part_id: self.policy.footprint(reservation.part, reservation.generated_tokens)
            for part_id, reservation in self._reservations.items()
        }
        forecast = Forecast(
            self.pace,
            now=now,
            free_blocks=self.policy.free_for_forecast(sum(footprints.values()), self.free_blocks),
            free_sequences=self.max_num_seqs - self._reserved_sequences,
        )
        places_left = {ask_id: self._places(left) for ask_id, left in self._sequences.items()}
        for part_id, reservation in self._reservations.items():
            part, generated, ending = reservation.part, reservation.generated_tokens, reservation.ending
            ask_id = reservation.ask.ask_id
            places = min(part.sequences, places_left[ask_id])
            places_left[ask_id] -= places
            forecast.running(
                blocks=footprints[part_id],
                sequences=places,
                prompt_tokens_left=0 if generated or ending else part.prompt_tokens,
                tokens_left=1 if ending else self._tokens_left(part, generated),
                since=now,
            )
        for waiting in self._queue.in_turn(now):
            self._foresee(forecast, waiting.ask)
        return forecast

    def _foresee(self, forecast: Forecast, ask: Ask) -> None:
        places_left = self._places(ask.sequences)
        footprints = [self.policy.footprint(part, 0) for part in ask.parts]
        since = forecast.let_in(sum(footprints), places_left)
        for part, footprint in zip(ask.parts, footprints, strict=True):
            places = min(part.sequences, places_left)
            places_left -= places
            forecast.running(
                blocks=footprint,
                sequences=places,
                prompt_tokens_left=part.prompt_tokens,
                tokens_left=self._tokens_left(part, 0),
                since=since,
            )

    def _tokens_left(self, part: Part, generated: int) -> float:
        left = max(part.max_tokens - generated, 1)
        if self.lengths is None:
            return left
        return self.lengths.of(part.prompt_tokens, part.tenant).mean_left(generated, left)
