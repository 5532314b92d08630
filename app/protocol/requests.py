"""The bodies of the two completion calls, as OpenAI documents them, and the field's common extensions.

Every optional field may be null, which means unset. Each field's description finishes the sentence "`field`
must be …": it is what the schema says and what a refusal says. Fields that are not declared here are kept in
`model_extra`, where app.validation looks for the known ones that are not supported.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
MIN_PRIORITY, MAX_PRIORITY = -10, 10

_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}

# Unions of lists are read by app.validation: it stops at the first fault, and says where it is.
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ]
        }
    ),
]
Content = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[str, Any],
    Field(max_length=MAX_LOGIT_BIAS),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class WireModel(BaseModel):
    """Strict: a boolean is no integer, a string no number, and NaN and Infinity are nothing at all."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(WireModel):
    include_usage: bool | None = Field(None, description="true or false")


class GenerationRequest(WireModel):
    """What both calls share."""

    model: str | None = Field(None, description="the name of the served model")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="an integer of at least 1; it is the newer name of `max_tokens`"
    )
    temperature: float | None = Field(None, ge=0, le=2, description="a number from 0 (greedy) to 2")
    top_p: float | None = Field(None, gt=0, le=1, description="a number above 0 and up to 1")
    top_k: int | None = Field(None, ge=-1, description="an integer of at least 1, or 0 or -1 to turn it off")
    min_p: float | None = Field(None, ge=0, le=1, description="a number from 0 to 1")
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED, description="an integer of at most 64 bits")
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)] | None = (
        Field(
            None,
            description=f"a string or a list of at most {MAX_STOPS} strings, "
            f"each of 1 to {MAX_STOP_CHARACTERS} characters",
        )
    )
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = Field(
        None, description=f"a list of at most {MAX_STOP_TOKEN_IDS} token ids of the model's vocabulary"
    )
    ignore_eos: bool | None = Field(None, description="true or false")
    min_tokens: int | None = Field(None, ge=0, description="an integer from 0 to `max_tokens`")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description=f"an integer from 1 to {MAX_CHOICES}")
    stream: bool | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = Field(
        None, description="an object, and only where `stream` is true"
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="a number from -2 to 2")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="a number from -2 to 2")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="a number from 0.01 to 100; 1 turns it off"
    )
    logit_bias: LogitBias | None = Field(
        None,
        description=f"an object of at most {MAX_LOGIT_BIAS} token ids of the model's vocabulary, "
        "each with a number from -100 to 100",
    )
    priority: int | None = Field(
        None,
        description="an integer, where lower is more urgent and 0 is usual; "
        f"one below {MIN_PRIORITY} or above {MAX_PRIORITY} counts as that",
    )
    user: str | None = Field(None, description="a string")


class CompletionRequest(GenerationRequest):
    prompt: Prompt = Field(
        description="a string, a list of strings, a list of token ids, or a list of lists of token ids, "
        "none of them empty"
    )
    max_tokens: int | None = Field(
        None, ge=0, description="an integer of at least 1, or 0 to score the prompt with `echo`"
    )
    echo: bool | None = Field(None, description="true or false")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}"
    )


class ChatMessage(WireModel):
    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="system, developer, user or assistant"
    )
    content: Content = Field(None, description="a string, or a list of parts of type text")
    name: str | None = Field(None, description="a string")
    refusal: str | None = Field(None, description="a string")


class ChatCompletionRequest(GenerationRequest):
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="an object: further names that the model's chat template may read"
    )
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)] = Field(
        description="a list of at least one message"
    )
    max_tokens: int | None = Field(None, ge=1, description="an integer of at least 1")
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description=f"an integer from 0 to {MAX_LOGPROBS}, and only where `logprobs` is true",
    )
