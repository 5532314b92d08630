"""What clients read. These models make the schema, and the tests hold every real answer against them; the
answers themselves are written as plain dicts, because they are written once a token.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Finish = Literal["stop", "length"]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None  # null in a stream until the choice ends


class CompletionResponse(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = (
        None  # of a stream: null until its last chunk, which alone carries it, and only if asked for
    )


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[ChatTokenLogprob]
    refusal: None


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletionResponse(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatCompletionChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class Version(Answer):
    version: str


class Health(Answer):
    status: str


class ErrorBody(Answer):
    """OpenAI's shape. `code` is for machines; `param` is the dotted path of the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None
    # With `kv_cache_budget_exceeded`, and where there was no room for a request that was priced.
    required_bytes: int | None = None
    # Only with the latter.
    free_bytes: int | None = None
    predicted_wait_seconds: float | None = None
    # Only with the former.
    budget_bytes: int | None = None
    largest_max_tokens: int | None = None


class ErrorResponse(Answer):
    error: ErrorBody
