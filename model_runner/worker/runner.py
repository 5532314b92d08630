"""ModelRunner: one forward pass over the packed tokens of all scheduled sequences."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from model_runner.core.block_layout import BlockLayout
from model_runner.core.output import RunnerOutput, SampleRow, ScheduledSequence, SchedulerOutput
from model_runner.types import TokenLogprobs
from model_runner.worker.attention import PagedAttention, StepContext, bind_layers, torch_paged_attention
from model_runner.worker.batch import PackedBatch, pack
from model_runner.worker.kv_cache import copy_blocks

# Rows of logits held at once for prompt log-probabilities: a long prompt's, all at once, would be gigabytes.
PROMPT_LOGPROB_ROWS = 64


class Sample(Protocol):
    def __call__(
        self, logits: Tensor, samples: Sequence[SampleRow]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Draw one token from each row of logits [R, V] float32; samples are parallel to the rows."""


class _HiddenStates(nn.Module):
    """Stands in for the decoder: what it is given as embeddings is what came out of the last layer.

    Its output has all the fields that the heads of dense and of mixture-of-experts models look at.
    """

    def forward(self, inputs_embeds: Tensor, **kwargs: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def split_model(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A transformers causal language model as its decoder and its head.

    The head is the model itself with its decoder taken out, so that whatever the model does to its logits
    (scaling, soft capping) is done by its own code. It shares the weights.
    """
    prefix: str = model.base_model_prefix  # type: ignore[assignment]
    decoder = model.get_submodule(prefix)
    head = copy.copy(model)
    head._modules = {**model._modules, prefix: _HiddenStates()}
    return decoder, head


class ModelRunner:
    """Implements core.output.Runner on a transformers model and one KV tensor."""

    def __init__(
        self,
        model: nn.Module,
        attention_modules: Sequence[nn.Module],
        layout: BlockLayout,
        kv_cache: Tensor,
        sampler: Sample,
        attention: PagedAttention = torch_paged_attention,
    ) -> None:
        """`attention_modules` are the model's, in layer order; `kv_cache` is allocate_kv_cache's."""
        self._decoder, self._head = split_model(model)
        self._block_size = layout.block_size
        self._kv_cache = kv_cache
        self._sampler = sampler
        self._context = StepContext()
        bind_layers(attention_modules, layout, kv_cache, self._context, attention)

    @torch.inference_mode()
    def execute(self, scheduled: SchedulerOutput) -> RunnerOutput:
        if scheduled.block_copies:
            copy_blocks(self._kv_cache, scheduled.block_copies)
        batch = pack(scheduled.sequences, self._block_size, self._kv_cache.device)
        hidden = self._forward(batch)
        prompt_logprobs = {
            sequence.sequence_id: self._prompt_logprobs(sequence, hidden, int(last_row))
            for sequence, last_row in zip(scheduled.sequences, batch.last_rows, strict=True)
            if sequence.prompt_logprobs is not None
        }
        if not scheduled.samples:
            return RunnerOutput([], [], prompt_logprobs)
        logits = self._sample_logits(hidden, batch, scheduled.samples)
        token_ids, logprobs = self._sampler(logits, scheduled.samples)
        return RunnerOutput(token_ids, logprobs, prompt_logprobs)

    def _forward(self, batch: PackedBatch) -> Tensor:
        """The last layer's hidden states [T, hidden]."""
        self._context.metadata = batch.metadata
        try:
            output = self._decoder(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
            )
        finally:
            self._context.metadata = None
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> [R, V] float32."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()

    def _sample_logits(self, hidden: Tensor, batch: PackedBatch, samples: Sequence[SampleRow]) -> Tensor:
        """One row for each sample. Choices that draw from one prompt's row share the head's work."""
        sequences = np.fromiter((sample.row for sample in samples), np.int64, len(samples))
        distinct, inverse = np.unique(sequences, return_inverse=True)
        rows = torch.from_numpy(batch.last_rows[distinct]).to(hidden.device)
        logits = self._logits(hidden[rows])
        if len(distinct) == len(samples) and np.array_equal(inverse, np.arange(len(samples))):
            return logits
        return logits[torch.from_numpy(inverse).to(hidden.device)]

    def _prompt_logprobs(
        self, sequence: ScheduledSequence, hidden: Tensor, last_row: int
    ) -> list[TokenLogprobs]:
        """Of each prompt token that follows a row of this chunk, a bounded number of rows at a time."""
        targets = list(sequence.token_ids[1:])
        if sequence.next_prompt_token_id is not None:
            targets.append(sequence.next_prompt_token_id)
        first_row = last_row + 1 - len(sequence.token_ids)
        entries: list[TokenLogprobs] = []
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = targets[start : start + PROMPT_LOGPROB_ROWS]
            rows = hidden[first_row + start : first_row + start + len(part)]
            entries += _token_logprobs(self._logits(rows), part, sequence.prompt_logprobs or 0)
        return entries


def _token_logprobs(logits: Tensor, targets: list[int], top: int) -> list[TokenLogprobs]:
    """Of one target per row of logits [R, V], with the `top` likeliest tokens beside it."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(targets, device=logits.device)[:, None])[:, 0].tolist()
    values, indices = logprobs.topk(top, dim=-1)
    return [
        TokenLogprobs(*entry)
        for entry in zip(targets, chosen, indices.tolist(), values.tolist(), strict=True)
    ]
