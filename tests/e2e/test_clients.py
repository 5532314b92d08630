"""The official OpenAI client, and the README's own commands, against the real model."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.server import Server, serving

README = Path(__file__).parents[2] / "README.md"
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def test_it_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0
    )
    assert "Paris" in done.choices[0].text
    assert done.usage
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 8)


def test_chat_streams_the_same_text_as_it_returns_whole(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, temperature=0)  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(  # type: ignore[call-overload]
            model=MODEL,
            messages=messages,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert "Paris" in text
    assert whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage
    assert not chunks[-1].choices


def test_choices_differ_by_choice_and_repeat_by_seed(client: openai.OpenAI) -> None:
    def ask() -> list[str]:
        done = client.completions.create(
            model=MODEL, prompt="A good name for a boat is", max_tokens=12, n=4, seed=5, temperature=1.2
        )
        assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
        return [choice.text for choice in done.choices]

    first = ask()
    assert len(set(first)) > 1
    assert ask() == first


def test_stop_strings_never_leak(client: openai.OpenAI) -> None:
    prompt = "One, two, three, four, five,"
    plain = (
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0).choices[0].text
    )
    stop = plain[7:11]
    expected = plain[: plain.index(stop)]
    chunks = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=24, temperature=0, stop=[stop], stream=True
    )
    parts = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(part.text for part in parts) == expected
    assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 30
    done = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=2, temperature=0, echo=True, logprobs=2
    )
    choice = done.choices[0]
    assert choice.text.startswith(prompt)
    scored = choice.logprobs
    assert scored
    assert scored.tokens
    assert scored.token_logprobs
    assert scored.token_logprobs[0] is None
    assert all(value <= 0 for value in scored.token_logprobs[1:])
    assert "".join(scored.tokens) == choice.text
    assert done.usage
    assert len(scored.tokens) == done.usage.total_tokens
    late = scored.token_logprobs[-60:-2]
    assert sum(late) / len(late) > -0.5  # by the thirtieth time the fox is no surprise


def test_unsupported_parameters_are_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    assert refused.value.param == "tools"


def test_keys_guard_v1_and_nothing_else() -> None:
    with serving("--api-key", "sesame", "--served-model-name", "smol") as own:
        assert own.get("/v1/models").status_code == 401
        assert (
            own.get("/v1/models", headers={"Authorization": "Bearer sesame"}).json()["data"][0]["id"]
            == "smol"
        )
        for open_path in ("/healthz", "/readyz", "/health", "/metrics", "/version"):
            assert own.get(open_path).status_code == 200
        assert "sesame" not in own.log


def test_the_readmes_curls() -> None:
    """Each `curl` in the README runs as written: the first is admitted, the second is refused."""
    curls = [
        block.strip().removeprefix("$ ")
        for block in re.findall(r"```sh\n(.*?)```", README.read_text(), flags=re.DOTALL)
        if "curl" in block
    ]
    assert len(curls) >= 2
    with serving() as own:
        answers = [
            subprocess.run(
                ["bash", "-c", curl.replace("http://127.0.0.1:8000", own.url)],
                capture_output=True,
                text=True,
                check=True,
                timeout=120,
            ).stdout
            for curl in curls
        ]
    assert '"choices"' in answers[0]
    assert "kv_cache_budget_exceeded" in answers[1]


def test_a_body_over_the_limit_is_refused_before_it_is_read(server: Server) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(1024):
            yield b" " * 65536

    try:
        refused = httpx.post(server.url + "/v1/completions", content=endless(), timeout=30)
    except (httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):
        pass  # the server may close while we still write
    else:
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
    assert server.ready()
