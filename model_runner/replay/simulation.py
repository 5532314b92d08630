"""A trace played through one policy, on one replica of the server or on several behind a router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model_runner.replay.replica import POLICIES, Replica, Setting, Tally
from model_runner.replay.routing import make_router
from model_runner.replay.trace import Record, Row

__all__ = ["POLICIES", "Course", "Record", "Row", "Setting", "Simulation"]

_TOLD_EVERY = 16  # requests


@dataclass(slots=True)
class Course:
    """What a replay of one policy gave."""

    policy: str
    setting: Setting
    records: list[Record]  # in order of arrival
    tallies: list[Tally]  # of each replica
    seconds: float = 0.0  # from the first arrival to the last ending
    known_prefix_ratio: float = 0.0  # of the pieces of prompts: those that their replica had seen before

    @property
    def steps(self) -> int:
        return sum(tally.steps for tally in self.tallies)

    @property
    def recomputed_tokens(self) -> int:
        return sum(tally.recomputed_tokens for tally in self.tallies)

    @property
    def held_sequence_steps(self) -> int:
        return sum(tally.held_sequence_steps for tally in self.tallies)

    @property
    def kv_utilization(self) -> float:
        """Blocks held of those that exist, in the mean over time and replicas."""
        held = sum(tally.used_block_seconds for tally in self.tallies)
        there = self.setting.num_blocks * self.seconds * len(self.tallies)
        return held / there if there else 0.0


class Simulation:
    """One policy over one trace."""

    def __init__(
        self,
        rows: Sequence[Row],
        setting: Setting,
        policy: str,
        *,
        replicas: int = 1,
        routing: str = "round-robin",
    ) -> None:
        self._replicas = [Replica(setting, policy) for _ in range(replicas)]
        self._router = make_router(routing, self._replicas)
        records = [Record(row) for row in sorted(rows, key=lambda row: row.arrives_at)]
        self.course = Course(policy, setting, records, [each.tally for each in self._replicas])

    def run(self, on_progress: Callable[[int], None] = lambda ended: None) -> Course:
        """To the last ending. `on_progress` is told how many requests are through, now and then."""
        course = self.course
        for arrived, record in enumerate(course.records):
            for replica in self._replicas:
                replica.run_until(record.row.arrives_at)
            record.replica = self._router.choose(record.row)
            self._replicas[record.replica].arrive(record)
            if arrived % _TOLD_EVERY == 0:
                on_progress(arrived + 1 - self._live)
        for replica in self._replicas:
            replica.run_to_the_end(lambda: on_progress(len(course.records) - self._live))
        course.seconds = max((replica.now for replica in self._replicas), default=0.0)
        course.known_prefix_ratio = self._router.prefixes.known_ratio
        on_progress(len(course.records))
        return course

    @property
    def _live(self) -> int:
        return sum(replica.num_live for replica in self._replicas)
