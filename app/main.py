"""The HTTP application, put together from its parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response

from app.errors import error_response, http_error_response
from app.metrics import Metrics
from app.middleware import Authentication, ConnectionLimit, RequestContext
from app.preparation import ClientDisconnected, Preparation
from app.routes.admission import admission_router
from app.routes.capacity import capacity_router
from app.routes.completions import completions_router
from app.routes.documentation import describe
from app.routes.models import models_router
from app.routes.operations import OPERATIONS, operations_router
from app.routes.services import Services
from app.settings import Settings
from app.tenancy import Tenancy
from app.version import plimsoll_version
from model_runner.async_engine import AsyncEngine
from model_runner.errors import PlimsollError, Reason
from model_runner.tokenizer import Tokenizer

_CLIENT_CLOSED_REQUEST = 499  # nginx's; it is only ever seen in an access log


def create_app(*, engine: AsyncEngine, tokenizer: Tokenizer, settings: Settings, metrics: Metrics) -> FastAPI:
    """The application for an engine whose `model` is known; it may still be loading.

    Starting and stopping the engine is the caller's affair.
    """
    preparation = Preparation(
        max_request_bytes=settings.max_request_bytes, threads=settings.max_concurrent_tokenizations
    )
    tenancy = Tenancy(
        api_keys=settings.api_keys, described=settings.tenants, header=settings.tenant_header or None
    )
    services = Services(engine, tokenizer, settings, metrics, preparation, tenancy)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        preparation.close()

    app = FastAPI(
        title="Plimsoll",
        description="Completions over the OpenAI HTTP API, priced in bytes of KV cache before they run.",
        version=plimsoll_version(),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(RequestContext),
            Middleware(
                ConnectionLimit,
                always_answered=OPERATIONS,
                on_refusal=partial(metrics.decided, "rejected", Reason.TOO_MANY_CONNECTIONS.value, 0),
            ),
            Middleware(
                Authentication,
                tenancy=tenancy,
                on_refusal=partial(metrics.decided, "rejected", Reason.INVALID_API_KEY.value, 0),
            ),
        ],
    )
    for make_router in (
        completions_router,
        admission_router,
        capacity_router,
        models_router,
        operations_router,
    ):
        app.include_router(make_router(services))
    _answer_errors(app)

    @cache
    def openapi() -> dict[str, Any]:
        return describe(app, has_keys=settings.has_keys)

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(PlimsollError)
    async def refused(request: Request, error: PlimsollError) -> Response:
        return error_response(error, request.state.request_id)

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: HTTPException) -> Response:
        return http_error_response(error, request.method, request.url.path)

    @app.exception_handler(ClientDisconnected)
    async def gone(_: Request, __: ClientDisconnected) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
