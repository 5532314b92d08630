"""What the server says of itself: lifecycle events, and one line for each request's ending."""

from __future__ import annotations

import logging
from typing import Any, TextIO

from model_runner import log_format as lines
from model_runner.core.tenants import DEFAULT_TENANT
from model_runner.errors import ClientError, KVCacheBudgetExceeded, LoadError, NoRoom, PlimsollError
from model_runner.types import Ending

logger = logging.getLogger("plimsoll")

_LONGEST_MESSAGE = 300  # it may quote what the client sent


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Our own lines, uvicorn's and the libraries', through one handler."""
    lines.configure(level, log_format, stream)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    # What uvicorn tells at info (process ids, "waiting for connections") is told in our own words.
    logging.getLogger("uvicorn").setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    # A client library's line per request would drown ours.
    logging.getLogger("httpx").setLevel(logging.WARNING)


def event(message: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """One line. Fields that are None are left out."""
    if logger.isEnabledFor(level):
        kept = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, "%s", message, extra={"fields": kept})


def refusal(request_id: str, error: PlimsollError, tenant: str | None = None) -> None:
    """The one line of a request that was turned away before it was taken; `tenant` where it is known."""
    figures: dict[str, Any] = {}
    if isinstance(error, KVCacheBudgetExceeded):
        figures = {"required_bytes": error.required_bytes, "budget_bytes": error.budget_bytes}
    elif isinstance(error, NoRoom) and (short := error.shortage) is not None:
        figures = {
            "required_bytes": short.required_bytes,
            "free_bytes": short.free_bytes,
            "predicted_wait_seconds": round(short.predicted_wait_seconds, 3),
        }
    event(
        "request refused",
        request_id=request_id,
        tenant=None if tenant == DEFAULT_TENANT else tenant,
        code=error.reason.value,
        param=error.param if isinstance(error, ClientError) else None,
        **figures,
        retry_after_seconds=round(error.retry_after_seconds, 3) if isinstance(error, LoadError) else None,
        told=error.message[:_LONGEST_MESSAGE],
    )


def ending(end: Ending) -> None:
    """The one line of a request, however it ended."""
    event(
        "request ended",
        level=logging.ERROR if end.reason == "error" else logging.INFO,
        request_id=end.request_id,
        tenant=None if end.tenant == DEFAULT_TENANT else end.tenant,
        reason=end.reason,
        code=end.code,
        cause=end.abort_cause,
        prompt_tokens=end.prompt_tokens,
        generated_tokens=end.generated_tokens,
        choices=end.choices if end.choices != 1 else None,
        reserved_bytes=end.reserved_bytes,
        preemptions=end.preemptions or None,
        queue_seconds=round(end.queue_seconds, 3),
        run_seconds=round(end.run_seconds, 3),
        e2e_seconds=round(end.e2e_seconds, 3),
    )
