"""What is reserved, by whom: blocks of the cache, and places in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from model_runner.core.policy import Part
from model_runner.core.tenants import DEFAULT_TENANT


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


@dataclass(slots=True)
class Reservation:
    """One part that has been let in."""

    ask: Ask
    part: Part
    blocks: int
    since: float  # when it came to hold so many; seconds on the caller's clock
    predicted_cost: float
    generated_tokens: int = 0
    ending: bool = False  # nobody wants more of it: the engine gives its blocks back in its next step
    block_seconds_before: float = 0.0  # up to `since`

    def block_seconds(self, now: float) -> float:
        """Its blocks, summed over the time for which it has held them."""
        return self.block_seconds_before + self.blocks * (now - self.since)


class Ledger:
    """Holds `reserved_blocks == sum of the reservations' blocks`, and the same of places.

    A request takes as many places in the batch as it has sequences; one of more sequences than the batch has
    places takes them all, and the rest wait inside the engine.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.reserved_blocks = 0
        self.reserved_places = 0
        self.reservations: dict[str, Reservation] = {}  # by part_id
        self._sequences: dict[str, int] = {}  # by ask_id: those of its parts that are not yet released

    def places(self, sequences: int) -> int:
        return min(sequences, self.max_num_seqs)

    def has_places(self, sequences: int) -> bool:
        return self.reserved_places + self.places(sequences) <= self.max_num_seqs

    def open(self, ask: Ask, reservations: list[Reservation]) -> None:
        for reservation in reservations:
            part_id = reservation.part.part_id
            assert part_id not in self.reservations
            self.reservations[part_id] = reservation
            self.reserved_blocks += reservation.blocks
        self._sequences[ask.ask_id] = ask.sequences
        self.reserved_places += self.places(ask.sequences)

    def grant(self, part_id: str, blocks: int, now: float) -> None:
        """From now on it is so many. Raises KeyError for a part that holds no reservation."""
        reservation = self.reservations[part_id]
        self.reserved_blocks += blocks - reservation.blocks
        reservation.block_seconds_before = reservation.block_seconds(now)
        reservation.blocks, reservation.since = blocks, now

    def close(self, part_id: str) -> Reservation:
        """Raises KeyError for a part that holds no reservation: ledger and engine disagree."""
        reservation = self.reservations.pop(part_id)
        self.reserved_blocks -= reservation.blocks
        ask_id = reservation.ask.ask_id
        left = self._sequences.pop(ask_id)
        self.reserved_places -= self.places(left)
        left -= reservation.part.sequences
        if left:
            self._sequences[ask_id] = left
            self.reserved_places += self.places(left)
        return reservation

    def clear(self) -> None:
        self.reservations.clear()
        self._sequences.clear()
        self.reserved_blocks = self.reserved_places = 0

    def with_places(self) -> Iterator[tuple[Reservation, int]]:
        """Every reservation, and the places that its end gives back."""
        left = {ask_id: self.places(sequences) for ask_id, sequences in self._sequences.items()}
        for reservation in self.reservations.values():
            ask_id = reservation.ask.ask_id
            places = min(reservation.part.sequences, left[ask_id])
            left[ask_id] -= places
            yield reservation, places
