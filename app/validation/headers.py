"""What a request's headers ask for."""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from app.validation.parsing import must_be

REQUEST_TIMEOUT = "x-request-timeout-seconds"
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)


def request_timeout(headers: Headers, max_queue_seconds: float) -> float | None:
    """How long the client would have its request wait for room, at most as long as anybody's may; None if it
    doesn't say. Raises InvalidRequest, which names the header."""
    given = headers.getlist(REQUEST_TIMEOUT)
    if not given:
        return None
    text = ", ".join(given).strip()
    seconds = float(text) if _NUMBER.fullmatch(text) else 0.0
    if seconds <= 0:
        must_be(REQUEST_TIMEOUT, "a number of seconds above 0, written once", text)
    return min(seconds, max_queue_seconds)
