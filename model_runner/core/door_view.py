"""What can be seen of the door from outside: its levels, and the queue as it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from model_runner.core.dispatcher import Dispatcher
from model_runner.core.obstacles import Obstacle
from model_runner.core.policy import Predictive


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorLevels:
    """`overflow_risk` is the share of requests that may be preempted in the long run, `margin_deviations` the
    distance from the line that keeps to it now; None of both in strict mode, which takes no risk."""

    policy: Literal["strict", "predictive"]
    predicted_peak_bytes: float  # strict: what is reserved
    overflow_risk: float | None
    margin_deviations: float | None
    queue_lengths: dict[str, int]  # by tenant, of those that have any
    byte_seconds: dict[str, float]  # by tenant: of the reservations that stand, up to now


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """One request that waits."""

    place: int  # in turn; the next has 1
    request_id: str
    tenant: str
    priority: int
    waited_seconds: float
    projected_bytes: int
    waits_for: Obstacle
    expected_in_seconds: float
    deadline_in_seconds: float


def door_levels(dispatcher: Dispatcher, now: float) -> DoorLevels:
    admission, block_bytes = dispatcher.admission, dispatcher.layout.block_bytes
    policy = admission.policy
    byte_seconds: dict[str, float] = {}
    for one in admission.ledger.reservations.values():
        tenant = one.ask.tenant
        byte_seconds[tenant] = byte_seconds.get(tenant, 0.0) + one.block_seconds(now) * block_bytes
    predictive = policy if isinstance(policy, Predictive) else None
    return DoorLevels(
        policy="strict" if predictive is None else "predictive",
        predicted_peak_bytes=admission.predicted_peak_blocks * block_bytes,
        overflow_risk=None if predictive is None else predictive.risk.share,
        margin_deviations=None if predictive is None else predictive.margin_deviations,
        queue_lengths=admission.queue_lengths(),
        byte_seconds=byte_seconds,
    )


def queue_rows(dispatcher: Dispatcher, now: float, *, most: int) -> list[QueueRow]:
    """The first `most` of all that wait, in turn."""
    rows = []
    for place, each in enumerate(dispatcher.admission.queue_in_turn(now, most), start=1):
        request = dispatcher.live(each.waiting.ask_id)
        rows.append(
            QueueRow(
                place=place,
                request_id=request.submission.request_id,
                tenant=request.ask.tenant,
                priority=request.ask.priority,
                waited_seconds=now - request.arrived_at,
                projected_bytes=request.projected_bytes,
                waits_for=each.obstacle,
                expected_in_seconds=each.expected_in_seconds,
                deadline_in_seconds=each.waiting.deadline - now,
            )
        )
    return rows
