"""Runs the model before it serves: to touch everything once, to time it, and to see what memory it needs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from model_runner.core.block_layout import BlockLayout
from model_runner.core.output import Runner, SampleRow, ScheduledSequence, SchedulerOutput
from model_runner.types import SamplingParams

_DECODE_STEPS = 5
_SAMPLED = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=50, seed=1)
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def measure_decode_seconds(runner: Runner, layout: BlockLayout, blocks_total: int) -> float:
    """The median time of a step with one sequence. The cache's contents are overwritten."""
    tables = _tables(layout, 1, blocks_total)
    start = min(layout.block_size, blocks_total * layout.block_size) - 1

    def step() -> float:
        return _timed(runner, [ScheduledSequence(0, [1], start, tables)], _GREEDY)

    step()
    return median(step() for _ in range(_DECODE_STEPS))


def measure_prefill_rate(runner: Runner, layout: BlockLayout, blocks_total: int, max_tokens: int) -> float:
    """Prompt tokens per second, in one chunk of `max_tokens` (or what the cache holds)."""
    tokens = min(max_tokens, blocks_total * layout.block_size)
    tables = _tables(layout, -(-tokens // layout.block_size), blocks_total)
    return tokens / _timed(runner, [ScheduledSequence(0, [1] * tokens, 0, tables)], _GREEDY)


def run_worst_case(
    runner: Runner, layout: BlockLayout, blocks_total: int, max_tokens: int, max_seqs: int
) -> None:
    """The step that needs most memory: as many tokens as a step may have, over as many sampled sequences."""
    sequences = min(max_seqs, max_tokens)
    share, extra = divmod(max_tokens, sequences)
    lengths = [share + (i < extra) for i in range(sequences)]
    longest = min(max(lengths), blocks_total * layout.block_size)
    tables = _tables(layout, -(-longest // layout.block_size), blocks_total)
    scheduled = [
        ScheduledSequence(i, [1] * min(length, longest), 0, tables) for i, length in enumerate(lengths)
    ]
    _timed(runner, scheduled, _SAMPLED)


def _tables(layout: BlockLayout, blocks: int, blocks_total: int) -> list[list[int]]:
    return [list(range(min(blocks, blocks_total))) for _ in layout.groups]


def _timed(runner: Runner, sequences: Sequence[ScheduledSequence], params: SamplingParams) -> float:
    samples = [
        SampleRow(row, sequence.sequence_id, 0, 0, params, sequence.token_ids, [])
        for row, sequence in enumerate(sequences)
    ]
    started = time.perf_counter()
    runner.execute(SchedulerOutput(list(sequences), samples))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
