"""The seam between scheduling and running: plain data, made fresh every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from model_runner.types import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The tokens of one sequence that run in this step, and where their keys and values go."""

    sequence_id: int  # unique for the engine's lifetime
    token_ids: Sequence[int]  # the new tokens, at positions start … start + len - 1
    start: int  # tokens already in the cache
    # One table per layer group, parallel to BlockLayout.groups. Entry i is the block that holds tokens
    # [i * block_size, (i + 1) * block_size); FREED (-1) where a sliding window has left it behind. The lists
    # are the scheduler's own, shared to avoid copies: read them during execute(), never keep or change them.
    block_tables: Sequence[Sequence[int]]
    # Log-probabilities wanted for the prompt tokens of this chunk: the k likeliest, or None.
    prompt_logprobs: int | None = None
    # The prompt token that follows the chunk (its log-probability belongs to the chunk's last row), if any.
    next_prompt_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to draw from a scheduled sequence's last row. n choices draw n times from one prompt's."""

    row: int  # index into SchedulerOutput.sequences
    sequence_id: int  # the sequence that the token will belong to
    choice: int
    position: int  # how many tokens the choice has generated before this one
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    banned_token_ids: Sequence[int] = ()  # stop tokens, while fewer than min_tokens have been generated


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    sequences: list[ScheduledSequence]
    samples: list[SampleRow]
    # (source block, destination block): to be copied whole, before the forward pass.
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    @property
    def context_tokens(self) -> int:
        """Of all its sequences, the step's own tokens included: what full attention reads."""
        return sum(sequence.start + len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    token_ids: list[int]  # parallel to SchedulerOutput.samples
    logprobs: list[TokenLogprobs | None]  # parallel to SchedulerOutput.samples
    # By sequence id, for sequences that asked: this chunk's entries, in prompt order.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class Runner(Protocol):
    """What EngineCore needs of a model. The real one is model_runner.worker.runner.ModelRunner."""

    def execute(self, scheduled: SchedulerOutput) -> RunnerOutput:
        """Run one forward pass over the packed tokens and draw the samples. Any exception ends the engine."""
