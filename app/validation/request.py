"""The two calls, checked and filled in."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from app.protocol.requests import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from app.validation.limits import Limits
from app.validation.parsing import must_be, parse_body, refuse
from app.validation.prompts import read_messages, read_prompts
from app.validation.unsupported import (
    CHAT,
    COMPLETION,
    STREAM_OPTIONS,
    refuse_best_of,
    refuse_unsupported,
)
from model_runner.errors import ModelNotFound
from model_runner.tokenizer import Tokenizer
from model_runner.types import SamplingParams

MAX_SCORES = 2**19  # in one answer: about 20 MB of JSON, and ten times that in memory on the way
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI documents for /v1/completions
_LEAST_TEMPERATURE = 1e-5  # below it logits overflow when they are divided by it; the limit is greedy
_LEAST_TOP_P = 1e-6  # the likeliest token alone reaches it in any vocabulary under a million


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """Only such a one may be submitted. Everything is in range, and every default is filled in."""

    model: str
    prompts: list[list[int]]
    prompt_texts: list[str]  # parallel to prompts; "" for one given in token ids, and in a chat
    is_chat: bool
    params: SamplingParams
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    priority: int  # from MIN_PRIORITY to MAX_PRIORITY; lower is more urgent
    echo: bool = False
    scores_only: bool = False  # max_tokens is 0: the one token that the engine draws is thrown away


def validate_completion(body: bytes, limits: Limits, tokenizer: Tokenizer) -> ValidRequest:
    """Raises ClientError."""
    request = parse_body(CompletionRequest, body)
    _check_shared(request, limits)
    refuse_unsupported(request.model_extra, COMPLETION)
    prompts, texts = read_prompts(request.prompt, limits, tokenizer)
    echo = request.echo or False
    requested = _requested_max_tokens(request)
    if requested == 0 and not echo:
        must_be("max_tokens", "at least 1, or 0 together with `echo`", 0)
    longest = max(map(len, prompts))
    max_tokens = limits.resolve_max_tokens(
        requested, longest, default=DEFAULT_COMPLETION_TOKENS, param="prompt"
    )
    params = _sampling(request, max_tokens, limits, request.logprobs, scores_prompt=echo)
    _bound_scores(params, prompts, stream=request.stream or False)
    return ValidRequest(
        model=limits.served_model_name,
        prompts=prompts,
        prompt_texts=texts,
        is_chat=False,
        params=params,
        stops=_stops(request),
        stream=request.stream or False,
        include_usage=_include_usage(request),
        priority=_priority(request),
        echo=echo,
        scores_only=max_tokens == 0,
    )


def validate_chat(body: bytes, limits: Limits, tokenizer: Tokenizer) -> ValidRequest:
    """Raises ClientError."""
    request = parse_body(ChatCompletionRequest, body)
    _check_shared(request, limits)
    refuse_unsupported(request.model_extra, CHAT)
    if request.top_logprobs and not request.logprobs:
        refuse("top_logprobs", "`top_logprobs` is allowed only where `logprobs` is true.")
    prompt = read_messages(request.messages, request.chat_template_kwargs or {}, limits, tokenizer)
    max_tokens = limits.resolve_max_tokens(
        _requested_max_tokens(request), len(prompt), default=limits.default_max_tokens, param="messages"
    )
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    params = _sampling(request, max_tokens, limits, logprobs, scores_prompt=False)
    _bound_scores(params, [prompt], stream=request.stream or False)
    return ValidRequest(
        model=limits.served_model_name,
        prompts=[prompt],
        prompt_texts=[""],
        is_chat=True,
        params=params,
        stops=_stops(request),
        stream=request.stream or False,
        include_usage=_include_usage(request),
        priority=_priority(request),
    )


def _check_shared(request: GenerationRequest, limits: Limits) -> None:
    if request.model is not None and request.model != limits.served_model_name:
        raise ModelNotFound(
            f"The model `{request.model[:200]}` does not exist here; "
            f"this server serves `{limits.served_model_name}`.",
            param="model",
        )
    if request.stream_options is not None:
        if not request.stream:
            refuse("stream_options", "`stream_options` is allowed only where `stream` is true.")
        refuse_unsupported(request.stream_options.model_extra, STREAM_OPTIONS, "stream_options.")
    refuse_best_of(request.model_extra, request.n or 1)


def _requested_max_tokens(request: CompletionRequest | ChatCompletionRequest) -> int | None:
    older, newer = request.max_tokens, request.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        refuse("max_tokens", "`max_tokens` and `max_completion_tokens` must be equal where both are given.")
    return older if newer is None else newer


def _sampling(
    request: GenerationRequest,
    max_tokens: int,
    limits: Limits,
    logprobs: int | None,
    *,
    scores_prompt: bool,
) -> SamplingParams:
    temperature = 1.0 if request.temperature is None else request.temperature
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        must_be("min_tokens", f"an integer from 0 to `max_tokens`, which is {max_tokens}", min_tokens)
    for index, token_id in enumerate(request.stop_token_ids or ()):
        if not 0 <= token_id < limits.vocab_size:
            must_be(f"stop_token_ids[{index}]", f"a token id from 0 to {limits.vocab_size - 1}", token_id)
    return SamplingParams(
        max_tokens=max(1, max_tokens),
        n=request.n or 1,
        temperature=temperature if temperature >= _LEAST_TEMPERATURE else 0.0,
        top_p=1.0 if request.top_p is None else max(request.top_p, _LEAST_TOP_P),
        top_k=_top_k(request, limits),
        min_p=request.min_p or 0.0,
        seed=secrets.randbits(64) if request.seed is None else request.seed % 2**64,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos or False,
        min_tokens=min_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if scores_prompt else None,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=_logit_bias(request, limits),
    )


def _top_k(request: GenerationRequest, limits: Limits) -> int:
    """0 where it cuts nothing off. No number goes on that may be too large for the wire to the engine."""
    top_k = request.top_k or 0
    return top_k if 0 < top_k < limits.vocab_size else 0


def _bound_scores(params: SamplingParams, prompts: list[list[int]], *, stream: bool) -> None:
    """A log-probability is far larger than its token. What a stream sends as it goes is not gathered."""
    if params.logprobs is None:
        return
    gathered = sum(map(len, prompts)) if params.prompt_logprobs is not None else 0
    gathered += 0 if stream else len(prompts) * params.max_tokens
    scores = gathered * params.n * (params.logprobs + 1)
    if scores > MAX_SCORES:
        message = (
            f"`logprobs` must make at most {MAX_SCORES} log-probabilities in one answer, not {scores}; "
            "ask for fewer of them, fewer choices, or fewer tokens."
        )
        refuse("logprobs", message)


def _logit_bias(request: GenerationRequest, limits: Limits) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (request.logit_bias or {}).items():
        param = f"logit_bias.{key[:20]}"
        # isdecimal alone takes other scripts' digits; the length keeps int() cheap.
        if not (key.isascii() and key.isdecimal() and len(key) <= 9 and int(key) < limits.vocab_size):
            must_be(param, f"for a token id from 0 to {limits.vocab_size - 1}", key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            must_be(param, "a number from -100 to 100", value)
        bias[int(key)] = float(value)
    return bias


def _stops(request: GenerationRequest) -> tuple[str, ...]:
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())


def _include_usage(request: GenerationRequest) -> bool:
    return bool(request.stream_options and request.stream_options.include_usage)


def _priority(request: GenerationRequest) -> int:
    return min(max(request.priority or 0, MIN_PRIORITY), MAX_PRIORITY)
