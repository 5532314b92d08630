"""The torch attention against a loop that is too simple to be wrong; packing against the plain data."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from model_runner.core.output import ScheduledSequence
from model_runner.worker import attention
from model_runner.worker.attention import torch_paged_attention
from model_runner.worker.batch import pack
from model_runner.worker.kv_cache import copy_blocks

BLOCK_SIZE, KV_HEADS, HEADS, HEAD_DIM = 4, 2, 6, 8
# (tokens already in the cache, new tokens): decodes and prefills, in no order.
BATCH = [(0, 5), (11, 1), (3, 9), (0, 1), (23, 1), (16, 2)]


def tables_for(lengths: list[int], groups: int = 2) -> list[list[list[int]]]:
    """By sequence, by group: blocks in a scattered order, none used twice."""
    order = iter(torch.randperm(200, generator=torch.Generator().manual_seed(1)).tolist())
    return [
        [list(itertools.islice(order, -(-length // BLOCK_SIZE))) for _ in range(groups)] for length in lengths
    ]


def naive(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [R, Hq, D] at positions start …, keys and values [L, Hkv, D] from position 0."""
    output = torch.empty_like(query)
    for row, head in itertools.product(range(query.shape[0]), range(HEADS)):
        position = start + row
        first = 0 if window is None else max(0, position - window + 1)
        kv_head = head // (HEADS // KV_HEADS)
        scores = keys[first : position + 1, kv_head] @ query[row, head] * 0.3
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head : head + 1]])
        weights = scores.softmax(0)[: position + 1 - first]
        output[row, head] = weights @ values[first : position + 1, kv_head]
    return output


@pytest.mark.parametrize("gathered", [1, 1 << 24])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 9, 100])
def test_against_a_loop(
    window: int | None, softcap: float | None, sunk: bool, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_MAX_GATHERED", gathered)
    generator = torch.Generator().manual_seed(2)
    lengths = [start + new for start, new in BATCH]
    tables = tables_for(lengths)
    sinks = torch.randn(HEADS, generator=generator) if sunk else None
    history = [torch.randn(2, length, KV_HEADS, HEAD_DIM, generator=generator) for length in lengths]
    queries = [torch.randn(new, HEADS, HEAD_DIM, generator=generator) for _, new in BATCH]
    cache = torch.full((200, 3, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM), 1e4)
    group, layer = 1, 2
    sequences = []
    for (start, new), table, kv in zip(BATCH, tables, history, strict=True):
        oldest = 0 if window is None else max(0, start - window + 1) // BLOCK_SIZE
        for position in range(oldest * BLOCK_SIZE, start):
            block = table[group][position // BLOCK_SIZE]
            cache[block, layer, :, :, position % BLOCK_SIZE] = kv[:, position]
        freed = [[-1] * oldest + blocks[oldest:] for blocks in table]
        sequences.append(ScheduledSequence(0, [7] * new, start, freed))
    batch = pack(sequences, BLOCK_SIZE, torch.device("cpu"))
    new_kv = [kv[:, start:] for (start, _), kv in zip(BATCH, history, strict=True)]

    output = torch_paged_attention(
        torch.cat(queries),
        torch.cat([kv[0] for kv in new_kv]),
        torch.cat([kv[1] for kv in new_kv]),
        cache[:, layer, 0],
        cache[:, layer, 1],
        batch.metadata,
        group,
        scale=0.3,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    expected = [
        naive(query, kv[0], kv[1], start, window, softcap, sinks)
        for query, kv, (start, _) in zip(queries, history, BATCH, strict=True)
    ]
    torch.testing.assert_close(output, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_one_long_decode_does_not_make_all_the_others_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [101, *[2] * 50]
    sequences = [
        ScheduledSequence(i, [7], length - 1, table)
        for i, (length, table) in enumerate(zip(lengths, tables_for(lengths, groups=1), strict=True))
    ]
    metadata = pack(sequences, BLOCK_SIZE, torch.device("cpu")).metadata
    cache = torch.zeros(200, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    sizes: list[int] = []
    gather = attention._gather

    def recorded(cache: Tensor, blocks: Tensor) -> Tensor:
        copied = gather(cache, blocks)
        sizes.append(copied.numel())
        return copied

    monkeypatch.setattr(attention, "_MAX_GATHERED", limit := 104 * KV_HEADS * HEAD_DIM * 10)
    monkeypatch.setattr(attention, "_gather", recorded)
    query, key = torch.randn(51, HEADS, HEAD_DIM), torch.randn(51, KV_HEADS, HEAD_DIM)
    options = {"scale": 1.0, "window": None, "softcap": None, "sinks": None}
    torch_paged_attention(query, key, key, cache, cache.clone(), metadata, 0, **options)  # type: ignore[arg-type]
    assert max(sizes) <= limit
    assert len(sizes) == 2 * 6


def test_pack() -> None:
    sequences = [
        ScheduledSequence(1, [10, 11, 12], 3, [[5, 6], [8, 9]]),
        ScheduledSequence(2, [20], 8, [[-1, 1, 2], [3, 4, 7]]),
    ]
    batch = pack(sequences, BLOCK_SIZE, torch.device("cpu"))
    assert batch.input_ids.tolist() == [[10, 11, 12, 20]]
    assert batch.position_ids.tolist() == [[3, 4, 5, 8]]
    assert batch.last_rows.tolist() == [2, 3]
    metadata = batch.metadata
    assert metadata.query_start_loc.tolist() == [0, 3, 4]
    assert metadata.seq_lens.tolist() == [6, 9]
    assert metadata.block_tables.tolist() == [[[5, 6, 0], [0, 1, 2]], [[8, 9, 0], [3, 4, 7]]]
    assert metadata.slot_mapping.tolist() == [[23, 24, 25, 8], [35, 36, 37, 28]]
    assert metadata.prefills == [(0, 0, 3, 6)]
    assert (metadata.decode_sequences.tolist(), metadata.decode_rows.tolist()) == ([1], [3])
    assert metadata.max_decode_len == 9


def test_block_copies_read_before_they_write() -> None:
    cache = torch.arange(4.0).reshape(4, 1, 1, 1, 1, 1).clone()
    copy_blocks(cache, [(0, 1), (1, 2), (0, 3)])
    assert cache.flatten().tolist() == [0.0, 0.0, 1.0, 0.0]
