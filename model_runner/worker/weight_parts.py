"""What a model's tensors are for, told by their names: which of them a decode step reads, and when."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

from torch import nn

from model_runner.core.weights import WeightsRead, read_experts
from model_runner.worker.model_config import resolved

T = TypeVar("T")


class Part(StrEnum):
    READ = "read"  # whole, at each step
    EXPERT = "routed experts"  # by the tokens that use them
    EMBEDDING = "input embedding"  # a row for each token
    TOWER = "towers"  # when there are pictures or sound
    MTP = "layers that predict further tokens"  # by who drafts with them


UNREAD = (Part.EMBEDDING, Part.TOWER, Part.MTP)

# A parameter that belongs to one of a layer's routed experts, or holds all of them stacked.
_EXPERT = re.compile(r"(^|\.)(experts|switch_mlp)\.|_exps\.")
# Tied to the output, an input embedding is read whole.
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|embeddings?|token_embd)\.weight$")
_OUTPUT = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")
# Tables of which each token reads one row, whatever the output is: of positions, and Gemma 3n's of layers.
_LOOKED_UP = re.compile(
    r"(^|\.)(embed_tokens_per_layer|per_layer_token_embd|wpe|embed_positions|position_embd)\.weight$"
)
_TOWER = re.compile(
    r"(^|\.)\w*(vision|visual|audio|image|speech|multi_?modal|mm_projector|resampler|aligner|talker|code2wav)\w*\."
)
_MTP = re.compile(r"(^|\.)\w*(mtp|nextn)\w*\.")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d+)\.")


def parts(names: Iterable[str], layers: int | None) -> dict[str, Part]:
    """What each tensor of a decoder of so many layers is. Layers past the last are no part of a step:
    checkpoints keep there what predicts further tokens (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""
    listed = list(names)
    untied = any(_OUTPUT.search(name) for name in listed)
    return {name: _part(name, layers, untied=untied) for name in listed}


def without_tied_output(names: Mapping[str, T]) -> dict[str, T]:
    """Without the output of a model whose output is its input embedding: some files hold that a second time,
    and it is loaded once."""
    if not any(_EMBEDDING.search(name) and not is_of_tower(name) for name in names):
        return dict(names)
    return {name: it for name, it in names.items() if is_of_tower(name) or not _OUTPUT.search(name)}


def is_of_tower(name: str) -> bool:
    """Whether a tensor belongs to what reads pictures or sound."""
    return _TOWER.search(name) is not None


def _part(name: str, layers: int | None, *, untied: bool) -> Part:
    if is_of_tower(name):
        return Part.TOWER
    layer = _LAYER.search(name)
    if _MTP.search(name) or (layer is not None and layers is not None and int(layer[1]) >= layers):
        return Part.MTP
    if _LOOKED_UP.search(name) or (untied and _EMBEDDING.search(name)):
        return Part.EMBEDDING
    return Part.EXPERT if _EXPERT.search(name) else Part.READ


def total(sizes: Mapping[str, int], of: Mapping[str, Part], *which: Part) -> int:
    return sum(size for name, size in sizes.items() if of[name] in which)


def weights_read(model: nn.Module) -> WeightsRead:
    """Of a transformers model, in the type that its parameters have; tied ones count once."""
    config = resolved(model.config)  # type: ignore[arg-type]
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    of = parts(sizes, config.get("num_hidden_layers"))
    experts, used = read_experts(config)
    return WeightsRead(
        total_bytes=sum(sizes.values()),
        expert_bytes=total(sizes, of, Part.EXPERT),
        experts=experts,
        experts_per_token=used,
        unread_bytes=total(sizes, of, *UNREAD),
    )
