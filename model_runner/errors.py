"""Everything that can go wrong, drawn as a tree. Who must act is the branch:

PlimsollError
├── ClientError             the client must change the request; retrying it as it is never helps
│   ├── InvalidRequest          a field is malformed or out of range (`param` names it)
│   ├── ContextLengthExceeded   prompt + max_tokens pass the model's context
│   ├── KVCacheBudgetExceeded   the request can never fit the KV budget
│   ├── RequestTooLarge         the body is over the limit
│   ├── InvalidAPIKey
│   └── ModelNotFound
├── LoadError               nothing is wrong with the request; come back in `retry_after_seconds`
│   ├── NoRoom
│   │   ├── QueueFull
│   │   ├── WaitTooLong             the predicted wait is past the deadline
│   │   ├── TenantQueueFull         as many of this tenant's requests wait as may
│   │   └── TenantOverLimit         this tenant's requests hold as many bytes as they may
│   ├── TenantRateLimited       this tenant has sent as many requests as its rate allows
│   ├── QueueTimeout            the deadline passed while it waited
│   ├── TooManyConnections
│   ├── Draining
│   ├── Starting
│   └── EngineRestarting
├── ServerFault             a fault of ours while the request ran
│   └── EngineDied
└── StartupError            the server cannot start as it was asked to
    ├── ModelNotServable        a layer, tokenizer or file format that Plimsoll can't serve, by name
    │   └── ModelNotPriced          a configuration that no price can be read from, by the field
    └── DoesNotFit              weights or one request don't fit the memory, with the figures
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a request was refused or failed: the JSON `code` and the metric label, spelled once."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    KV_CACHE_BUDGET_EXCEEDED = "kv_cache_budget_exceeded"
    REQUEST_TOO_LARGE = "request_too_large"
    INVALID_API_KEY = "invalid_api_key"
    MODEL_NOT_FOUND = "model_not_found"
    QUEUE_FULL = "queue_full"
    WAIT_TOO_LONG = "wait_too_long"
    TENANT_RATE_LIMITED = "tenant_rate_limited"
    TENANT_QUEUE_FULL = "tenant_queue_full"
    TENANT_OVER_LIMIT = "tenant_over_limit"
    QUEUE_TIMEOUT = "queue_timeout"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    DRAINING = "draining"
    STARTING = "starting"
    ENGINE_RESTARTING = "engine_restarting"
    INTERNAL_ERROR = "internal_error"


class PlimsollError(Exception):
    """The root. `message` is written for the person who will read it; `reason` is for machines."""

    reason: Reason = Reason.INTERNAL_ERROR

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ClientError(PlimsollError):
    """The request as it stands can never be served."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(ClientError):
    """A field is malformed, out of range or not supported. `code` is OpenAI's for the field, if any."""

    reason = Reason.INVALID_REQUEST

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param)
        self.code = code


class ContextLengthExceeded(ClientError):
    reason = Reason.CONTEXT_LENGTH_EXCEEDED


class KVCacheBudgetExceeded(ClientError):
    """The request would never fit, even alone. `largest_max_tokens` is 0 when not even one token would."""

    reason = Reason.KV_CACHE_BUDGET_EXCEEDED

    def __init__(
        self, message: str, *, required_bytes: int, budget_bytes: int, largest_max_tokens: int
    ) -> None:
        super().__init__(message, param="max_tokens")
        self.required_bytes = required_bytes
        self.budget_bytes = budget_bytes
        self.largest_max_tokens = largest_max_tokens


class RequestTooLarge(ClientError):
    reason = Reason.REQUEST_TOO_LARGE


class InvalidAPIKey(ClientError):
    reason = Reason.INVALID_API_KEY


class ModelNotFound(ClientError):
    reason = Reason.MODEL_NOT_FOUND


class LoadError(PlimsollError):
    """The server can't take it now. `retry_after_seconds` is computed wherever a forecast exists."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a request that is turned away needs, and what there is."""

    required_bytes: int
    free_bytes: int
    predicted_wait_seconds: float


class NoRoom(LoadError):
    """`shortage` is None of a request that was turned away before it was priced."""

    def __init__(self, message: str, *, retry_after_seconds: float, shortage: Shortage | None = None) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.shortage = shortage


class QueueFull(NoRoom):
    reason = Reason.QUEUE_FULL


class WaitTooLong(NoRoom):
    reason = Reason.WAIT_TOO_LONG


class TenantQueueFull(NoRoom):
    reason = Reason.TENANT_QUEUE_FULL


class TenantOverLimit(NoRoom):
    """Its own requests hold all that it may reserve; the server itself may have room."""

    reason = Reason.TENANT_OVER_LIMIT


class TenantRateLimited(LoadError):
    reason = Reason.TENANT_RATE_LIMITED


class QueueTimeout(LoadError):
    reason = Reason.QUEUE_TIMEOUT


class TooManyConnections(LoadError):
    reason = Reason.TOO_MANY_CONNECTIONS


class Draining(LoadError):
    reason = Reason.DRAINING


class Starting(LoadError):
    reason = Reason.STARTING


class EngineRestarting(LoadError):
    reason = Reason.ENGINE_RESTARTING


class ServerFault(PlimsollError):
    reason = Reason.INTERNAL_ERROR


class EngineDied(ServerFault):
    """The engine process ended while the request ran, and it could not be run again."""


class StartupError(PlimsollError):
    """Printed as it is to the person who started the server; the process exits with 1."""


class ModelNotServable(StartupError):
    pass


class ModelNotPriced(ModelNotServable):
    pass


class DoesNotFit(StartupError):
    pass
