"""POST /v1/completions, whole answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from app.assembly import RequestAssembly
from app.protocol.responses import CompletionResponse
from model_runner.async_engine import Restarted, Submission, Tokens
from model_runner.tokenizer import Tokenizer
from model_runner.types import FinishReason
from tests.app.conftest import MODEL, Server
from tests.app.fake_engine import FakeEngine, Played, saying, score

TEXT = " is a city, in the north of Italy."


def test_the_official_client_completes(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    engine.script = saying(tokens)
    answer = server.openai.completions.create(model=MODEL, prompt="Milan", max_tokens=40, temperature=0)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == MODEL
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    prompt = len(tokenizer.encode("Milan"))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, len(tokens))
    assert answer.usage.total_tokens == prompt + len(tokens)
    assert engine.submissions[0].params.temperature == 0
    assert engine.submissions[0].params.max_tokens == 40


def test_answers_are_as_the_schema_says(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.script = saying(tokenizer.encode(TEXT))
    for extra in ({}, {"logprobs": 2}, {"echo": True, "logprobs": 0}, {"n": 3}):
        response = server.complete(prompt="Milan", **extra)
        assert response.status_code == 200
        CompletionResponse.model_validate_json(response.content)


def test_a_token_that_stops_is_counted_and_not_shown(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode(TEXT)
    engine.script = saying([*tokens, 2], finish=FinishReason.STOP)
    answer = server.complete(prompt="Milan", logprobs=0).json()
    choice = answer["choices"][0]
    assert choice["text"] == TEXT
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(tokens) + 1
    assert "".join(choice["logprobs"]["tokens"]) == TEXT


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_stop_strings_cut_across_tokens(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer, batch: int
) -> None:
    tokens = tokenizer.encode(TEXT)
    engine.script = saying(tokens, batch=batch)
    answer = server.complete(prompt="Milan", stop=["zebra", "ty, in th"]).json()
    assert answer["choices"][0]["text"] == " is a ci"
    assert answer["choices"][0]["finish_reason"] == "stop"
    delivered = answer["usage"]["completion_tokens"]
    assert tokenizer.decode(tokens[:delivered]).endswith("ty, in the")
    assert engine.streams[0].stops == [(0, 0, delivered)]


def test_a_stop_string_that_never_comes_leaves_the_text_whole(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.script = saying(tokenizer.encode(TEXT))
    answer = server.complete(prompt="Milan", stop="Italy.!").json()
    assert answer["choices"][0]["text"] == TEXT
    assert answer["choices"][0]["finish_reason"] == "length"
    assert engine.streams[0].stops == []


def test_stop_strings_wait_for_min_tokens(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.script = saying(tokenizer.encode(" a a a a a a"))
    answer = server.complete(prompt="Milan", stop=" a", min_tokens=4).json()
    assert answer["choices"][0]["text"] == " a a a"
    assert answer["usage"]["completion_tokens"] == 4


def test_prompts_times_choices_are_numbered(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    def script(submission: Submission) -> Iterable[Played]:
        for prompt in (1, 0):
            for choice in (1, 0):
                text = f" {prompt}{choice}"
                yield Tokens(prompt, choice, tokenizer.encode(text), finish_reason=FinishReason.LENGTH)

    engine.script = script
    answer = server.complete(prompt=["one", "two and three"], n=2).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [" 00", " 01", " 10", " 11"]
    prompts = len(tokenizer.encode("one")) + len(tokenizer.encode("two and three"))
    assert answer["usage"]["prompt_tokens"] == prompts


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]]), ("Hi", None), (["Hi", "you"], None)],
)
def test_every_kind_of_prompt(
    server: Server,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    prompt: object,
    expected: list[list[int]] | None,
) -> None:
    assert server.complete(prompt=prompt).status_code == 200
    if expected is None:
        texts = [prompt] if isinstance(prompt, str) else prompt
        assert isinstance(texts, list)
        expected = [tokenizer.encode(text) for text in texts]
    assert engine.submissions[0].prompts == expected


def test_log_probabilities(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    engine.script = saying(tokens)
    logprobs = server.complete(prompt="Milan", logprobs=2).json()["choices"][0]["logprobs"]
    spelled = [tokenizer.token_text(token) for token in tokens]
    assert logprobs["tokens"] == spelled
    assert logprobs["token_logprobs"] == [-token / 100 for token in tokens]
    for token, top in zip(tokens, logprobs["top_logprobs"], strict=True):
        expected = score(token, 2)
        named = [tokenizer.token_text(each) for each in (*expected.top_token_ids, token)]
        assert set(top) == set(named)
        assert top[tokenizer.token_text(token)] == -token / 100
    for text, offset in zip(spelled, logprobs["text_offset"], strict=True):
        assert TEXT[offset : offset + len(text)] == text


def test_log_probabilities_of_broken_characters(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("🦙!")
    assert len(tokens) > 2
    engine.script = saying(tokens)
    answer = server.complete(prompt="Milan", logprobs=0).json()["choices"][0]
    assert answer["text"] == "🦙!"
    assert any(token.startswith("bytes:\\x") for token in answer["logprobs"]["tokens"])
    assert len(answer["logprobs"]["tokens"]) == len(tokens)


def test_log_probabilities_stop_where_the_text_stops(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode(TEXT)
    engine.script = saying(tokens)
    choice = server.complete(prompt="Milan", logprobs=0, stop=", in the").json()["choices"][0]
    assert choice["text"] == " is a city"
    assert "".join(choice["logprobs"]["tokens"]) == " is a city"


def test_echo_with_scores(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.script = saying(tokenizer.encode(TEXT))
    prompt = tokenizer.encode("Milan the old")
    answer = server.complete(prompt="Milan the old", echo=True, logprobs=1, n=2).json()
    assert engine.submissions[0].params.prompt_logprobs == 1
    for choice in answer["choices"]:
        assert choice["text"] == "Milan the old" + TEXT
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1 : len(prompt)] == [-token / 100 for token in prompt[1:]]
        assert "".join(logprobs["tokens"]) == choice["text"]
        for text, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset : offset + len(text)] == text


def test_many_scores_are_written_as_few_are(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """They take another way: through a thread."""
    prompt = tokenizer.encode("one two three four five " * 90)[:500]
    engine.script = saying([28])
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "n": 2, "max_tokens": 1}
    for stream in (False, True):
        response = server.complete(**body, stream=stream)
        if stream:
            chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if "choices" in line]
            assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1]
            choices = [chunk["choices"][0] for chunk in chunks]
        else:
            choices = response.json()["choices"]
        for choice in choices:
            assert choice["logprobs"]["tokens"] == [tokenizer.token_text(token) for token in (*prompt, 28)]


def test_a_prompt_is_read_once_for_all_choices(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    whole = RequestAssembly._read_prompt

    def counted(self: RequestAssembly, prompt_index: int) -> Any:
        read.append(prompt_index)
        return whole(self, prompt_index)

    monkeypatch.setattr(RequestAssembly, "_read_prompt", counted)
    body = {"prompt": ["Milan the old", "Rome"], "echo": True, "logprobs": 0, "n": 3}
    choices = server.complete(**body).json()["choices"]
    assert sorted(read) == [0, 1]
    assert [choice["logprobs"] for choice in choices[:3]] == [choices[0]["logprobs"]] * 3


def test_scores_that_come_after_another_choice(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    def script(submission: Submission) -> Iterable[Played]:
        scores = [score(token, 0) for token in submission.prompts[0][1:]]
        yield Tokens(0, 1, [28], [score(28, 0)], None, FinishReason.LENGTH)
        yield Tokens(0, 0, [29], [score(29, 0)], scores, FinishReason.LENGTH)

    engine.script = script
    choices = server.complete(prompt="Milan the old", echo=True, logprobs=0, n=2).json()["choices"]
    assert [choice["text"] for choice in choices] == ["Milan the old-", "Milan the old,"]
    assert choices[0]["logprobs"]["tokens"][:-1] == choices[1]["logprobs"]["tokens"][:-1]


def test_echo_of_token_ids(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.script = saying(tokenizer.encode(TEXT))
    answer = server.complete(prompt=tokenizer.encode("Milan"), echo=True).json()
    assert answer["choices"][0]["text"] == "Milan" + TEXT


def test_scoring_without_generating(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    answer = server.complete(prompt="Milan the old", echo=True, logprobs=0, max_tokens=0).json()
    choice = answer["choices"][0]
    assert choice["text"] == "Milan the old"
    assert choice["finish_reason"] == "length"
    assert "".join(choice["logprobs"]["tokens"]) == "Milan the old"
    assert answer["usage"]["completion_tokens"] == 0
    assert engine.submissions[0].params.max_tokens == 1


def test_what_a_dead_engine_said_is_forgotten(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode(TEXT)

    def script(submission: Submission) -> Iterable[Played]:
        yield Tokens(0, 0, tokens[:5])
        yield Restarted()
        yield Tokens(0, 0, tokens, finish_reason=FinishReason.LENGTH)

    engine.script = script
    answer = server.complete(prompt="Milan").json()
    assert answer["choices"][0]["text"] == TEXT
    assert answer["usage"]["completion_tokens"] == len(tokens)


def test_defaults(server: Server, engine: FakeEngine) -> None:
    assert server.complete(prompt="Milan").status_code == 200
    assert server.complete(prompt=[5] * 510, seed=-1, top_k=-1).status_code == 200
    first, second = (submission.params for submission in engine.submissions)
    assert (first.max_tokens, first.temperature, first.top_p, first.n) == (16, 1.0, 1.0, 1)
    assert first.prompt_logprobs is None
    assert second.max_tokens == 2  # what the context of 512 has room for
    assert second.seed == 2**64 - 1
    assert second.top_k == 0
    assert first.seed != second.seed
