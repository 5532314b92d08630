"""Plain values that cross the seams: between the app and the engine, and between the two processes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

import msgspec


class FinishReason(StrEnum):
    """How a request, or one choice of it, ended. Set once."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw tokens. Already validated: every value is in range, every default is filled in.

    Stop strings are not here: they are matched where the text is, in the API process.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0  # 0.0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    seed: int = 0  # always set; drawn at the door when the client gave none. Unsigned 64 bits.
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None  # None: off; 0: of the drawn token alone; k: and of the k likeliest
    prompt_logprobs: int | None = None  # the same for each prompt token after the first
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = {}


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, from raw logits (before any sampling parameter)."""

    token_id: int
    logprob: float
    top_token_ids: list[int]  # likeliest first; empty when only the token itself was asked for
    top_logprobs: list[float]


class ChoiceOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step (or several, batched) added to one choice."""

    request_id: str  # the engine's id of one prompt: "<id>-<prompt index>"
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    # Once, on the first output of choice 0, when asked for: one entry per prompt token after the first.
    prompt_logprobs: list[TokenLogprobs] | None = None


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's account of one step."""

    step_seconds: float
    prefill_tokens: int
    decode_tokens: int
    running_sequences: int  # after the step
    waiting_sequences: int  # admitted, not yet scheduled
    used_blocks: int  # blocks held after the step, over all layer groups
    batch_sequences: int  # that ran in the step, those it finished included
    held_sequences: int = 0  # that could have run, and got no block
    preempted_requests: int = 0  # in this step
    recomputed_tokens: int = 0  # that must be computed again for it
    context_tokens: int = 0  # that the step's sequences had, its own tokens included: what attention reads


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """One per HTTP completion request, whatever became of it: what log line and metrics are made from."""

    request_id: str
    tenant: str
    reason: str  # a FinishReason's value
    code: str | None = None  # a Reason's value when it ended in an error
    abort_cause: str | None = None  # client_disconnected | shutdown | server_fault, when reason is abort
    prompt_tokens: int = 0
    generated_tokens: int = 0
    choices: int = 1
    reserved_bytes: int = 0
    preemptions: int = 0  # how often it had to give its cache back, and was computed again
    predicted_tokens: float = 0.0  # of all choices, as the lengths of such answers had it when it came
    predicted_wait_seconds: float | None = None  # when it was queued; None if it was not
    queue_seconds: float = 0.0
    run_seconds: float = 0.0  # from admission to the end
    e2e_seconds: float = 0.0

    @property
    def was_admitted(self) -> bool:
        return self.reserved_bytes > 0


class EngineObserver(Protocol):
    """What the async engine tells of itself as it happens (to app.metrics). Calls must be cheap."""

    def decided(self, decision: str, reason: str, projected_bytes: int) -> None:
        """At the door. decision: admitted | queued | rejected; reason: "" or a Reason's value."""

    def dequeued(self, queue_time_seconds: float) -> None:
        """A request left the queue for the engine (0.0 for one admitted at once)."""

    def first_token(self, seconds: float) -> None:
        """From arrival to the first token of a request."""

    def inter_token(self, seconds: float) -> None:
        """Between two consecutive tokens of one choice."""

    def tokens(self, *, prompt: int, generated: int) -> None:
        """Prompt tokens of a request that got its first token; tokens as they are generated."""

    def stepped(self, stats: StepStats) -> None: ...

    def ended(self, ending: Ending) -> None: ...

    def released(self, tenant: str, kv_byte_seconds: float) -> None:
        """A reservation is over: its bytes, summed over the time for which they were reserved."""

    def engine_restarted(self) -> None: ...
