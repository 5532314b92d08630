"""GET /v1/admission: the queue as it stands, and what the door goes by."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.errors import json_response
from app.protocol.admission import Admission
from app.routes.documentation import describe_errors
from app.routes.services import Services
from model_runner.core.door_view import QueueRow

# Of the queue as a whole, from its head: what is looked at is bounded, whoever asks. To say when one is
# expected in, all before it are played forward.
_ROWS = 100


def admission_router(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["capacity"])

    @router.get(
        "/admission", response_model=None, responses={200: {"model": Admission}, **describe_errors(400, 401)}
    )
    async def get_admission(request: Request) -> Response:
        """Who waits, in turn: for what, and when each is expected in. Of other tenants' requests, only how
        many."""
        holder: str | None = getattr(request.state, "key_holder", None)
        return json_response(_admission(services, services.tenancy.tenant_of(holder, request.headers)))

    return router


def _admission(services: Services, tenant: str) -> dict[str, Any]:
    engine = services.engine
    stats, door = engine.stats, engine.door
    own = [row for row in engine.queue(most=_ROWS) if row.tenant == tenant]
    waiting_of_own = door.queue_lengths.get(tenant, 0)
    return {
        "object": "admission",
        "policy": door.policy,
        "state": engine.state.value,
        "kv_budget_bytes": stats.kv_budget_bytes,
        "reserved_bytes": stats.reserved_bytes,
        "used_bytes": stats.used_bytes,
        "free_bytes": stats.free_bytes,
        "predicted_peak_bytes": round(door.predicted_peak_bytes),
        "overflow_risk": door.overflow_risk,
        "margin_deviations": door.margin_deviations,
        "running_requests": stats.running,
        "waiting_requests": stats.waiting,
        "waiting": [_row(row) for row in own],
        "more": waiting_of_own - len(own),
        "others": stats.waiting - waiting_of_own,
    }


def _row(row: QueueRow) -> dict[str, Any]:
    return {
        "place": row.place,
        "request_id": row.request_id,
        "tenant": row.tenant,
        "priority": row.priority,
        "waited_seconds": round(row.waited_seconds, 3),
        "projected_bytes": row.projected_bytes,
        "waits_for": row.waits_for.value,
        "expected_in_seconds": round(row.expected_in_seconds, 3),
        "deadline_in_seconds": round(row.deadline_in_seconds, 3),
    }
