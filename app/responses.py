"""The two calls' answers, whole and in chunks, as protocol.responses describes them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from app.assembly import Delta, ScoredToken
from app.validation import ValidRequest
from model_runner.tokenizer import Tokenizer
from model_runner.types import TokenLogprobs

_LEAST_LOGPROB = -9999.0  # JSON has no -Infinity; the field writes this


class AnswerFormat:
    """Writes the answers to one request. `identity` is what is the same in all of its chunks."""

    whole_object: str
    chunk_object: str

    def __init__(self, answer_id: str, request: ValidRequest, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._wants_scores = request.params.logprobs is not None
        self.include_usage = request.include_usage
        self._identity = {"id": answer_id, "created": int(time.time()), "model": request.model}

    def whole(self, choices: list[Delta], usage: dict[str, int]) -> dict[str, Any]:
        """`choices` hold all that became of each choice, in order."""
        listed = [self.choice(index, choice) for index, choice in enumerate(choices)]
        return {**self._identity, "object": self.whole_object, "choices": listed, "usage": usage}

    def chunks(self, index: int, delta: Delta, *, first: bool) -> list[dict[str, Any]]:
        """`first`: nothing was told of this choice before."""
        return [self._chunk([choice]) for choice in self.chunk_choices(index, delta, first=first)]

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._identity, "object": self.chunk_object, "choices": choices}
        if self.include_usage:
            chunk["usage"] = None
        return chunk

    def choice(self, index: int, whole: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def chunk_choices(self, index: int, delta: Delta, *, first: bool) -> list[dict[str, Any]]:
        raise NotImplementedError

    def scores(self, scored: list[ScoredToken]) -> dict[str, Any] | None:
        raise NotImplementedError


class CompletionFormat(AnswerFormat):
    whole_object = chunk_object = "text_completion"

    def choice(self, index: int, whole: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "text": whole.text,
            "logprobs": self.scores(whole.scored),
            "finish_reason": whole.finish_reason,
        }

    def chunk_choices(self, index: int, delta: Delta, *, first: bool) -> list[dict[str, Any]]:
        return [self.choice(index, delta)]

    def scores(self, scored: list[ScoredToken]) -> dict[str, Any] | None:
        if not self._wants_scores:
            return None
        return {
            "tokens": [self._spell(each.token_id) for each in scored],
            "token_logprobs": [each.logprobs and _finite(each.logprobs.logprob) for each in scored],
            "top_logprobs": [self._top(each) for each in scored],
            "text_offset": [each.text_offset for each in scored],
        }

    def _top(self, scored: ScoredToken) -> dict[str, float] | None:
        """The likeliest, and the token itself when it is not one of them. Of two spelled alike, the first."""
        logprobs = scored.logprobs
        if logprobs is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in (*_likeliest(logprobs), (logprobs.token_id, logprobs.logprob)):
            top.setdefault(self._spell(token_id), _finite(logprob))
        return top

    def _spell(self, token_id: int) -> str:
        """A token's text; a part of a character is written as OpenAI does: bytes:\\xe2\\x82."""
        spelled = self._tokenizer.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class ChatFormat(AnswerFormat):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, whole: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "logprobs": self.scores(whole.scored),
            "finish_reason": whole.finish_reason,
        }

    def chunk_choices(self, index: int, delta: Delta, *, first: bool) -> list[dict[str, Any]]:
        choices = []
        if first:
            choices.append(_delta_choice(index, {"role": "assistant", "content": ""}))
        if delta.text or delta.scored:
            choices.append(_delta_choice(index, {"content": delta.text}, self.scores(delta.scored)))
        if delta.finish_reason is not None:
            choices.append(_delta_choice(index, {}, None, delta.finish_reason))
        return choices

    def scores(self, scored: list[ScoredToken]) -> dict[str, Any] | None:
        if not self._wants_scores:
            return None
        content = []
        for logprobs in (each.logprobs for each in scored if each.logprobs is not None):
            top = [self._token(token_id, logprob) for token_id, logprob in _likeliest(logprobs)]
            content.append({**self._token(logprobs.token_id, logprobs.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self._tokenizer.token_bytes(token_id)
        return {
            "token": spelled.decode(errors="replace"),
            "logprob": _finite(logprob),
            "bytes": list(spelled),
        }


def _likeliest(logprobs: TokenLogprobs) -> Iterator[tuple[int, float]]:
    return zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _delta_choice(
    index: int,
    delta: dict[str, str],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """A prompt counts once, however many choices it has."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
