"""From what became of every request to the figures of a policy.

output_tokens_per_second      tokens delivered / seconds from the first arrival to the last ending
goodput_requests_per_second   requests that ended within both limits / the same seconds
ttft_seconds                  from arrival to the first token, of those that got one
itl_seconds                   between two tokens of one answer, pauses of held and preempted ones included
preempted_requests_ratio      of those let in: preempted once or more
recomputed_tokens_ratio       tokens computed again / tokens delivered
kv_utilization_ratio          blocks held / blocks there, in the mean over time
rejected_ratio                of all: refused at the door, or dropped from the queue at their deadline
wait_prediction_error         median of |predicted - actual| / actual, of those that waited and came in
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from model_runner.percentiles import Percentiles, percentiles
from model_runner.replay.simulation import Course
from model_runner.replay.trace import Record


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """A request is good that meets both. Seconds."""

    ttft: float
    itl: float  # no gap between two tokens is longer

    def is_met_by(self, record: Record) -> bool:
        ttft = record.ttft_seconds
        if not record.completed or ttft is None:
            return False
        return ttft <= self.ttft and record.longest_gap_seconds <= self.itl


class TenantFigures(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    completed_requests: int
    output_tokens: int
    goodput_requests_per_second: float
    ttft_seconds: Percentiles | None
    rejected_ratio: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one policy over one trace. Times are seconds; ratios of nothing are 0."""

    requests: int
    completed_requests: int
    refused_requests: int  # at the door
    dropped_requests: int  # from the queue, at their deadline
    seconds: float
    steps: int
    output_tokens: int
    output_tokens_per_second: float
    requests_per_second: float  # completed
    goodput_requests_per_second: float
    ttft_seconds: Percentiles | None
    itl_seconds: Percentiles | None
    queue_seconds: Percentiles | None  # of those let in
    preempted_requests_ratio: float
    recomputed_tokens_ratio: float
    held_tokens_ratio: float  # steps that sequences were held for / tokens delivered
    kv_utilization_ratio: float
    rejected_ratio: float
    wait_prediction_error: float | None  # None where nobody waited
    known_prefix_ratio: float  # of the pieces of prompts: those that their replica had seen before
    tenants: dict[str, TenantFigures] | None  # None of a single one


def figures_of(course: Course, slo: Slo) -> Figures:
    records, seconds = course.records, course.seconds
    let_in = [record for record in records if record.admitted_at is not None]
    tokens = sum(record.tokens for record in records)
    completed = sum(record.completed for record in records)
    refused = sum(record.refused for record in records)
    dropped = sum(not record.refused and record.error is not None for record in records)
    assert completed + refused + dropped == len(records), "every request has one ending"
    good = sum(map(slo.is_met_by, records))
    gaps = np.concatenate([np.asarray(tally.gaps) for tally in course.tallies])
    return Figures(
        requests=len(records),
        completed_requests=completed,
        refused_requests=refused,
        dropped_requests=dropped,
        seconds=seconds,
        steps=course.steps,
        output_tokens=tokens,
        output_tokens_per_second=_ratio(tokens, seconds),
        requests_per_second=_ratio(completed, seconds),
        goodput_requests_per_second=_ratio(good, seconds),
        ttft_seconds=_ttft(records),
        itl_seconds=percentiles(gaps),
        queue_seconds=percentiles([_waited(record) for record in let_in]),
        preempted_requests_ratio=_ratio(sum(record.preemptions > 0 for record in let_in), len(let_in)),
        recomputed_tokens_ratio=_ratio(course.recomputed_tokens, tokens),
        held_tokens_ratio=_ratio(course.held_sequence_steps, tokens),
        kv_utilization_ratio=course.kv_utilization,
        rejected_ratio=_ratio(refused + dropped, len(records)),
        wait_prediction_error=_wait_error(let_in),
        known_prefix_ratio=course.known_prefix_ratio,
        tenants=_by_tenant(records, seconds, slo),
    )


def _by_tenant(records: Sequence[Record], seconds: float, slo: Slo) -> dict[str, TenantFigures] | None:
    names = sorted({record.row.tenant for record in records})
    if len(names) < 2:
        return None
    theirs: dict[str, list[Record]] = {name: [] for name in names}
    for record in records:
        theirs[record.row.tenant].append(record)
    return {
        name: TenantFigures(
            requests=len(own),
            completed_requests=sum(record.completed for record in own),
            output_tokens=sum(record.tokens for record in own),
            goodput_requests_per_second=_ratio(sum(map(slo.is_met_by, own)), seconds),
            ttft_seconds=_ttft(own),
            rejected_ratio=_ratio(sum(not record.completed for record in own), len(own)),
        )
        for name, own in theirs.items()
    }


def _ttft(records: Iterable[Record]) -> Percentiles | None:
    return percentiles([record.ttft_seconds for record in records if record.ttft_seconds is not None])


def _waited(record: Record) -> float:
    assert record.admitted_at is not None
    return record.admitted_at - record.row.arrives_at


def _wait_error(let_in: Iterable[Record]) -> float | None:
    errors = [
        abs(record.predicted_wait_seconds - _waited(record)) / _waited(record)
        for record in let_in
        if record.predicted_wait_seconds is not None and _waited(record) > 0
    ]
    return float(np.median(errors)) if errors else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
