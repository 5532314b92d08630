"""From the tokens of a request, as they come, to the text of its choices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from app.validation import ValidRequest
from model_runner.async_engine import RequestStream, Tokens
from model_runner.errors import ServerFault
from model_runner.tokenizer import IncrementalDetokenizer, StopResult, StopStringMatcher, Tokenizer
from model_runner.types import FinishReason, TokenLogprobs


@dataclass(slots=True)
class ScoredToken:
    """One token with its log-probabilities, and where its text begins in the choice's, in characters."""

    token_id: int
    text_offset: int
    logprobs: TokenLogprobs | None  # None for the first token of an echoed prompt


@dataclass(slots=True)
class Delta:
    """What became certain about one choice and has not been told yet."""

    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" | "length", once, at the end

    def __bool__(self) -> bool:
        return bool(self.text or self.scored or self.finish_reason)


class ChoiceAssembler:
    """Detokenises one choice, cuts it before the first stop string, and lines the scores up with the text.

    A log-probability is told when all of its token's text is: of a token that may yet turn out to belong to a
    stop string, in whole or in part, nothing is told.
    """

    def __init__(self, tokenizer: Tokenizer, request: ValidRequest) -> None:
        # A message is a text of its own; a completion continues its prompt.
        self._detokenizer = IncrementalDetokenizer(tokenizer, begins_text=request.is_chat)
        self._matcher = StopStringMatcher(request.stops)
        self._wants_scores = request.params.logprobs is not None
        self._min_tokens = request.params.min_tokens
        self._told = 0  # characters
        self._detokenized = 0  # characters
        self._held: list[ScoredToken] = []
        # Where the held tokens' text ends. Shorter than what is held while a character is incomplete.
        self._ends: list[int] = []
        self.tokens = 0  # generated up to the ending, the token that brought it about included
        self.finish_reason: str | None = None
        self.met_stop_string = False

    def echo(self, text: str, scored: list[ScoredToken]) -> Delta:
        """The prompt, as the beginning of the choice's text. Stop strings are not looked for in it."""
        self._told = self._detokenized = len(text)
        return Delta(text, list(scored))

    def push(self, event: Tokens) -> Delta:
        """Tokens after the ending are ignored: the engine may have made some before it heard of it."""
        if self.finish_reason is not None:
            return Delta()
        delta = Delta()
        # A token that ended the choice by its id is a mark, not text.
        stopped_by_id = bool(event.token_ids) and event.finish_reason is FinishReason.STOP
        visible = event.token_ids[:-1] if stopped_by_id else event.token_ids
        logprobs = event.logprobs or []
        for index, token_id in enumerate(visible):
            self._push_token(token_id, logprobs[index] if self._wants_scores else None, delta)
            if self.finish_reason is not None:
                break
        else:
            self.tokens += stopped_by_id
            if event.finish_reason is not None:
                self._finish(event.finish_reason, delta)
        self._told += len(delta.text)
        self._release(delta)
        delta.finish_reason = self.finish_reason
        return delta

    def _push_token(self, token_id: int, logprobs: TokenLogprobs | None, delta: Delta) -> None:
        if logprobs is not None:
            self._held.append(ScoredToken(token_id, self._detokenized, logprobs))
        text = self._detokenizer.push((token_id,))
        self.tokens += 1
        self._detokenized += len(text)
        if text:
            self._ends += [self._detokenized] * (len(self._held) - len(self._ends))
        if self.tokens < self._min_tokens:
            delta.text += text
        else:
            self._take(self._matcher.push(text), delta)

    def _finish(self, reason: FinishReason, delta: Delta) -> None:
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise ServerFault(f"The engine ended a choice with {reason.value}.")
        self._take(self._matcher.push(self._detokenizer.flush()), delta)
        self._take(self._matcher.flush(), delta)
        if not self.met_stop_string:
            self.finish_reason = reason.value
            delta.scored, self._held, self._ends = self._held, [], []

    def _take(self, result: StopResult, delta: Delta) -> None:
        delta.text += result.text
        if result.matched:
            self.met_stop_string = True
            self.finish_reason = FinishReason.STOP.value

    def _release(self, delta: Delta) -> None:
        """Tell the scores of the tokens whose text is told."""
        count = bisect_right(self._ends, self._told)
        delta.scored += self._held[:count]
        del self._held[:count], self._ends[:count]


class RequestAssembly:
    """All choices of a request. Choice j of prompt i is number i * n + j."""

    def __init__(self, tokenizer: Tokenizer, request: ValidRequest, stream: RequestStream) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._stream = stream
        self.reset()

    def reset(self) -> None:
        """The request runs again from its beginning: forget what was collected."""
        request = self._request
        self._choices = [
            ChoiceAssembler(self._tokenizer, request) for _ in range(len(request.prompts) * request.params.n)
        ]
        self._begun: set[int] = set()
        self._prompt_scores: dict[int, list[TokenLogprobs]] = {}
        self._echoed: dict[int, tuple[str, list[ScoredToken]]] = {}
        self._waiting: dict[int, list[Tokens]] = {}  # for their prompt's scores, which come with choice 0

    def push(self, event: Tokens) -> Iterator[tuple[int, Delta]]:
        """What the event makes certain, by choice. Tells the engine of choices that a stop string ended."""
        prompt = event.prompt_index
        if self._request.echo and self._request.params.prompt_logprobs is not None:
            if event.prompt_logprobs is not None:
                self._prompt_scores[prompt] = event.prompt_logprobs
            elif prompt not in self._prompt_scores:
                self._waiting.setdefault(prompt, []).append(event)
                return
        yield from self._push(event)
        for later in self._waiting.pop(prompt, ()):
            yield from self._push(later)

    @property
    def completion_tokens(self) -> int:
        return 0 if self._request.scores_only else sum(choice.tokens for choice in self._choices)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self._request.prompts))

    def _push(self, event: Tokens) -> Iterator[tuple[int, Delta]]:
        number = event.prompt_index * self._request.params.n + event.choice
        choice = self._choices[number]
        delta = Delta()
        if number not in self._begun:
            self._begun.add(number)
            if self._request.echo:
                delta = self._echo(choice, event.prompt_index)
        if self._request.scores_only:
            delta.finish_reason = FinishReason.LENGTH.value if event.finish_reason else None
        else:
            new = choice.push(event)
            delta = Delta(delta.text + new.text, delta.scored + new.scored, new.finish_reason)
            if choice.met_stop_string and new.finish_reason is not None:
                self._stream.stop(event.prompt_index, event.choice, choice.tokens)
        if delta:
            yield number, delta

    def _echo(self, choice: ChoiceAssembler, prompt_index: int) -> Delta:
        # Once for all choices: a long prompt times many of them would hold up everybody else's tokens.
        if prompt_index not in self._echoed:
            self._echoed[prompt_index] = self._read_prompt(prompt_index)
        return choice.echo(*self._echoed[prompt_index])

    def _read_prompt(self, prompt_index: int) -> tuple[str, list[ScoredToken]]:
        prompt = self._request.prompts[prompt_index]
        text = self._request.prompt_texts[prompt_index]
        # A prompt of ids is echoed with its special tokens, as one of text is with what stands for them.
        of_ids = not text
        text = text or self._tokenizer.decode(prompt, skip_special_tokens=False)
        if prompt_index not in self._prompt_scores:
            return text, []
        detokenizer = IncrementalDetokenizer(
            self._tokenizer, begins_text=True, skip_special_tokens=not of_ids
        )
        scored = [ScoredToken(prompt[0], 0, None)]
        offset = len(detokenizer.push(prompt[:1]))
        for logprobs in self._prompt_scores[prompt_index]:
            scored.append(ScoredToken(logprobs.token_id, offset, logprobs))
            offset += len(detokenizer.push((logprobs.token_id,)))
        return text, scored
