"""A runner without a model, whose KV cache is nevertheless real: it writes every token into the blocks it was
told to, reads the window of every position back through the block tables, and refuses to go on when what it
reads is not the sequence's history.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import Any

from model_runner.core.block_layout import BlockGroup, BlockLayout
from model_runner.core.block_pool import BlockPool
from model_runner.core.output import RunnerOutput, SampleRow, ScheduledSequence, SchedulerOutput
from model_runner.engine import EngineCore
from model_runner.messages import Submit
from model_runner.types import ChoiceOutput, SamplingParams, TokenLogprobs

VOCABULARY = 50


def next_token(history: Sequence[int], choice: int, banned: Sequence[int] = ()) -> int:
    """What the fake model says after `history`: the same alone and in any batch."""
    token_id = zlib.crc32(repr((list(history[-9:]), len(history), choice)).encode()) % VOCABULARY
    while token_id in banned:
        token_id = (token_id + 1) % VOCABULARY
    return token_id


class FakeRunner:
    def __init__(self, layout: BlockLayout, num_blocks: int) -> None:
        self.layout = layout
        self.blocks: list[list[int | None]] = [[None] * layout.block_size for _ in range(num_blocks)]
        self.batches: list[SchedulerOutput] = []
        self.pool: BlockPool | None = None
        self.used_blocks: list[int] = []  # of the pool, while each batch ran
        self.histories: dict[int, list[int]] = {}  # by sequence id: every token that ran, in order

    def execute(self, scheduled: SchedulerOutput) -> RunnerOutput:
        self.batches.append(scheduled)
        if self.pool is not None:
            self.used_blocks.append(self.pool.used)
        self._check_shape(scheduled)
        for source, destination in scheduled.block_copies:
            self.blocks[destination] = self.blocks[source].copy()
        for sequence in scheduled.sequences:
            self._write(sequence)
        self._check_ownership(scheduled)
        for sample in scheduled.samples:  # a choice goes on from its prompt
            self.histories.setdefault(sample.sequence_id, list(sample.prompt_token_ids))
        for sequence in scheduled.sequences:
            self._check_history(sequence)
        return RunnerOutput(
            token_ids=[self._draw(sample) for sample in scheduled.samples],
            logprobs=[self._logprobs(sample) for sample in scheduled.samples],
            prompt_logprobs={
                sequence.sequence_id: self._prompt_logprobs(sequence)
                for sequence in scheduled.sequences
                if sequence.prompt_logprobs is not None
            },
        )

    def _check_shape(self, scheduled: SchedulerOutput) -> None:
        lengths = [len(sequence.token_ids) for sequence in scheduled.sequences]
        assert sum(lengths) == scheduled.num_tokens > 0
        assert lengths[: scheduled.decode_tokens] == [1] * scheduled.decode_tokens
        destinations = [destination for _, destination in scheduled.block_copies]
        assert len(set(destinations)) == len(destinations)
        assert not set(destinations) & {source for source, _ in scheduled.block_copies}

    def _write(self, sequence: ScheduledSequence) -> None:
        for position, token_id in enumerate(sequence.token_ids, sequence.start):
            for table in sequence.block_tables:
                block = table[position // self.layout.block_size]
                self.blocks[block][position % self.layout.block_size] = token_id

    def _check_ownership(self, scheduled: SchedulerOutput) -> None:
        """No block is written twice in a step, or written by one sequence and read by another."""
        written = set()
        readers: dict[int, set[int]] = {}
        for sequence in scheduled.sequences:
            first, last = sequence.start, sequence.start + len(sequence.token_ids) - 1
            for table in sequence.block_tables:
                held = {block for block in table if block >= 0}
                for block in held:
                    readers.setdefault(block, set()).add(sequence.sequence_id)
                touched = table[first // self.layout.block_size : last // self.layout.block_size + 1]
                for block in touched:
                    assert block >= 0
                    assert block not in written
                    written.add(block)
        assert all(len(readers[block]) == 1 for block in written)

    def _check_history(self, sequence: ScheduledSequence) -> None:
        """Every key that the tokens of this step attend to is what was run at that position."""
        history = self.histories.setdefault(sequence.sequence_id, [])
        del history[sequence.start :]
        assert len(history) == sequence.start
        history += sequence.token_ids
        for group, table in zip(self.layout.groups, sequence.block_tables, strict=True):
            first = 0 if group.window is None else max(0, sequence.start - group.window + 1)
            for position in range(first, len(history)):
                block = table[position // self.layout.block_size]
                assert block >= 0, f"position {position} has been freed, window {group.window}"
                assert self.blocks[block][position % self.layout.block_size] == history[position]

    def _draw(self, sample: SampleRow) -> int:
        history = [*sample.prompt_token_ids, *sample.output_token_ids]
        assert sample.position == len(sample.output_token_ids)
        return next_token(history, sample.choice, sample.banned_token_ids)

    def _logprobs(self, sample: SampleRow) -> TokenLogprobs | None:
        if sample.params.logprobs is None:
            return None
        return TokenLogprobs(self._draw(sample), -1.0, [], [])

    def _prompt_logprobs(self, sequence: ScheduledSequence) -> list[TokenLogprobs]:
        targets = [*sequence.token_ids[1:]]
        if sequence.next_prompt_token_id is not None:
            targets.append(sequence.next_prompt_token_id)
        return [TokenLogprobs(token_id, -float(token_id), [], []) for token_id in targets]


class Engine(EngineCore):
    """An EngineCore on a FakeRunner, with the door's part played by `ask`."""

    fake: FakeRunner

    def __init__(
        self,
        windows: Sequence[int | None] = (None,),
        *,
        block_size: int = 4,
        num_blocks: int = 1000,
        headroom_blocks: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        eos_token_ids: Sequence[int] = (),
        max_model_len: int = 1000,
        grows: bool = False,
    ) -> None:
        layout = layout_with(windows, block_size)
        if headroom_blocks is None:
            headroom_blocks = layout.headroom_blocks(max_num_batched_tokens)
        self.layout = layout
        self.num_blocks = num_blocks
        self.fake = FakeRunner(layout, num_blocks + headroom_blocks)
        super().__init__(
            layout,
            self.fake,
            num_blocks=num_blocks,
            headroom_blocks=headroom_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            eos_token_ids=eos_token_ids,
            max_model_len=max_model_len,
            grows=grows,
        )
        self.fake.pool = self.scheduler.pool

    def ask(
        self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, priority: int = 0, **params: Any
    ) -> int:
        """Submit at the exact price, which is returned."""
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        price = self.layout.request_blocks(len(prompt), max_tokens, sampling.n)
        reserved = 0 if self.scheduler.growth.grows else price
        self.submit(Submit(request_id, list(prompt), sampling, reserved, priority))
        return price

    def run(self) -> list[ChoiceOutput]:
        """Step until there is nothing to do. Returns every output, in order."""
        outputs: list[ChoiceOutput] = []
        while (result := self.step()) is not None:
            outputs += result.outputs
        self.check_idle()
        return outputs


def layout_with(windows: Sequence[int | None], block_size: int) -> BlockLayout:
    """One layer a group, so that a block is as small as it gets."""
    groups = tuple(
        BlockGroup("full" if window is None else "sliding", (layer,), 1, 1, window)
        for layer, window in enumerate(windows)
    )
    return BlockLayout(groups, block_size, 2)


def tokens_by_choice(outputs: Sequence[ChoiceOutput]) -> dict[tuple[str, int], list[int]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        tokens.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
    return tokens


def expected_tokens(
    prompt: Sequence[int], max_tokens: int, choice: int = 0, stops: Collection[int] = ()
) -> list[int]:
    """What the fake model says to `prompt`, without any engine."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(next_token([*prompt, *tokens], choice))
        if tokens[-1] in stops:
            break
    return tokens
