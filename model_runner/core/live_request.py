"""A request as its client sees it: asked for once, and alive until its one ending."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from model_runner.core.ledger import Ask
from model_runner.core.tenants import DEFAULT_TENANT
from model_runner.errors import PlimsollError
from model_runner.types import ChoiceOutput, Ending, FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Submission:
    """One HTTP request: `prompts` are token ids, `params.n` choices are wanted of each."""

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    streaming: bool
    stop_strings: bool = False  # whoever reads its text may end a choice sooner than its tokens do
    tenant: str = DEFAULT_TENANT
    priority: int = 0  # lower is more urgent
    timeout_seconds: float | None = None  # the longest it would wait in the queue; None: as long as anybody


class Listener(Protocol):
    """Who waits for a request's tokens."""

    def output(self, prompt_index: int, output: ChoiceOutput) -> None: ...

    def restarted(self) -> None:
        """All output so far is void: the request runs again from its beginning."""

    def ended(self, error: PlimsollError | None) -> None:
        """Once, last."""


@dataclass(slots=True)
class LiveChoice:
    """One of the continuations that its client waits for."""

    generated_tokens: int = 0
    last_token_at: float | None = None
    finish_reason: FinishReason | None = None


@dataclass(slots=True, eq=False)
class LiveRequest:
    submission: Submission
    ask: Ask
    listener: Listener
    arrived_at: float
    projected_bytes: int
    choices: list[LiveChoice]  # prompt by prompt
    unfinished: int
    admitted_at: float | None = None  # the first time
    first_token_at: float | None = None
    running: bool = False  # handed to the engine that is alive now
    delivered: bool = False  # the client has seen some of it: it can't be run again
    restart_unseen: bool = False
    predicted_wait_seconds: float | None = None  # what the door foresaw, if it queued the request
    predicted_tokens: float = 0.0  # of all choices, when it came
    preemptions: int = 0
    deaths: int = 0
    ended: bool = False
    unsaid: Ending | None = None  # a stop string may yet be found in its last tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.submission.prompts)

    def choice(self, prompt_index: int, choice: int) -> LiveChoice:
        return self.choices[prompt_index * self.submission.params.n + choice]

    def has_finished(self, prompt_index: int) -> bool:
        """Whether every choice of one of its prompts has."""
        n = self.submission.params.n
        choices = self.choices[prompt_index * n : (prompt_index + 1) * n]
        return all(choice.finish_reason is not None for choice in choices)

    @property
    def generated_tokens(self) -> int:
        return sum(choice.generated_tokens for choice in self.choices)

    @property
    def how_finished(self) -> FinishReason:
        reasons = {choice.finish_reason for choice in self.choices}
        return FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP

    def forget_output(self) -> None:
        self.choices = [LiveChoice() for _ in self.choices]
        self.unfinished = len(self.choices)
