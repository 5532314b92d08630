"""What the OpenAPI schema says of the routes. FastAPI doesn't read the bodies, so it can't know."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app.errors import FREE_BYTES, PROJECTED_BYTES, QUEUE_SECONDS
from app.protocol.requests import ChatCompletionRequest, CompletionRequest
from app.protocol.responses import ChatCompletionChunk, CompletionResponse, ErrorResponse
from app.validation.headers import REQUEST_TIMEOUT

_REF = "#/components/schemas/{model}"

ERRORS = {
    400: "The request is malformed, out of range, longer than the context, or larger than the KV cache.",
    401: "No key, or a wrong one.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is over the limit.",
    429: "No room in the queue, or the wait would be too long. Retry-After says when to come back.",
    500: "A fault of the server.",
    503: "Starting, stopping, restarting its engine, or out of connections. Retry-After says how long.",
    504: "The deadline passed in the queue.",
}
RETRYABLE = (429, 503, 504)

_TIMEOUT = {
    "name": REQUEST_TIMEOUT,
    "in": "header",
    "required": False,
    "description": "How long the request may wait for room, at most as long as the server lets any wait. "
    "It is refused at once when the predicted wait is longer, and ends with 504 when the time is up.",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}


def describe_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: _describe_error(status) for status in statuses}


def describe_call(request: type[BaseModel], whole: type[BaseModel], chunk: type[BaseModel]) -> dict[str, Any]:
    """Keyword arguments of a route that takes `request` and answers `whole`, or a stream of `chunk`s."""
    answer = {
        "model": whole,
        "description": "The answer, or with `stream` a stream of chunks that ends with [DONE].",
        "content": {"text/event-stream": {"schema": _describe_event(chunk)}},
        "headers": {
            PROJECTED_BYTES: {
                "description": "KV cache that it may take over its lifetime, as priced at the door.",
                "schema": {"type": "integer"},
            },
            QUEUE_SECONDS: {
                "description": "How long it had waited when it was let in.",
                "schema": {"type": "number"},
            },
        },
    }
    return {
        "response_model": None,
        "responses": {200: answer, **describe_errors(*ERRORS)},
        "openapi_extra": {
            "parameters": [_TIMEOUT],
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        },
    }


def describe_check(*requests_then_answer: type[BaseModel]) -> dict[str, Any]:
    """Keyword arguments of a route that takes any of the requests, and tells what would become of it."""
    *requests, answer = requests_then_answer
    return {
        "response_model": None,
        "responses": {200: {"model": answer}, **describe_errors(400, 401, 404, 408, 413, 429)},
        "openapi_extra": {
            "parameters": [_TIMEOUT],
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {"schema": {"anyOf": [_ref(request) for request in requests]}}
                },
            },
        },
    }


def describe(app: FastAPI, *, has_keys: bool) -> dict[str, Any]:
    """The schema of the whole server, the bodies of the calls included."""
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    bodies = (CompletionRequest, ChatCompletionRequest, CompletionResponse, ChatCompletionChunk)
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    components = schema.setdefault("components", {})
    components["schemas"] = {**definitions["$defs"], **components.get("schemas", {})}
    for path, operations in schema["paths"].items():
        if path.startswith("/v1/"):  # on a connection past the limit
            for operation in operations.values():
                operation["responses"].setdefault("503", _full(schema))
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in schema["paths"].items():
            if path.startswith("/v1/"):
                for operation in operations.values():
                    operation["security"] = [{"key": []}]
    return schema


def _full(schema: dict[str, Any]) -> dict[str, Any]:
    full: dict[str, Any] = schema["paths"]["/v1/completions"]["post"]["responses"]["503"]
    return full


def _describe_error(status: int) -> dict[str, Any]:
    described: dict[str, Any] = {"model": ErrorResponse, "description": ERRORS[status]}
    if status in RETRYABLE:
        described["headers"] = {
            "Retry-After": {"description": "Whole seconds.", "schema": {"type": "integer"}},
            "retry-after-ms": {"description": "Milliseconds.", "schema": {"type": "integer"}},
        }
    if status == 429:
        described["headers"] |= {
            PROJECTED_BYTES: {
                "description": "KV cache that the request needs, where it was priced.",
                "schema": {"type": "integer"},
            },
            FREE_BYTES: {
                "description": "KV cache that was not reserved then, likewise.",
                "schema": {"type": "integer"},
            },
        }
    return described


def _describe_event(chunk: type[BaseModel]) -> dict[str, Any]:
    """One server-sent event: its data is a chunk as JSON, or [DONE]."""
    return {
        "type": "object",
        "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
        "required": ["data"],
        "x-chunk": _ref(chunk),
    }


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
