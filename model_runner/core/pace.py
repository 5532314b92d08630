"""How fast the engine goes, as measured: what forecasts of waiting times are made from."""

from __future__ import annotations

from dataclasses import dataclass

from model_runner.types import StepStats

_DECODE_WEIGHT = 0.05  # of one step in the running mean: about the last twenty steps count
_PREFILL_TOKENS_OF_MEMORY = 2048  # the prefill rate is a mean over about this many recent tokens


@dataclass(slots=True)
class Pace:
    """Running means of the two speeds. Starts from what the engine measured while it warmed up."""

    decode_step_seconds: float  # of a step that only decodes
    prefill_tokens_per_second: float
    sequence_seconds: float = 0.0  # that each further sequence adds to it
    # From one token of a sequence to its next, prompts of others that are read in between included: what
    # those who run really advance by. None until the first step has been seen.
    token_seconds: float | None = None

    def observe(self, stats: StepStats) -> None:
        """Learn from one step. A mixed step's time beyond a plain decode step is charged to its prefill."""
        if stats.step_seconds <= 0:
            return
        if stats.decode_tokens:
            before = self.decode_step_seconds if self.token_seconds is None else self.token_seconds
            self.token_seconds = before + _DECODE_WEIGHT * (stats.step_seconds - before)
        if stats.prefill_tokens == 0:
            if stats.decode_tokens:
                change = stats.step_seconds - self.decode_step_seconds
                self.decode_step_seconds += _DECODE_WEIGHT * change
            return
        seconds = stats.step_seconds
        if stats.decode_tokens:
            # Never less than half: on some machines prefill rides along almost free, and free can't be a
            # rate.
            seconds = max(seconds - self.decode_step_seconds, seconds / 2)
        weight = stats.prefill_tokens / (stats.prefill_tokens + _PREFILL_TOKENS_OF_MEMORY)
        # Means of seconds per token, not of tokens per second: a slow step must not be drowned by a fast one.
        seconds_per_token = 1 / self.prefill_tokens_per_second
        seconds_per_token += weight * (seconds / stats.prefill_tokens - seconds_per_token)
        self.prefill_tokens_per_second = 1 / seconds_per_token

    def prefill_seconds(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_per_second

    def decode_seconds(self, tokens: float) -> float:
        return tokens * (self.decode_step_seconds if self.token_seconds is None else self.token_seconds)
