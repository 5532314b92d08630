"""Every error: its status, its body, its headers."""

from __future__ import annotations

import json

import openai
import pytest

from app.errors import TABLE, status_and_type
from app.protocol.responses import ErrorResponse
from model_runner import errors
from model_runner.errors import PlimsollError, Reason
from tests.app.conftest import MODEL, Server
from tests.app.fake_engine import FakeEngine

WAIT = 1.234
RAISED: list[tuple[PlimsollError, int]] = [
    (errors.KVCacheBudgetExceeded("m", required_bytes=9, budget_bytes=5, largest_max_tokens=3), 400),
    (errors.QueueFull("m", retry_after_seconds=WAIT), 429),
    (errors.WaitTooLong("m", retry_after_seconds=WAIT), 429),
    (errors.TenantRateLimited("m", retry_after_seconds=WAIT), 429),
    (errors.TenantQueueFull("m", retry_after_seconds=WAIT), 429),
    (errors.TenantOverLimit("m", retry_after_seconds=WAIT), 429),
    (errors.QueueTimeout("m", retry_after_seconds=WAIT), 504),
    (errors.Draining("m", retry_after_seconds=WAIT), 503),
    (errors.Starting("m", retry_after_seconds=WAIT), 503),
    (errors.TooManyConnections("m", retry_after_seconds=WAIT), 503),
    (errors.EngineRestarting("m", retry_after_seconds=WAIT), 503),
    (errors.ServerFault("m"), 500),
    (errors.EngineDied("m"), 500),
]


def leaves(kind: type[PlimsollError]) -> list[type[PlimsollError]]:
    below = kind.__subclasses__()
    return [leaf for each in below for leaf in leaves(each)] if below else [kind]


def test_the_table_knows_every_error_a_client_can_get() -> None:
    for kind in leaves(errors.ClientError) + leaves(errors.LoadError):
        if kind.__module__ in ("model_runner.errors", "app.preparation"):
            assert kind in TABLE, kind


@pytest.mark.parametrize(("error", "status"), RAISED, ids=lambda value: type(value).__name__)
def test_what_the_door_says(server: Server, engine: FakeEngine, error: PlimsollError, status: int) -> None:
    engine.refusal = error
    for response in (server.complete(prompt="Hi"), server.complete(prompt="Hi", stream=True)):
        assert response.status_code == status == status_and_type(error)[0]
        ErrorResponse.model_validate_json(response.content)
        body = response.json()["error"]
        assert body["code"] == error.reason.value
        assert body["message"].startswith("m")
        if isinstance(error, errors.LoadError):
            assert response.headers["retry-after"] == "2"
            assert response.headers["retry-after-ms"] == "1234"
        else:
            assert "retry-after" not in response.headers


@pytest.mark.parametrize("kind", [errors.QueueFull, errors.WaitTooLong, errors.TenantOverLimit])
def test_no_room_says_what_is_needed_and_what_is_free(
    server: Server, engine: FakeEngine, kind: type[errors.NoRoom]
) -> None:
    short = errors.Shortage(required_bytes=9000, free_bytes=5000, predicted_wait_seconds=1.23456)
    engine.refusal = kind("m", retry_after_seconds=WAIT, shortage=short)
    for response in (server.complete(prompt="Hi"), server.chat(messages=[{"role": "user", "content": "Hi"}])):
        assert response.headers["x-plimsoll-projected-bytes"] == "9000"
        assert response.headers["x-plimsoll-free-bytes"] == "5000"
        ErrorResponse.model_validate_json(response.content)
        body = response.json()["error"]
        figures = (body["required_bytes"], body["free_bytes"], body["predicted_wait_seconds"])
        assert figures == (9000, 5000, 1.235)


def test_a_budget_that_is_too_small_says_the_figures(server: Server, engine: FakeEngine) -> None:
    engine.refusal = RAISED[0][0]
    body = server.complete(prompt="Hi").json()["error"]
    figures = (body["required_bytes"], body["budget_bytes"], body["largest_max_tokens"])
    assert figures == (9, 5, 3)
    assert body["param"] == "max_tokens"


def test_the_official_client_understands(server: Server, engine: FakeEngine) -> None:
    engine.refusal = errors.QueueFull("The queue is full.", retry_after_seconds=0.01)
    with pytest.raises(openai.RateLimitError, match=r"The queue is full\."):
        server.openai.completions.create(model=MODEL, prompt="Hi")
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.completions.create(model="other", prompt="Hi")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        server.openai.completions.create(model=MODEL, prompt="Hi", temperature=3)
    assert refused.value.param == "temperature"


def test_a_fault_says_the_request_and_nothing_else(server: Server, engine: FakeEngine) -> None:
    engine.script = lambda _: [ZeroDivisionError("a secret")]
    for stream in (False, True):
        body = {"prompt": "Hi", "stream": stream}
        response = server.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert response.status_code == 500
        assert response.headers["x-request-id"] == "mine"
        error = response.json()["error"]
        assert error["code"] == "internal_error"
        assert "mine" in error["message"]
        assert "secret" not in response.text
        assert "Traceback" not in response.text
    assert all("client_disconnected" not in stream.aborts for stream in engine.streams)


def test_a_fault_of_ours_is_not_the_client_s(
    server: Server, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("app.assembly.RequestAssembly.push", fail)
    assert server.complete(prompt="Hi").status_code == 500
    assert engine.streams[0].aborts == ["server_fault"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/other/model", 404),
    ],
)
def test_wrong_addresses(server: Server, method: str, path: str, status: int) -> None:
    response = server.http.request(method, path)
    assert response.status_code == status
    ErrorResponse.model_validate_json(response.content)
    assert response.headers["x-request-id"]
    if status == 405:
        assert response.headers["allow"]


def test_refusals_before_the_door_are_counted(server: Server) -> None:
    assert server.complete(prompt="Hi", temperature=9).status_code == 400
    assert server.complete(prompt="Hi", model="other").status_code == 404
    assert server.complete(prompt="Hi", max_tokens=9999).status_code == 400
    assert server.rejections(Reason.INVALID_REQUEST) == 1
    assert server.rejections(Reason.MODEL_NOT_FOUND) == 1
    assert server.rejections(Reason.CONTEXT_LENGTH_EXCEEDED) == 1


def test_context_length_in_openai_s_words(server: Server) -> None:
    response = server.complete(prompt=[5] * 500, max_tokens=13)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in error["message"]
    assert "you requested 513 tokens (500 in the prompt, 13 in the completion)" in error["message"]
    assert server.complete(prompt=[5] * 500, max_tokens=12).status_code == 200
    assert "resulted in 512 tokens" in server.complete(prompt=[5] * 512).json()["error"]["message"]
    chat = server.chat(messages=[{"role": "user", "content": "word " * 600}])
    assert chat.status_code == 400
    assert json.loads(chat.content)["error"]["param"] == "messages"


def test_a_refusal_leaves_one_line(
    server: Server, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="plimsoll")
    assert server.complete(prompt="Hi", temperature=9).status_code == 400
    engine.refusal = errors.QueueFull("full", retry_after_seconds=2.0)
    refused = server.complete(prompt="Hi")
    told = [record.fields for record in caplog.records if record.getMessage() == "request refused"]
    assert [line["code"] for line in told] == ["invalid_request", "queue_full"]
    assert told[0]["param"] == "temperature"
    assert told[1]["request_id"] == refused.headers["x-request-id"]
