"""One step's batch while it is being put together: packed sequences, the tokens to draw, blocks to copy."""

from __future__ import annotations

from model_runner.core.block_pool import BlockTables
from model_runner.core.output import SampleRow, ScheduledSequence, SchedulerOutput
from model_runner.core.request import Choice, Request


class StepBatch:
    """Decodes are added first, then chunks of prompts and of what preempted choices had drawn."""

    def __init__(self, block_size: int, groups: int) -> None:
        self._block_size = block_size
        self._groups = groups
        self._sequences: list[ScheduledSequence] = []
        self._samples: list[SampleRow] = []
        self._copies: list[tuple[int, int]] = []
        self._decode_tokens = 0
        self._prefill_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._decode_tokens + self._prefill_tokens

    @property
    def prefill_tokens(self) -> int:
        return self._prefill_tokens

    def output(self) -> SchedulerOutput:
        return SchedulerOutput(
            self._sequences, self._samples, self._copies, self._prefill_tokens, self._decode_tokens
        )

    def add_decode(self, request: Request, choice: Choice) -> None:
        """The choice's last token, and a draw of its next."""
        tables = choice.tables
        assert tables is not None
        position = len(request.prompt_token_ids) + len(choice.output_token_ids) - 1
        if tables.shares_last_block:
            self._copies += tables.unshare_last_block()
        elif position % self._block_size == 0:
            tables.grow(position + 1)
        self._draw(request, choice)
        self._sequences.append(
            ScheduledSequence(choice.sequence_id, choice.output_token_ids[-1:], position, tables.tables)
        )
        self._decode_tokens += 1

    def add_chunk(self, request: Request, budget: int, headroom: int) -> int:
        """The next tokens of its prompt or, when that is computed, of the first choice that is behind.
        Returns how many."""
        before = self._prefill_tokens
        if not request.is_prefilled:
            self._add_prompt_chunk(request, budget, headroom)
            return self._prefill_tokens - before
        choice = request.behind()
        assert choice is not None, f"{request.request_id} has nothing left to compute"
        self._add_catching_up(request, choice, budget, headroom)
        return self._prefill_tokens - before

    def _add_prompt_chunk(self, request: Request, budget: int, headroom: int) -> None:
        prompt, start = request.prompt_token_ids, request.num_computed_tokens
        tokens = self._chunk_tokens(
            request, request.tables, start, min(budget, len(prompt) - start), headroom
        )
        end = start + tokens
        request.tables.grow(end)
        again = request.has_output
        if end == len(prompt) and not again:
            for choice in request.live():
                self._draw(request, choice)
        prompt_logprobs = None if again else request.params.prompt_logprobs
        wants_next = prompt_logprobs is not None and end < len(prompt)
        self._sequences.append(
            ScheduledSequence(
                sequence_id=request.sequence_id,
                token_ids=prompt[start:end],
                start=start,
                block_tables=request.tables.tables,
                prompt_logprobs=prompt_logprobs,
                next_prompt_token_id=prompt[end] if wants_next else None,
            )
        )
        self._prefill_tokens += tokens

    def _add_catching_up(self, request: Request, choice: Choice, budget: int, headroom: int) -> None:
        tables, first = choice.tables, choice.num_computed_outputs
        assert tables is not None
        if tables.shares_last_block:
            self._copies += tables.unshare_last_block()
        start = len(request.prompt_token_ids) + first
        left = len(choice.output_token_ids) - first
        tokens = self._chunk_tokens(request, tables, start, min(budget, left), headroom)
        tables.grow(start + tokens)
        if tokens == left:
            self._draw(request, choice)
        token_ids = choice.output_token_ids[first : first + tokens]
        self._sequences.append(ScheduledSequence(choice.sequence_id, token_ids, start, tables.tables))
        self._prefill_tokens += tokens

    def _chunk_tokens(
        self, request: Request, tables: BlockTables, start: int, budget: int, headroom: int
    ) -> int:
        """The length of the next chunk, at least 1; the request's lease borrows what the chunk needs.

        All groups grow by the same blocks. One token always fits what is reserved: that is what it was priced
        for.
        """
        lease, have = request.lease, tables.num_blocks
        affordable = (lease.reserved + headroom - lease.held) // self._groups
        room = (have + affordable) * self._block_size - start
        tokens = min(budget, room)
        assert tokens > 0, f"{request.request_id} can't prefill within its reservation"
        blocks = -(-(start + tokens) // self._block_size) - have
        lease.borrowed = max(0, lease.held + blocks * self._groups - lease.reserved)
        return tokens

    def _draw(self, request: Request, choice: Choice) -> None:
        """From the sequence that is added next."""
        generated = len(choice.output_token_ids)
        self._samples.append(
            SampleRow(
                row=len(self._sequences),
                sequence_id=choice.sequence_id,
                choice=choice.index,
                position=generated,
                params=request.params,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=choice.output_token_ids,
                banned_token_ids=request.banned_token_ids if generated < request.params.min_tokens else (),
            )
        )
