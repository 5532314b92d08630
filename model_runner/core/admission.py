"""The door: who may come in now, who waits, and who is turned away. Nothing here runs a model.

A request comes in whole or not at all: when there are places for it in the batch, and room in the cache as
the policy sees it. `decide` answers one of three, and the caller must

    Admitted   hand the request's parts to the engine: its reservation stands from this moment;
    Queued     wait: some later `release`, `cancel`, `expire` or `open` will name it among those let in,
               or `expire` will name it among those too late;
    Rejected   say so to the client; nothing was reserved, nothing is remembered.

Whose turn it is, the fair queue says: first come, first served, within a tenant. A small request may pass one
that doesn't fit yet, a bounded number of times; then the room that comes free is kept for that one, and since
none is larger than the whole budget each gets its turn.

A reservation is the request's whole price from the start, or what the engine says that it has granted it
(`grant`), as the policy has it. It ends with `release`, on the engine's word that the blocks are back, or
with `close`, when that engine is dead and its memory gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from model_runner.core.fair_queue import FairQueue, Waiting
from model_runner.core.ledger import Ask, Ledger, Reservation
from model_runner.core.lengths import Lengths
from model_runner.core.obstacles import InTurn, Obstacle
from model_runner.core.pace import Pace
from model_runner.core.policy import Part, Policy, Predictive, Strict
from model_runner.core.tenant_shares import TenantShares
from model_runner.core.tenants import Tenants
from model_runner.core.waits import Waits
from model_runner.errors import Reason

MAX_PASSES = 8  # what a server allows
# The share of what it may wait after which nothing passes a request any more, and its priority rises.
_AGING_SHARE = 0.25
_CANDIDATES = 8  # looked at, each time, for one that fits


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


class AdmissionController:
    """The door, with the ledger of reservations and the queue before it. Holds
    `0 <= reserved_blocks <= num_blocks`."""

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
    ) -> None:
        """`lengths` is told of all answers and asked how long those that run may still take; without it
        everyone is taken to run to max_tokens. `max_passes`: how often a waiting request that doesn't fit
        yet may be passed by those that do."""
        self.policy: Policy = policy or Strict()
        self.lengths = lengths
        self.tenants = tenants or Tenants()
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.max_queue_requests = max_queue_requests
        self.max_queue_seconds = max_queue_seconds
        self.queued_blocks = 0
        self.ledger = Ledger(max_num_seqs)
        self._waits = Waits(self.ledger, self.policy, pace, lengths)
        self._open = False
        self._queue: FairQueue[Ask] = FairQueue(
            self.tenants,
            aging_seconds=max(_AGING_SHARE * max_queue_seconds, 0.1),
            max_passes=max_passes,
        )
        self.shares = TenantShares(self.tenants, num_blocks)

    @property
    def pace(self) -> Pace:
        return self._waits.pace

    @pace.setter
    def pace(self, pace: Pace) -> None:
        self._waits.pace = pace

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    @property
    def reserved_blocks(self) -> int:
        return self.ledger.reserved_blocks

    @property
    def free_blocks(self) -> int:
        return self.num_blocks - self.ledger.reserved_blocks

    @property
    def reserved_sequences(self) -> int:
        return self.ledger.reserved_places

    def reservations(self) -> dict[str, int]:
        """Blocks by part_id."""
        return {part_id: one.blocks for part_id, one in self.ledger.reservations.items()}

    @property
    def predicted_peak_blocks(self) -> float:
        """What the policy foresees that will be held at most, but for the stated risk; may pass the line."""
        policy = self.policy
        return policy.predicted_peak_blocks if isinstance(policy, Predictive) else self.reserved_blocks

    def queue_lengths(self) -> dict[str, int]:
        """Requests that wait, by tenant."""
        return self._queue.lengths()

    def queue_in_turn(self, now: float, most: int) -> list[InTurn]:
        """The first `most`. Those behind candidates that may not be passed wait for them."""
        queue = list(islice(self._queue.in_turn(now), most))
        candidates = {each.ask_id for each in islice(self._queue.candidates(now), _CANDIDATES)}
        seconds = self._waits.let_in([each.ask for each in queue], self.free_blocks, now)
        return [
            InTurn(each, self._obstacle(each.ask, each.ask_id in candidates), wait)
            for each, wait in zip(queue, seconds, strict=True)
        ]

    def queued_ask_ids(self, now: float) -> list[str]:
        """In turn."""
        return [waiting.ask_id for waiting in self._queue.in_turn(now)]

    # ---- at the door

    def decide(self, ask: Ask, now: float) -> Decision:
        decision = self.judge(ask, now)
        if isinstance(decision, Admitted):
            self._reserve(ask, now)
        elif isinstance(decision, Queued):
            turn = self._queue.turn_of_next(ask.tenant, ask.priority)
            self._queue.push(self._waiting(ask, now))
            self.queued_blocks += ask.blocks
            self._waits.joined(ask, turn)
        if not isinstance(decision, Rejected):
            self.shares.take(ask.tenant, ask.blocks)
        return decision

    def judge(self, ask: Ask, now: float) -> Decision:
        """What `decide` would answer. Nothing is reserved, nothing is remembered."""
        tenant = self.tenants[ask.tenant]
        if ask.blocks > self.shares.most(ask.tenant):
            return Rejected(Reason.KV_CACHE_BUDGET_EXCEEDED, float("inf"))
        if ask.blocks > self.shares.left(ask.tenant):
            return Rejected(Reason.TENANT_OVER_LIMIT, self.predict_wait(ask, now))
        if not self._queue and self._has_room(ask):
            return Admitted()
        wait = self.predict_wait(ask, now)
        if len(self._queue) >= self.max_queue_requests:
            return Rejected(Reason.QUEUE_FULL, wait)
        most = tenant.max_queued_requests
        if most is not None and self._queue.length_of(ask.tenant) >= most:
            return Rejected(Reason.TENANT_QUEUE_FULL, wait)
        if wait > self.patience(ask):
            return Rejected(Reason.WAIT_TOO_LONG, wait)
        return Queued(wait)

    def has_place_for(self, sequences: int) -> bool:
        """Whether nobody waits, and the batch has room for so many more: only bytes would be in the way."""
        return self._open and not self._queue and self.ledger.has_places(sequences)

    def predict_wait(self, ask: Ask, now: float) -> float:
        """Seconds until there would be room for `ask`, behind those of whom it would be the turn before."""
        queue = ((turn, waiting.ask) for turn, waiting in self._queue.turns(now))
        return self._waits.predict(
            ask,
            self._queue.turn_of_next(ask.tenant, ask.priority),
            queue,
            num_waiting=len(self._queue),
            free_blocks=self.free_blocks,
            now=now,
        )

    def predict_tokens(self, ask: Ask) -> float:
        """Of all its answers together, as long as such answers have been so far."""
        return sum(self._waits.tokens_left(part, 0) * part.sequences for part in ask.parts)

    def patience(self, ask: Ask) -> float:
        """Seconds that it may wait."""
        return min(self.max_queue_seconds, ask.timeout_seconds)

    # ---- from the engine

    def open(self, now: float) -> list[Ask]:
        """An engine is there. Returns those let in."""
        self._open = True
        return self._admit_from_queue(now)

    def close(self) -> None:
        """The engine is gone and every block with it; nothing is let in until `open`."""
        self._open = False
        for part_id, reservation in self.ledger.reservations.items():
            self.policy.left(part_id)
            self.shares.give_back(reservation.ask.tenant, reservation.part.blocks)
        self.ledger.clear()
        self._waits.forget()

    def requeue(self, asks: Sequence[Ask], now: float) -> None:
        """To the queue's head, in this order, with a new deadline: they had been let in once."""
        self._queue.push_front([self._waiting(ask, now) for ask in asks])
        for ask in asks:
            self.queued_blocks += ask.blocks
            self.shares.take(ask.tenant, ask.blocks)
        self._waits.changed()

    def release(self, part_ids: Iterable[str], now: float) -> list[Ask]:
        """The engine says that these parts' blocks are back in its pool. Returns those let in by it.

        Raises KeyError for a part that holds no reservation: ledger and engine disagree.
        """
        for part_id in part_ids:
            reservation = self.ledger.close(part_id)
            self.shares.give_back(reservation.ask.tenant, reservation.part.blocks)
            self._settle(reservation, now)
            self.policy.left(part_id)
        self._waits.changed()
        return self._admit_from_queue(now)

    def grant(self, grants: Iterable[tuple[str, int]], now: float) -> None:
        """The engine says what these parts may hold from now on. One step's grants and releases come
        together: only their sum stays under the line.

        Raises KeyError for a part that was never let in.
        """
        for part_id, blocks in grants:
            self.ledger.grant(part_id, blocks, now)
            self.policy.granted(part_id, blocks)

    def progress(self, part_id: str, generated_tokens: int, more: int = 1) -> None:
        """A choice of a running part has come so far, by so many tokens `more`."""
        reservation = self.ledger.reservations.get(part_id)
        if reservation is None:
            return
        if self.lengths is not None:
            part = reservation.part
            self.lengths.of(part.prompt_tokens, part.tenant).drawn(generated_tokens, more)
        if generated_tokens > reservation.generated_tokens:
            reservation.generated_tokens = generated_tokens
            self.policy.progressed(part_id, generated_tokens)
            self._waits.changed()

    def ended(self, part: Part, generated_tokens: int) -> None:
        """A choice has come to an end of itself: by a token or a string that stops it."""
        if self.lengths is not None:
            self.lengths.of(part.prompt_tokens, part.tenant).ended(generated_tokens)

    def ending(self, part_id: str) -> None:
        """Nobody wants any more of this part, and the engine has been told. Only forecasts depend on it."""
        reservation = self.ledger.reservations.get(part_id)
        if reservation is not None:
            reservation.ending = True
            self.policy.ending(part_id)
            self._waits.changed()

    # ---- leaving the queue

    def cancel(self, ask_id: str, now: float) -> list[Ask]:
        """Leave the queue. Returns those let in by it; the head's going may open the way for the next."""
        waiting = self._queue.remove(ask_id)
        if waiting is None:
            return []
        self._left_queue(waiting.ask)
        return self._admit_from_queue(now)

    def expire(self, now: float) -> tuple[list[Ask], list[Ask]]:
        """(those whose deadline in the queue has passed, those let in by their going)."""
        late = [waiting.ask for waiting in self._queue.expire(now)]
        if not late:
            return [], []
        for ask in late:
            self._left_queue(ask)
        return late, self._admit_from_queue(now)

    # ---- within

    def _left_queue(self, ask: Ask) -> None:
        self.queued_blocks -= ask.blocks
        self.shares.give_back(ask.tenant, ask.blocks)
        self._waits.changed()

    def _has_room(self, ask: Ask) -> bool:
        return (
            self._open
            and self.ledger.has_places(ask.sequences)
            and self.policy.fits(ask.parts, self.free_blocks)
        )

    def _obstacle(self, ask: Ask, is_candidate: bool) -> Obstacle:
        if not self._open:
            return Obstacle.ENGINE
        if not is_candidate:
            return Obstacle.OTHERS
        if not self.ledger.has_places(ask.sequences):
            return Obstacle.PLACES
        return Obstacle.NONE if self.policy.fits(ask.parts, self.free_blocks) else Obstacle.ROOM

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

    def _reserve(self, ask: Ask, now: float) -> None:
        reservations = [
            Reservation(
                ask,
                part,
                blocks=0 if self.policy.grows else part.blocks,
                since=now,
                predicted_cost=self._predicted_cost(part),
            )
            for part in ask.parts
        ]
        self.ledger.open(ask, reservations)
        for part in ask.parts:
            self.policy.came_in(part)
        self._waits.changed()

    def _waiting(self, ask: Ask, now: float) -> Waiting[Ask]:
        return Waiting(
            ask_id=ask.ask_id,
            tenant=ask.tenant,
            priority=ask.priority,
            cost=sum(map(self._predicted_cost, ask.parts)),
            arrived_at=now,
            deadline=now + self.patience(ask),
            ask=ask,
        )

    def _predicted_cost(self, part: Part) -> float:
        """Block-seconds, as the learned length and the measured pace have them, and its prefill."""
        seconds = self.pace.decode_seconds(self._waits.tokens_left(part, 0))
        return self.policy.footprint(part, 0) * seconds + self._prefill_cost(part)

    def _prefill_cost(self, part: Part) -> float:
        # While a prompt is computed the others wait for it: it is charged as if it had the whole cache.
        return self.num_blocks * self.pace.prefill_seconds(part.prompt_tokens)

    def _settle(self, reservation: Reservation, now: float) -> None:
        """Charge the tenant what it really took."""
        cost = reservation.block_seconds(now)
        cost += self._prefill_cost(reservation.part) if reservation.generated_tokens else 0.0
        self._queue.settle(reservation.ask.tenant, reservation.predicted_cost, cost)
