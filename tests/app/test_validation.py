"""What may be asked: null is unset, what is out of range is named, what is unsupported is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.protocol.requests import ChatCompletionRequest, CompletionRequest
from app.validation import Limits, ValidRequest, validate_chat, validate_completion
from app.validation.unsupported import CHAT, COMPLETION
from model_runner.errors import ClientError, ContextLengthExceeded, InvalidRequest, ModelNotFound
from model_runner.tokenizer import Tokenizer

LIMITS = Limits("served", 512, 49152, 64, 4)
USER = {"role": "user", "content": "Hi"}

NEUTRAL = [(True, name, value) for name, values in CHAT.items() for value in values] + [
    (False, name, value) for name, values in COMPLETION.items() for value in values
]


def complete(tokenizer: Tokenizer, **body: Any) -> ValidRequest:
    return validate_completion(json.dumps({"prompt": "Hi", **body}).encode(), LIMITS, tokenizer)


def chat(tokenizer: Tokenizer, **body: Any) -> ValidRequest:
    return validate_chat(json.dumps({"messages": [USER], **body}).encode(), LIMITS, tokenizer)


def refused(tokenizer: Tokenizer, is_chat: bool = False, **body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        (chat if is_chat else complete)(tokenizer, **body)
    assert caught.value.message.endswith(".")
    assert len(caught.value.message) < 400
    assert caught.value.code
    return caught.value


OUT_OF_RANGE: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, "1", True, [], float("nan"), float("inf")],
    "top_p": [0, 1.1, -1, "1", False],
    "top_k": [-2, 1.5, True, "5"],
    "min_p": [-0.1, 1.1],
    "n": [0, 129, 1.0, True],
    "max_tokens": [0, -1, 1.5, "5", True],
    "max_completion_tokens": [0, -1],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 1e-300, 1e300],
    "seed": [2**64, -(2**63) - 1, 1.5, "1", True],
    "stop": ["", ["a", ""], [1], 5, ["x"] * 17, "x" * 1025],
    "stop_token_ids": [[-1], [49152], ["1"], 5, [True], [1] * 1025],
    "min_tokens": [-1, 17, 1.5],
    "logit_bias": [
        *[{"5": 101}, {"5": True}, {"5": None}, {"5": "1"}, {"a": 1}, {"-1": 1}, {"49152": 1}, {"٣": 1}, []],
        {str(token): 1 for token in range(1025)},
    ],
    "stream": [1, "true", []],
    "echo": [1, "true", []],
    "ignore_eos": [1, "true", []],
    "logprobs": [-1, 21, True, "1"],
    "user": [5],
    "model": [5],
    "stream_options": [[], {"include_usage": True}],
}
IN_RANGE: dict[str, list[Any]] = {
    "temperature": [0, 2],
    "top_p": [1, 0.001],
    "top_k": [-1, 0, 40],
    "min_p": [1],
    "n": [128],
    "seed": [2**64 - 1, -(2**63)],
    "stop": ["x", ["a"] * 16, []],
    "stop_token_ids": [[0, 49151], []],
    "logit_bias": [{"0": -100, "49151": 100.0}, {}],
    "min_tokens": [16],
    "logprobs": [0, 20],
    "max_tokens": [511],
    "max_completion_tokens": [3],
    "repetition_penalty": [1.3],
    "presence_penalty": [-2],
    "frequency_penalty": [2],
    "model": ["served"],
    "user": ["somebody"],
    "priority": [0, -3, 10, 11, -(10**12)],
    "a_name_nobody_knows": [{"x": [1]}],
}
UNSUPPORTED: dict[str, list[Any]] = {
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "functions": [[{"name": "f"}]],
    "function_call": [{"name": "f"}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
    "best_of": [2, True],
    "store": [True],
    "service_tier": ["priority"],
    "modalities": [["text", "audio"]],
    "audio": [{"voice": "alloy"}],
    "prediction": [{"type": "content", "content": "x"}],
    "reasoning_effort": ["high"],
    "verbosity": ["low"],
    "web_search_options": [{}],
    "moderation": [{"model": "omni-moderation-latest"}],
    "stop_regex": ["a+"],
    "n_predict": [5],
    "suffix": ["the end"],
    "guided_json": [{"type": "object"}],
    "guided_regex": ["a+"],
    "use_beam_search": [True, 0],
    "length_penalty": [1.1],
    "prompt_logprobs": [0],
    "skip_special_tokens": [False],
    "chat_template": ["{{ messages }}"],
    "allowed_token_ids": [[1]],
    "bad_words": [["x"]],
    "typical_p": [0.9],
    "mirostat": [2],
}


def cases(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(OUT_OF_RANGE), ids=lambda value: str(value)[:20])
def test_out_of_range_is_named(tokenizer: Tokenizer, name: str, value: Any) -> None:
    error = refused(tokenizer, **{name: value})
    assert error.param is not None
    assert error.param.startswith(name)
    assert f"`{error.param}`" in error.message


@pytest.mark.parametrize(("name", "value"), cases(IN_RANGE), ids=lambda value: str(value)[:20])
def test_in_range_is_taken(tokenizer: Tokenizer, name: str, value: Any) -> None:
    assert complete(tokenizer, **{name: value}).prompts == [tokenizer.encode("Hi")]


@pytest.mark.parametrize("is_chat", [False, True])
def test_null_means_unset_for_every_field(tokenizer: Tokenizer, is_chat: bool) -> None:
    wire = ChatCompletionRequest if is_chat else CompletionRequest
    optional: dict[str, Any] = {
        name: None for name, field in wire.model_fields.items() if not field.is_required()
    }
    optional["seed"] = 1  # the one that is drawn anew each time
    unsupported = dict.fromkeys(CHAT if is_chat else COMPLETION)
    validate = chat if is_chat else complete
    assert validate(tokenizer, **optional, **unsupported) == validate(tokenizer, seed=1)
    assert validate(tokenizer, seed=None).params.seed != validate(tokenizer).params.seed
    messages = [{**USER, "name": None, "tool_calls": None}]
    assert chat(tokenizer, messages=messages, seed=1) == chat(tokenizer, seed=1)
    streamed = complete(tokenizer, stream=True, stream_options={"include_usage": None})
    assert not streamed.include_usage


@pytest.mark.parametrize(("is_chat", "name", "value"), NEUTRAL, ids=lambda value: str(value)[:24])
def test_what_asks_for_nothing_is_taken(tokenizer: Tokenizer, is_chat: bool, name: str, value: Any) -> None:
    (chat if is_chat else complete)(tokenizer, **{name: value})


@pytest.mark.parametrize(("name", "value"), cases(UNSUPPORTED), ids=lambda value: str(value)[:24])
def test_what_is_not_supported_is_refused_by_name(tokenizer: Tokenizer, name: str, value: Any) -> None:
    for is_chat in (False, True):
        error = refused(tokenizer, is_chat, **{name: value})
        assert error.param == name
        assert error.code == "unsupported_parameter"
        assert name in error.message


def test_best_of_all_choices_asks_for_nothing(tokenizer: Tokenizer) -> None:
    assert complete(tokenizer, best_of=1).params.n == 1
    assert complete(tokenizer, best_of=3, n=3).params.n == 3
    assert refused(tokenizer, best_of=1, n=3).param == "best_of"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        (None, "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        (["a", ""], "prompt[1]"),
        (["a", 5], "prompt[1]"),
        ([5, "a"], "prompt[1]"),
        ([5, True], "prompt[1]"),
        ([True], "prompt[0]"),
        ([5, 1.5], "prompt[1]"),
        ([5, -1], "prompt[1]"),
        ([5, 49152], "prompt[1]"),
        ([[5], []], "prompt[1]"),
        ([[5], [6, None]], "prompt[1][1]"),
        ([[5], "a"], "prompt[1]"),
        ([[[5]]], "prompt[0][0]"),
        (["a"] * 5, "prompt"),
    ],
)
def test_prompts_at_fault(tokenizer: Tokenizer, prompt: Any, param: str) -> None:
    assert refused(tokenizer, prompt=prompt).param == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("Hi", "messages"),
        (["Hi"], "messages[0]"),
        ([USER, {"content": "x"}], "messages[1].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}],
                }
            ],
            "messages[0].content[1].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([USER, {"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[1].tool_calls"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ],
)
def test_messages_at_fault(tokenizer: Tokenizer, messages: Any, param: str) -> None:
    assert refused(tokenizer, True, messages=messages).param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt": "Hi", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
    ids=range(9),
)
def test_bodies_that_are_no_request(tokenizer: Tokenizer, body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_completion(body, LIMITS, tokenizer)
    assert caught.value.code in ("invalid_json", "invalid_type")


def test_fields_that_go_together(tokenizer: Tokenizer) -> None:
    assert refused(tokenizer, True, top_logprobs=3).param == "top_logprobs"
    assert chat(tokenizer, top_logprobs=0).params.logprobs is None
    assert chat(tokenizer, logprobs=True).params.logprobs == 0
    assert refused(tokenizer, max_tokens=3, max_completion_tokens=4).param == "max_tokens"
    assert complete(tokenizer, max_tokens=3, max_completion_tokens=3).params.max_tokens == 3
    assert refused(tokenizer, max_tokens=4, min_tokens=5).param == "min_tokens"
    assert refused(tokenizer, max_tokens=0).param == "max_tokens"
    assert complete(tokenizer, max_tokens=0, echo=True).scores_only
    streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_obfuscation": True}}
    assert refused(tokenizer, **streamed).param == "stream_options.include_obfuscation"


def test_answers_are_bounded(tokenizer: Tokenizer) -> None:
    scored: dict[str, Any] = {"prompt": [5] * 500, "echo": True, "max_tokens": 10, "logprobs": 20}
    assert complete(tokenizer, **scored).params.prompt_logprobs == 20
    assert complete(tokenizer, **scored, n=48).params.n == 48
    assert refused(tokenizer, **scored, n=50).param == "logprobs"
    long: dict[str, Any] = {"max_tokens": 400, "logprobs": True, "top_logprobs": 20, "n": 128}
    assert refused(tokenizer, True, **long).param == "logprobs"
    assert chat(tokenizer, **long, stream=True).params.n == 128


def test_only_the_served_model_is_served(tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelNotFound, match="`served`"):
        complete(tokenizer, model="gpt-5")


def test_extremes_are_made_harmless(tokenizer: Tokenizer) -> None:
    assert complete(tokenizer, temperature=1e-300).params.temperature == 0
    assert complete(tokenizer, top_p=1e-300).params.top_p == 1e-6


def test_a_hopeless_prompt_is_not_tokenised(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    with pytest.raises(ContextLengthExceeded, match="at least"):
        complete(tokenizer, prompt="x" * 1_000_000)


@pytest.mark.parametrize("prompt", [["x"] * 500_000, [["x"]] * 500_000, [5] * 500_000])
def test_huge_lists_are_refused_with_one_error(tokenizer: Tokenizer, prompt: list[Any]) -> None:
    with pytest.raises(ClientError):
        complete(tokenizer, prompt=prompt)


@pytest.mark.parametrize("top_k", [49152, 10**30])
def test_a_top_k_that_cuts_nothing_off_is_off(tokenizer: Tokenizer, top_k: int) -> None:
    """Larger than 64 bits, it could not even be told to the engine."""
    assert complete(tokenizer, top_k=top_k).params.top_k == 0
    assert complete(tokenizer, top_k=49151).params.top_k == 49151
