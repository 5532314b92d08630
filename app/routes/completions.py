"""POST /v1/completions and POST /v1/chat/completions: the whole life of a request, as HTTP sees it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from app import logs
from app.assembly import RequestAssembly
from app.protocol.requests import ChatCompletionRequest, CompletionRequest
from app.protocol.responses import ChatCompletionChunk, ChatCompletionResponse, CompletionResponse
from app.responses import AnswerFormat, ChatFormat, CompletionFormat
from app.routes.documentation import describe_call
from app.routes.services import Services
from app.streaming import EventStream, collect, price_headers, while_connected
from app.validation import Limits, ValidRequest, request_timeout, validate_chat, validate_completion
from model_runner.async_engine import Submission
from model_runner.errors import ClientError, LoadError
from model_runner.tokenizer import Tokenizer

T = TypeVar("T")
Validate: TypeAlias = Callable[[bytes, Limits, Tokenizer], ValidRequest]


@dataclass(frozen=True, slots=True)
class Call:
    """How the two calls differ."""

    validate: Validate
    answer: type[AnswerFormat]
    id_prefix: str
    wire: tuple[type[BaseModel], type[BaseModel], type[BaseModel]]  # request, whole answer, chunk


COMPLETION = Call(
    validate_completion,
    CompletionFormat,
    "cmpl-",
    (CompletionRequest, CompletionResponse, CompletionResponse),
)
CHAT = Call(
    validate_chat,
    ChatFormat,
    "chatcmpl-",
    (ChatCompletionRequest, ChatCompletionResponse, ChatCompletionChunk),
)


@dataclass(frozen=True, slots=True)
class Caller:
    """What the headers say: who asks, and how long it would wait for room (None: as long as anybody may)."""

    tenant: str
    timeout_seconds: float | None


def completions_router(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["completions"])

    @router.post("/completions", **describe_call(*COMPLETION.wire))
    async def create_completion(request: Request) -> Response:
        """Continue a prompt, or several."""
        return await answer(COMPLETION, request, services)

    @router.post("/chat/completions", **describe_call(*CHAT.wire))
    async def create_chat_completion(request: Request) -> Response:
        """Write the assistant's next message."""
        return await answer(CHAT, request, services)

    return router


async def answer(call: Call, request: Request, services: Services) -> Response:
    """Raises ClientError, LoadError, ServerFault: app.errors has the status of each."""
    caller, valid = await prepare(call, request, services)
    request_id: str = request.state.request_id
    unique = uuid.uuid4().hex
    # A client may send the same x-request-id twice; the engine must not see it twice.
    own_id = f"{request_id}.{unique[:8]}" if request.state.request_id_was_given else request_id
    submission = make_submission(own_id, valid, caller)
    try:
        stream = services.engine.submit(submission)
    except (ClientError, LoadError) as error:
        logs.refusal(request_id, error, caller.tenant)
        raise
    assembly = RequestAssembly(services.tokenizer, valid, stream)
    written = call.answer(call.id_prefix + unique, valid, services.tokenizer)
    if valid.stream:
        return EventStream(stream, assembly, written, request_id)
    choices = len(valid.prompts) * valid.params.n
    body = await while_connected(request.receive, stream, collect(stream, assembly, written, choices))
    return Response(body, headers=price_headers(stream), media_type="application/json")


async def prepare(call: Call, request: Request, services: Services) -> tuple[Caller, ValidRequest]:
    """What comes before the door. The door counts what it decides; what never reaches it is counted here."""
    caller = None
    try:
        caller = identify(request, services)
        services.tenancy.count_request(caller.tenant)
        return caller, await read_and_validate(call.validate, request, services)
    except (ClientError, LoadError) as error:
        services.metrics.decided("rejected", error.reason.value, 0)
        logs.refusal(request.state.request_id, error, caller.tenant if caller else None)
        raise


def identify(request: Request, services: Services) -> Caller:
    """From the headers. Raises InvalidRequest, which names the one at fault."""
    holder: str | None = getattr(request.state, "key_holder", None)
    return Caller(
        services.tenancy.tenant_of(holder, request.headers),
        request_timeout(request.headers, services.settings.max_queue_seconds),
    )


async def read_and_validate(
    validate: Callable[[bytes, Limits, Tokenizer], T], request: Request, services: Services
) -> T:
    """The body, bounded in bytes, in time and in company. Raises ClientError and LoadError."""
    with services.preparation.enter() as lease:
        body = await lease.read_body(request)
        return await services.preparation.run(
            partial(validate, body, services.limits, services.tokenizer), len(body)
        )


def make_submission(request_id: str, valid: ValidRequest, caller: Caller) -> Submission:
    return Submission(
        request_id=request_id,
        prompts=valid.prompts,
        params=valid.params,
        streaming=valid.stream,
        stop_strings=bool(valid.stops),
        tenant=caller.tenant,
        priority=valid.priority,
        timeout_seconds=caller.timeout_seconds,
    )
