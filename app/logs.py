"""Log lines: one event each, as text for people or as JSON for machines, on standard error.

An event is a few words and some fields. Fields may hold what a client sent (a request id), so in text they
are quoted when they need it: nobody can write a line of their own into the log.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from model_runner.types import Ending

logger = logging.getLogger("plimsoll")

_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send the root logger's lines to `stream` (standard error), in place of what was there before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JSONFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
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


def ending(end: Ending) -> None:
    """The one line of a request, however it ended."""
    event(
        "request ended",
        level=logging.ERROR if end.reason == "error" else logging.INFO,
        request_id=end.request_id,
        reason=end.reason,
        code=end.code,
        cause=end.abort_cause,
        prompt_tokens=end.prompt_tokens,
        generated_tokens=end.generated_tokens,
        choices=end.choices if end.choices != 1 else None,
        reserved_bytes=end.reserved_bytes,
        queue_seconds=round(end.queue_seconds, 3),
        run_seconds=round(end.run_seconds, 3),
        e2e_seconds=round(end.e2e_seconds, 3),
    )


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO request ended request_id=r1 reason=stop …`, in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        words = [f"{_utc(record, ' ')} {record.levelname} {_one_line(record.getMessage())}"]
        fields: dict[str, Any] = getattr(record, "fields", {})
        words += [f"{name}={_quoted(value)}" for name, value in fields.items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JSONFormatter(logging.Formatter):
    """One JSON object a line: `time` (RFC 3339, UTC), `level`, `logger`, `message`, the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _utc(record, "T") + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _utc(record: logging.LogRecord, separator: str) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.replace(tzinfo=None).isoformat(separator, "milliseconds")


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text, ensure_ascii=False)[1:-1]


def _quoted(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text.isprintable() else json.dumps(text)
