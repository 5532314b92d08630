"""A request inside the engine: one admitted prompt and its n choices."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from model_runner.core.block_pool import BlockLease, BlockTables
from model_runner.types import FinishReason, SamplingParams, TokenLogprobs


class RequestStatus(Enum):
    """Prefill progress is not a status: it is `num_computed_tokens` catching up with the prompt."""

    WAITING = "waiting"  # admitted and not yet scheduled, or preempted: holds nothing
    RUNNING = "running"
    FINISHED = "finished"  # every choice has ended and every block is back


_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.WAITING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Choice:
    """One of the n continuations of a prompt."""

    index: int
    sequence_id: int
    output_token_ids: list[int] = field(default_factory=list)
    # Output tokens in the cache: all but the last, unless it was preempted and catches up.
    num_computed_outputs: int = 0
    tables: BlockTables | None = None  # None until the prompt is computed, and again after the end
    finish_reason: FinishReason | None = None

    @property
    def is_behind(self) -> bool:
        """Whether more than its last token must be computed before the next can be drawn."""
        return self.num_computed_outputs < len(self.output_token_ids) - 1

    def finish(self, reason: FinishReason) -> None:
        """Set once. Gives back the choice's blocks."""
        assert self.finish_reason is None, f"choice {self.index} has already ended: {self.finish_reason}"
        self.finish_reason = reason
        self.forget_cache()

    def forget_cache(self) -> None:
        self.num_computed_outputs = 0
        if self.tables is not None:
            self.tables.release()
            self.tables = None


@dataclass(slots=True, eq=False)
class Request:
    """`tables` are the prompt's, until its last chunk is computed; then the choices share its blocks."""

    request_id: str
    seniority: tuple[int, int]  # (priority, number of arrival): the smallest goes first, whatever befalls it
    prompt_token_ids: list[int]
    params: SamplingParams
    choices: list[Choice]
    lease: BlockLease
    tables: BlockTables
    stop_token_ids: frozenset[int]
    max_output_tokens: int  # of each choice
    banned_token_ids: tuple[int, ...]  # while a choice has fewer than min_tokens
    num_computed_tokens: int = 0  # of the prompt
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    live_choices: int = field(init=False)
    generated_tokens: int = 0  # of all its choices
    protected_until: int = 0  # generated_tokens must reach this before it may be preempted (again)
    _status: RequestStatus = RequestStatus.WAITING

    def __post_init__(self) -> None:
        self.live_choices = len(self.choices)

    @property
    def status(self) -> RequestStatus:
        return self._status

    @property
    def sequence_id(self) -> int:
        """The prompt's sequence, which becomes choice 0's."""
        return self.choices[0].sequence_id

    @property
    def is_prefilled(self) -> bool:
        return self.num_computed_tokens == len(self.prompt_token_ids)

    def change_status(self, status: RequestStatus) -> None:
        assert status in _TRANSITIONS[self._status], f"{self.request_id}: {self._status} -> {status}"
        self._status = status

    def live(self) -> list[Choice]:
        """The choices that have not ended, in order."""
        return [choice for choice in self.choices if choice.finish_reason is None]

    def finish_choice(self, choice: Choice, reason: FinishReason) -> None:
        choice.finish(reason)
        self.live_choices -= 1

    @property
    def is_forked(self) -> bool:
        """Whether the prompt's blocks have gone over to the choices."""
        return self.is_prefilled and not self.tables.num_blocks

    @property
    def has_output(self) -> bool:
        """Whether the prompt was computed before: its choices go on from what they have drawn."""
        return self.generated_tokens > 0

    @property
    def tokens_to_compute(self) -> int:
        """Before it decodes: what is left of its prompt, and of what its choices had drawn."""
        left = len(self.prompt_token_ids) - self.num_computed_tokens
        return left + sum(len(c.output_token_ids) - c.num_computed_outputs for c in self.live())

    @property
    def longest_output(self) -> int:
        return max(len(choice.output_token_ids) for choice in self.live())

    def behind(self) -> Choice | None:
        """The first choice that must catch up."""
        return next((choice for choice in self.live() if choice.is_behind), None)

    def forget_cache(self) -> int:
        """Give every block back and keep every token. Returns how many tokens must be computed again."""
        computed = self.num_computed_tokens
        computed += sum(choice.num_computed_outputs for choice in self.live())
        for choice in self.live():
            choice.forget_cache()
        self.tables.release()
        self.num_computed_tokens = 0
        if not self.has_output:
            self.prompt_logprobs.clear()
        # It must get on by at least one token before its work may be thrown away again.
        self.protected_until = self.generated_tokens + 1
        return computed

    def fork(self) -> None:
        """The prompt is computed: hand its blocks to the choices that go on."""
        for choice in self.live():
            choice.tables = self.tables.fork(self.num_computed_tokens)
        self.tables.release()

    def finish_reason_after(self, token_id: int, generated: int) -> FinishReason | None:
        """How a choice ends on drawing `token_id` as its `generated`-th token, if it does."""
        if token_id in self.stop_token_ids and generated > self.params.min_tokens:
            return FinishReason.STOP
        if generated >= self.max_output_tokens:
            return FinishReason.LENGTH
        return None
