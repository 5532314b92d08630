from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime

import pytest
from msgspec.structs import replace

from app import logs
from model_runner.errors import InvalidRequest, KVCacheBudgetExceeded, QueueFull, Shortage, WaitTooLong
from model_runner.types import Ending

ENDING = Ending(
    request_id="r-1",
    tenant="default",
    reason="length",
    prompt_tokens=33,
    generated_tokens=200,
    reserved_bytes=15 * 737280,
    queue_seconds=0.25,
    run_seconds=4.5678,
    e2e_seconds=4.8178,
)


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Logging is the process's own: what was there before is put back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(log_format: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    logs.configure(level, log_format, stream)
    return stream


def test_one_line_for_each_ending_as_text() -> None:
    stream = lines("text")
    logs.ending(ENDING)
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert "INFO request ended request_id=r-1 reason=length prompt_tokens=33 generated_tokens=200" in line
    assert "reserved_bytes=11059200 queue_seconds=0.25 run_seconds=4.568 e2e_seconds=4.818" in line
    assert "code=" not in line


def test_the_tenant_and_its_preemptions_are_told_where_there_is_anything_to_tell() -> None:
    stream = lines("text")
    logs.ending(ENDING)
    assert "tenant" not in stream.getvalue()
    assert "preemptions" not in stream.getvalue()
    logs.ending(replace(ENDING, tenant="search", preemptions=2))
    assert "request_id=r-1 tenant=search reason=length" in stream.getvalue()
    assert "preemptions=2" in stream.getvalue()


def test_one_line_for_each_ending_as_json() -> None:
    stream = lines("json")
    logs.ending(ENDING)
    line = json.loads(stream.getvalue())
    assert line["message"] == "request ended"
    assert line["level"] == "info"
    assert line["request_id"] == "r-1"
    assert line["reserved_bytes"] == 11059200
    assert line["run_seconds"] == 4.568
    assert abs(datetime.fromisoformat(line["time"]).timestamp() - datetime.now().timestamp()) < 60


def test_an_error_is_louder_and_names_its_code() -> None:
    stream = lines("text", level="error")
    logs.ending(ENDING)
    logs.ending(Ending(request_id="r-2", tenant="default", reason="error", code="internal_error"))
    assert stream.getvalue().count("\n") == 1
    assert "ERROR request ended request_id=r-2 reason=error code=internal_error" in stream.getvalue()


@pytest.mark.parametrize("forged", ["a\nINFO request ended", "x y", 'q"', "a=b", "\x1b[31m", "", "a\u2028b"])
def test_nobody_writes_a_line_of_their_own(forged: str) -> None:
    stream = lines("text")
    logs.event("request ended", request_id=forged, next="n")
    line = stream.getvalue()
    assert line.splitlines() == [line.rstrip("\n")]
    assert f"request_id={json.dumps(forged)} next=n" in line


def test_a_foreign_message_of_many_lines_is_one_line() -> None:
    stream = lines("text")
    logging.getLogger("other").warning("two\nlines")
    assert stream.getvalue().endswith("WARNING two\\nlines\n")


def test_tracebacks_are_kept() -> None:
    for log_format in ("text", "json"):
        stream = lines(log_format)
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            logging.getLogger("other").exception("failed")
        assert "RuntimeError: boom" in stream.getvalue()
        if log_format == "json":
            assert "RuntimeError: boom" in json.loads(stream.getvalue())["exception"]


def test_uvicorn_speaks_through_the_same_lines() -> None:
    stream = lines("json")
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").error("bad")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["bad"]


def test_one_line_for_each_refusal() -> None:
    stream = lines("json")
    never = KVCacheBudgetExceeded("too much", required_bytes=300, budget_bytes=200, largest_max_tokens=7)
    logs.refusal("r-1", never)
    logs.refusal("r-2", QueueFull("full", retry_after_seconds=1.23456))
    short = Shortage(required_bytes=8192, free_bytes=4096, predicted_wait_seconds=1.23456)
    logs.refusal("r-2a", QueueFull("full", retry_after_seconds=1.3, shortage=short))
    logs.refusal("r-2b", WaitTooLong("long", retry_after_seconds=1.3, shortage=short))
    first, second, *short_of_room = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == second["message"] == "request refused"
    assert (first["request_id"], first["code"]) == ("r-1", "kv_cache_budget_exceeded")
    assert (first["required_bytes"], first["budget_bytes"]) == (300, 200)
    assert (second["code"], second["retry_after_seconds"]) == ("queue_full", 1.235)
    assert "required_bytes" not in second
    assert [line["code"] for line in short_of_room] == ["queue_full", "wait_too_long"]
    for line in short_of_room:
        assert (line["required_bytes"], line["free_bytes"]) == (8192, 4096)
        assert (line["predicted_wait_seconds"], line["retry_after_seconds"]) == (1.235, 1.3)


def test_what_a_client_sent_does_not_fill_the_log() -> None:
    stream = lines("text")
    logs.refusal("r-1", InvalidRequest("x" * 5000, param="prompt"))
    assert len(stream.getvalue()) < 600
