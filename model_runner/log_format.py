"""Log lines as text for people or as JSON for machines, on standard error. Both processes write them so.

A record may carry `fields` (a dict, through `extra`). They may hold what a client sent (a request id), so in
text they are quoted when they need it: nobody can write a line of their own into the log.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send the root logger's lines to `stream` (standard error), in place of what was there before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JSONFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


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
