"""For those who run the server: probes, metrics, version. Never guarded by a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from app.errors import json_response
from app.protocol.responses import Health, Version
from app.routes.documentation import describe_errors
from app.routes.services import Services
from app.version import plimsoll_version
from model_runner.async_engine import EngineState
from model_runner.errors import Draining, EngineRestarting, LoadError, Starting

OPERATIONS = frozenset({"/healthz", "/readyz", "/health", "/version", "/metrics"})
PROBE_RETRY_SECONDS = 1.0  # when a probe may look again

# Merely full is ready: a queue is no reason to take a server out of its pool.
_NOT_READY: dict[EngineState, tuple[type[LoadError], str]] = {
    EngineState.STARTING: (Starting, "The engine is starting."),
    EngineState.RESTARTING: (EngineRestarting, "The engine is being started again."),
    EngineState.STUCK: (EngineRestarting, "The engine makes no progress."),
    EngineState.FAILED: (EngineRestarting, "The engine could not be started again."),
    EngineState.DRAINING: (Draining, "The server is shutting down."),
    EngineState.STOPPED: (Draining, "The server has shut down."),
}


def operations_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["operations"])

    async def healthz() -> Response:
        """The process answers."""
        return json_response({"status": "ok"})

    async def readyz() -> Response:
        """The engine makes progress. 503 while it starts, restarts, drains or is stuck; not when full."""
        state = services.engine.state
        if state in _NOT_READY:
            error, message = _NOT_READY[state]
            raise error(message, retry_after_seconds=PROBE_RETRY_SECONDS)
        return json_response({"status": "ready"})

    async def version() -> Response:
        """Which Plimsoll this is."""
        return json_response({"version": plimsoll_version()})

    async def metrics() -> Response:
        """For Prometheus."""
        page, content_type = services.metrics.render()
        return Response(page, headers={"content-type": content_type})

    ready: dict[int | str, dict[str, Any]] = {200: {"model": Health}, **describe_errors(503)}
    routes: list[tuple[str, Callable[..., Any], dict[int | str, dict[str, Any]]]] = [
        ("/healthz", healthz, {200: {"model": Health}}),
        ("/readyz", readyz, ready),
        ("/health", readyz, ready),
        ("/version", version, {200: {"model": Version}}),
        ("/metrics", metrics, {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}),
    ]
    for path, endpoint, responses in routes:
        router.add_api_route(path, endpoint, methods=["GET"], response_model=None, responses=responses)
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
    return router
