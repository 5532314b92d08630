"""What clients read of the door and its queue."""

from __future__ import annotations

from typing import Literal

from app.protocol.responses import Answer


class WaitingRequest(Answer):
    place: int  # in turn, of all that wait; the next has 1
    request_id: str
    tenant: str
    priority: int
    waited_seconds: float
    projected_bytes: int
    waits_for: Literal["engine_restarting", "behind_others", "no_place_in_batch", "no_room_in_cache", "next"]
    expected_in_seconds: float
    deadline_in_seconds: float


class Admission(Answer):
    object: Literal["admission"]
    policy: Literal["strict", "predictive"]
    state: str
    kv_budget_bytes: int
    reserved_bytes: int
    used_bytes: int
    free_bytes: int
    predicted_peak_bytes: int
    overflow_risk: float | None
    margin_deviations: float | None
    running_requests: int
    waiting_requests: int
    waiting: list[WaitingRequest]
    more: int  # of the caller's own that wait, and are not listed
    others: int  # that wait, of other tenants
