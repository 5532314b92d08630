"""POST /v1/chat/completions, whole answers."""

from __future__ import annotations

import pytest

from app.protocol.responses import ChatCompletionResponse
from model_runner.tokenizer import Tokenizer
from model_runner.types import FinishReason
from tests.app.conftest import MODEL, Server
from tests.app.fake_engine import FakeEngine, model_info, saying

TEXT = "Hello! How can I help you today?"
ASKED = [{"role": "user", "content": "Hi"}]


def test_the_official_client_chats(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT)
    engine.script = saying([*tokens, 2], finish=FinishReason.STOP)
    answer = server.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    prompt = tokenizer.encode_chat(ASKED)
    assert engine.submissions[0].prompts == [prompt]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(tokens) + 1


def test_answers_are_as_the_schema_says(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.script = saying(tokenizer.encode(TEXT))
    for extra in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}, {"n": 3}):
        response = server.chat(messages=ASKED, **extra)
        assert response.status_code == 200
        ChatCompletionResponse.model_validate_json(response.content)


def test_log_probabilities(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("Hi 🦙")
    engine.script = saying(tokens)
    answer = server.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(each.bytes or []) for each in logprobs.content).decode() == "Hi 🦙"
    assert [each.logprob for each in logprobs.content] == [-token / 100 for token in tokens]
    assert all(len(each.top_logprobs) == 2 for each in logprobs.content)


def test_the_default_length_is_the_rest_of_the_context(server: Server, engine: FakeEngine) -> None:
    assert server.chat(messages=ASKED).status_code == 200
    prompt = len(engine.submissions[0].prompts[0])
    assert engine.submissions[0].params.max_tokens == 512 - prompt
    engine.model = model_info(max_model_len=8192)
    assert server.chat(messages=ASKED).status_code == 200
    assert engine.submissions[1].params.max_tokens == 512  # --default-max-tokens


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_length(server: Server, engine: FakeEngine, name: str) -> None:
    assert server.chat(messages=ASKED, **{name: 7}).status_code == 200
    assert engine.submissions[0].params.max_tokens == 7


def test_parts_of_text_are_text(server: Server, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert server.chat(messages=messages).status_code == 200
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one\ntwo"}]
    assert engine.submissions[0].prompts == [tokenizer.encode_chat(plain)]


def test_a_refusal_in_the_history_is_what_the_assistant_said(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    said = [*ASKED, {"role": "assistant", "content": None, "refusal": "No."}, *ASKED]
    assert server.chat(messages=said).status_code == 200
    plain = [*ASKED, {"role": "assistant", "content": "No."}, *ASKED]
    assert engine.submissions[0].prompts == [tokenizer.encode_chat(plain)]


def test_a_template_reads_further_names(server: Server, engine: FakeEngine) -> None:
    asked = {"messages": ASKED, "chat_template_kwargs": {"enable_thinking": False, "self": 1}}
    assert server.chat(**asked).status_code == 200
    plain = server.chat(messages=ASKED)
    assert plain.status_code == 200
    assert engine.submissions[0].prompts == engine.submissions[1].prompts  # this one's template knows neither


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools", "documents"])
def test_a_template_s_own_names_stay_its_own(name: str, server: Server, engine: FakeEngine) -> None:
    refused = server.chat(messages=ASKED, chat_template_kwargs={name: []})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == f"chat_template_kwargs.{name}"
    assert engine.submissions == []
