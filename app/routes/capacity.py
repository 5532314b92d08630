"""GET /v1/capacity: what this server can hold. POST /v1/admission/check: what would become of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from app.capacity import About, capacity_fields
from app.errors import error_body, json_response, status_and_type
from app.protocol.capacity import AdmissionCheck, Capacity
from app.protocol.requests import ChatCompletionRequest, CompletionRequest
from app.routes.completions import CHAT, COMPLETION, identify, make_submission, read_and_validate
from app.routes.documentation import describe_check, describe_errors
from app.routes.services import Services
from app.validation import Limits, ValidRequest
from model_runner.async_engine import Submission
from model_runner.core.admission import Admitted, Queued
from model_runner.core.capacity import Device, Plan, make_plan
from model_runner.core.quotes import Quote
from model_runner.errors import ContextLengthExceeded, InvalidRequest, LoadError, TenantRateLimited
from model_runner.messages import ModelInfo
from model_runner.tokenizer import Tokenizer

_CONTEXTS = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
_BATCHES = (1, 8, 32, 128)
# What is longer is refused and not priced: the figures would not fit a JSON number.
_PRICEABLE_TOKENS = 1 << 31


def capacity_router(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["capacity"])

    @router.get(
        "/capacity", response_model=None, responses={200: {"model": Capacity}, **describe_errors(401)}
    )
    async def get_capacity() -> Response:
        """What this server's KV cache holds, in the keys of `plimsoll plan`, and what is left of it now."""
        return json_response(_capacity(services))

    @router.post(
        "/admission/check", **describe_check(CompletionRequest, ChatCompletionRequest, AdmissionCheck)
    )
    async def check_admission(request: Request) -> Response:
        """What a completion would cost and what would become of it now. Nothing is run, nothing reserved.

        The body is the one of either call. What would be refused as malformed is refused here as well; what
        is longer than the model's context, or than the whole cache, is priced and said to be rejected.
        """
        caller = identify(request, services)
        valid, too_long = await read_and_validate(_validate, request, services)
        submission = make_submission(request.state.request_id, valid, caller)
        return json_response(_check(services, submission, request.state.request_id, too_long))

    return router


def _validate(
    body: bytes, limits: Limits, tokenizer: Tokenizer
) -> tuple[ValidRequest, ContextLengthExceeded | None]:
    """As the call whose body it is; and the error that the call would answer, where only the context is in
    the way. Raises ClientError."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = {}  # each call says what is wrong with such a body
    has = fields if isinstance(fields, dict) else {}
    if has.get("messages") and has.get("prompt") is not None:
        raise InvalidRequest("The body has both `prompt` and `messages`; send one of them.", param="messages")
    call = COMPLETION if has.get("prompt") is not None or "messages" not in has else CHAT
    try:
        return call.validate(body, limits, tokenizer), None
    except ContextLengthExceeded as error:
        too_long = error
    try:
        return call.validate(body, replace(limits, max_model_len=_PRICEABLE_TOKENS), tokenizer), too_long
    except ContextLengthExceeded:
        raise too_long from None


def _capacity(services: Services) -> dict[str, Any]:
    model, stats = services.engine.model, services.engine.stats
    return {
        "object": "capacity",
        **capacity_fields(_plan(model), _about(model, services.settings.served_model_name)),
        "max_model_len": model.max_model_len,
        "max_num_seqs": services.settings.max_num_seqs,
        "reserved_bytes": stats.reserved_bytes,
        "used_bytes": stats.used_bytes,
        "free_bytes": stats.free_bytes,
        "running_requests": stats.running,
        "waiting_requests": stats.waiting,
    }


def _about(model: ModelInfo, name: str) -> About:
    return About(
        model=name,
        architecture=model.architecture,
        model_context=model.model_context,
        device=model.device,
        device_memory_bytes=None,
        weights_parameters=model.weights_parameters,
        weights_counted_from="config",  # of what is loaded, whatever the files hold beside it
        weights_dtype=model.dtype,
    )


def _plan(model: ModelInfo) -> Plan:
    longest = model.max_model_len
    kv_bytes = (model.num_blocks + model.headroom_blocks) * model.layout.block_bytes
    return make_plan(
        model.layout.needs(model.model_type),
        model.layout,
        model.weights,
        Device(model.weights_bytes + kv_bytes),
        kv_budget_bytes=kv_bytes,
        contexts=(*(context for context in _CONTEXTS if context < longest), longest),
        batches=_BATCHES,
        limit=longest,
        headroom_blocks=model.headroom_blocks,
    )


def _check(
    services: Services, submission: Submission, request_id: str, too_long: ContextLengthExceeded | None
) -> dict[str, Any]:
    quote = _quote(services, submission)
    if too_long is not None:  # the call never comes to the door
        quote = replace(quote, decision=None, error=too_long)
    block_bytes = services.engine.model.layout.block_bytes
    stats, error = services.engine.stats, quote.error
    return {
        "object": "admission.check",
        "decision": _decision(quote),
        "status": 200 if error is None else status_and_type(error)[0],
        "error": None if error is None else error_body(error, request_id)["error"],
        "predicted_wait_seconds": _predicted_wait(quote),
        "retry_after_seconds": error.retry_after_seconds if isinstance(error, LoadError) else None,
        "prompt_tokens": [len(prompt) for prompt in submission.prompts],
        "max_tokens": submission.params.max_tokens,
        "n": submission.params.n,
        "projected_bytes": sum(price.blocks for price in quote.prices) * block_bytes,
        "groups": [
            {
                "kind": price.kind,
                "reach": price.window,
                "layers": price.layers,
                "blocks": price.blocks,
                "bytes": price.blocks * block_bytes,
            }
            for price in quote.prices
        ],
        "kv_budget_bytes": stats.kv_budget_bytes,
        "free_bytes": stats.free_bytes,
        "largest_max_tokens": quote.largest_max_tokens,
        "largest_max_tokens_now": quote.largest_max_tokens_now,
    }


def _quote(services: Services, submission: Submission) -> Quote:
    """The door's, unless this tenant's rate is in the way: nobody is let up to the door before its time."""
    quote = services.engine.quote(submission)
    try:
        services.tenancy.check_rate(submission.tenant)
    except TenantRateLimited as error:
        return replace(quote, decision=None, error=error)
    return quote


def _decision(quote: Quote) -> str:
    if isinstance(quote.decision, Admitted):
        return "admitted"
    return "queued" if isinstance(quote.decision, Queued) else "rejected"


def _predicted_wait(quote: Quote) -> float | None:
    """None where it would not wait at all, because it is refused."""
    if isinstance(quote.decision, Admitted):
        return 0.0
    return quote.decision.predicted_wait_seconds if isinstance(quote.decision, Queued) else None
