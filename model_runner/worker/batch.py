"""From a SchedulerOutput's plain data to the packed tensors of one forward. No loop over tokens or blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.core.output import ScheduledSequence
from model_runner.worker.attention import AttentionMetadata


@dataclass(slots=True)
class PackedBatch:
    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64
    last_rows: NDArray[np.int64]  # [S] the packed row of each sequence's last token
    metadata: AttentionMetadata


def pack(sequences: Sequence[ScheduledSequence], block_size: int, device: torch.device) -> PackedBatch:
    """Lay the scheduled tokens of all sequences one after the other, in their order."""
    count = len(sequences)
    lengths = np.fromiter((len(s.token_ids) for s in sequences), np.int64, count)
    starts = np.fromiter((s.start for s in sequences), np.int64, count)
    ends = np.cumsum(lengths)
    firsts = ends - lengths
    total = int(ends[-1])
    token_ids = np.fromiter(chain.from_iterable(s.token_ids for s in sequences), np.int64, total)
    owners = np.repeat(np.arange(count), lengths)
    positions = np.arange(total) + (starts - firsts)[owners]
    seq_lens = starts + lengths

    tables = _block_tables(sequences, -(-int(seq_lens.max()) // block_size))
    # Indexing leaves a group's slots strided in memory; kernels want them side by side.
    blocks = np.ascontiguousarray(tables[:, owners, positions // block_size], dtype=np.int64)
    slots = blocks * block_size + positions % block_size
    decodes = np.flatnonzero(lengths == 1)
    prefills = np.flatnonzero(lengths > 1)

    def on_device(array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    metadata = AttentionMetadata(
        query_start_loc=on_device(np.concatenate(([0], ends)).astype(np.int32)),
        seq_lens=on_device(seq_lens.astype(np.int32)),
        block_tables=on_device(tables),
        slot_mapping=on_device(slots),
        prefills=[(int(s), int(firsts[s]), int(lengths[s]), int(seq_lens[s])) for s in prefills],
        decode_sequences=on_device(decodes),
        decode_rows=on_device(firsts[decodes]),
        max_decode_len=int(seq_lens[decodes].max(initial=0)),
    )
    return PackedBatch(on_device(token_ids)[None], on_device(positions)[None], ends - 1, metadata)


def _block_tables(sequences: Sequence[ScheduledSequence], width: int) -> NDArray[np.int32]:
    """[groups, S, width]: blocks that a window has left behind, and padding, become block 0."""
    groups = len(sequences[0].block_tables)
    tables = np.zeros((groups, len(sequences), width), np.int32)
    for group in range(groups):
        rows = [s.block_tables[group] for s in sequences]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        flat = np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))
        columns = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        owners = np.repeat(np.arange(len(rows)), lengths)
        used = columns < width
        tables[group, owners[used], columns[used]] = flat[used]
    return np.maximum(tables, 0, out=tables)
