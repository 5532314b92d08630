"""From a client's bytes to a request that can be priced: parsed, in range, tokenised, within the context.

Pure functions of the body, the tokenizer and the model's limits, so that a long prompt can be prepared in a
thread. Everything here raises ClientError, with one sentence that says what is allowed.
"""

from __future__ import annotations

from app.validation.headers import request_timeout
from app.validation.limits import Limits
from app.validation.request import ValidRequest, validate_chat, validate_completion

__all__ = ["Limits", "ValidRequest", "request_timeout", "validate_chat", "validate_completion"]
