"""Server-sent events: their shape, their text, their errors, and the client that hangs up."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from app.protocol.responses import ChatCompletionChunk, CompletionResponse, ErrorResponse
from model_runner.async_engine import Restarted, Submission, Tokens
from model_runner.errors import Draining, EngineDied, QueueTimeout
from model_runner.tokenizer import Tokenizer
from model_runner.types import FinishReason
from tests.app.conftest import MODEL, Server
from tests.app.fake_engine import FOREVER, FakeEngine, Played, saying

TEXT = " é un llama 🦙🦙 — and 你好, the end."
ASKED = [{"role": "user", "content": "Hi"}]


def events_of(response: httpx.Response) -> list[Any]:
    """The events of a stream that ended well."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_the_text_of_a_stream_is_the_text_of_an_answer(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer, batch: int
) -> None:
    engine.script = saying(tokenizer.encode(TEXT), batch=batch)
    response = server.complete(prompt="Hi", stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events_of(response)
    assert text_of(chunks) == TEXT
    assert not any("\ufffd" in chunk["choices"][0]["text"] for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    for chunk in chunks:
        CompletionResponse.model_validate_json(json.dumps(chunk))
        assert "usage" not in chunk
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


def test_the_official_client_streams_a_chat(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode(TEXT), 2]
    engine.script = saying(tokens, finish=FinishReason.STOP)
    stream = server.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(tokens)
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("extra", [{}, {"logprobs": True, "top_logprobs": 1}, {"n": 2}])
def test_chunks_of_a_chat_are_as_the_schema_says(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer, extra: dict[str, Any]
) -> None:
    engine.script = saying(tokenizer.encode(TEXT))
    asked = {"messages": ASKED, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events_of(server.chat(**asked, **extra))
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(json.dumps(chunk))
    for index in range(extra.get("n", 1)):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in mine].count("length") == 1
        assert text_of(chunks, index) == TEXT


@pytest.mark.parametrize("batch", [1, 4])
def test_no_part_of_a_stop_string_leaks(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer, batch: int
) -> None:
    text = "one STO two STOP three"
    engine.script = saying(tokenizer.encode(text), batch=batch)
    chunks = events_of(server.complete(prompt="Hi", stream=True, stop=["STOP thr"], logprobs=0))
    assert text_of(chunks) == "one STO two "
    told = "".join(token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"])
    assert told.rstrip() == "one STO two"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(engine.streams[0].stops) == 1


def test_scores_are_told_once_and_in_place(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.script = saying(tokenizer.encode(TEXT), batch=2)
    chunks = events_of(server.complete(prompt="Hi there", stream=True, logprobs=1, echo=True))
    whole = server.complete(prompt="Hi there", logprobs=1, echo=True).json()["choices"][0]
    assert text_of(chunks) == whole["text"]
    for key, expected in whole["logprobs"].items():
        assert [each for chunk in chunks for each in chunk["choices"][0]["logprobs"][key]] == expected


def test_pending_tokens_leave_in_one_chunk(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    engine.script = saying(tokens, batch=len(tokens))
    assert len(events_of(server.complete(prompt="Hi", stream=True))) == 1


def test_usage_of_all_choices(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    engine.script = saying(tokens)
    asked = {"prompt": ["Hi", "you"], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events_of(server.complete(**asked))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4 * len(tokens)
    assert [text_of(chunks, index) for index in range(4)] == [TEXT] * 4


def test_nothing_is_sent_before_the_first_token(server: Server, engine: FakeEngine) -> None:
    def script(submission: Submission) -> Iterable[Played]:
        yield 0.2
        raise QueueTimeout("It waited 60 s.", retry_after_seconds=2.0)

    engine.script = script
    response = server.complete(prompt="Hi", stream=True)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "queue_timeout"
    assert response.headers["retry-after"] == "2"
    assert not engine.streams[0].delivered


def test_a_stream_that_has_sent_nothing_can_begin_again(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    half_a_llama = tokenizer.encode("🦙")[:1]

    def script(submission: Submission) -> Iterable[Played]:
        yield Tokens(0, 0, half_a_llama)
        assert not engine.streams[0].delivered
        yield Restarted()
        yield Tokens(0, 0, tokenizer.encode(TEXT), finish_reason=FinishReason.LENGTH)

    engine.script = script
    assert text_of(events_of(server.complete(prompt="Hi", stream=True))) == TEXT
    assert engine.streams[0].delivered


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDied("The engine died."), "internal_error"),
        (Draining("The server is shutting down.", retry_after_seconds=1.0), "draining"),
        (ValueError("a secret"), "internal_error"),
    ],
)
def test_an_error_after_the_beginning_is_the_last_event(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer, error: Exception, code: str
) -> None:
    def script(submission: Submission) -> Iterable[Played]:
        yield Tokens(0, 0, tokenizer.encode(" Hello"))
        yield error

    engine.script = script
    response = server.complete(prompt="Hi", stream=True)
    assert response.status_code == 200
    *_, last = [line for line in response.text.split("\n\n") if line]
    body = json.loads(last.removeprefix("data: "))
    assert body["error"]["code"] == code
    assert "secret" not in response.text
    ErrorResponse.model_validate_json(json.dumps(body))


def test_the_official_client_raises_an_error_in_a_stream(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    def script(submission: Submission) -> Iterable[Played]:
        yield Tokens(0, 0, tokenizer.encode(" Hello"))
        yield EngineDied("The engine died.")

    engine.script = script
    stream = server.openai.completions.create(model=MODEL, prompt="Hi", stream=True)
    with pytest.raises(Exception, match=r"The engine died\."):
        list(stream)


def test_a_client_that_hangs_up_in_a_stream(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    def script(submission: Submission) -> Iterable[Played]:
        yield Tokens(0, 0, tokenizer.encode(" Hello"))
        yield FOREVER

    engine.script = script
    with server.http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True}) as response:
        assert next(response.iter_lines()).startswith("data: ")
    server.until(lambda: engine.streams[0].aborts == ["client_disconnected"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_before_the_first_token(
    server: Server, engine: FakeEngine, stream: bool
) -> None:
    engine.script = lambda _: [FOREVER]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi", "stream": stream}, timeout=0.5)
    server.until(lambda: engine.streams[0].aborts == ["client_disconnected"])


def test_a_stream_that_ends_well_is_not_aborted(server: Server, engine: FakeEngine) -> None:
    events_of(server.complete(prompt="Hi", stream=True))
    assert server.complete(prompt="Hi").status_code == 200
    assert [stream.aborts for stream in engine.streams] == [[], []]
