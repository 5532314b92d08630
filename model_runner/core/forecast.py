"""When there will be room: what runs, and then the queue, played forward at the measured pace.

A forecast is a moment: the one at which the last request in the queue has been let in. From there one more
request costs a walk over the releases still to come, so a crowd that arrives at once is forecast in one
pass, not one replay of the whole queue each.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from model_runner.core.pace import Pace


class Forecast:
    """Times are seconds on the caller's clock; `blocks` and `sequences` are what is free at `now`."""

    def __init__(
        self,
        pace: Pace,
        *,
        now: float,
        free_blocks: float,
        free_sequences: int,
        token_seconds: float | None = None,
    ) -> None:
        """`token_seconds` is what lies between two tokens of a sequence; None: as the pace has it."""
        self._pace = pace
        self._token_seconds = pace.decode_seconds(1) if token_seconds is None else token_seconds
        self._moment = now
        self._free_blocks = free_blocks
        self._free_sequences: float = free_sequences
        self._prefill_free_at = now  # prompts are worked off one after the other
        self._releases: list[tuple[float, float, float]] = []  # (when, blocks, sequences), soonest first

    def running(
        self,
        *,
        blocks: float,
        sequences: int,
        prompt_tokens_left: int,
        tokens_left: float | Sequence[float],
        since: float,
    ) -> None:
        """Something that holds its blocks from `since` on, until it has worked off what is left.

        `tokens_left` may be several, equally likely: then a part of the blocks comes back at each. What many
        hold comes back in such parts, long before each has reached its mean.
        """
        if prompt_tokens_left:
            prefilled_at = max(since, self._prefill_free_at) + self._pace.prefill_seconds(prompt_tokens_left)
            self._prefill_free_at = prefilled_at
        else:
            prefilled_at = since
        ends = tokens_left if isinstance(tokens_left, Sequence) else (tokens_left,)
        for tokens in ends:
            at = prefilled_at + tokens * self._token_seconds
            insort(self._releases, (at, blocks / len(ends), sequences / len(ends)))

    def room_at(self, blocks: float, sequences: int) -> float:
        """When so much will be free, after everything forecast so far has been let in. Changes nothing."""
        when, _, _, _ = self._walk(blocks, sequences)
        return when

    def let_in(self, blocks: float, sequences: int) -> float:
        """Take so much as soon as it is free, and move to that moment. Then say `running` for it."""
        when, passed, free_blocks, free_sequences = self._walk(blocks, sequences)
        del self._releases[:passed]
        self._free_blocks = free_blocks - blocks
        self._free_sequences = free_sequences - sequences
        self._moment = when
        return when

    def _walk(self, blocks: float, sequences: int) -> tuple[float, int, float, float]:
        """(when there is room, releases passed until then, blocks and sequences free at that moment)."""
        free_blocks, free_sequences, when = self._free_blocks, self._free_sequences, self._moment
        if free_blocks >= blocks and free_sequences >= sequences:
            return when, 0, free_blocks, free_sequences
        for passed, (at, more_blocks, more_sequences) in enumerate(self._releases, start=1):
            free_blocks += more_blocks
            free_sequences += more_sequences
            when = max(when, at)
            if free_blocks >= blocks and free_sequences >= sequences:
                return when, passed, free_blocks, free_sequences
        # All have left, so the house is empty, and there is room for anyone.
        return when, len(self._releases), free_blocks, free_sequences
