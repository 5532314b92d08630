"""Makes a loaded model fast on the machine it is on, by what the machine has."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from model_runner.worker import fused, machine
from model_runner.worker.attention import PagedAttention, torch_paged_attention
from model_runner.worker.fused_layer import fuse_layers
from model_runner.worker.huge_pages import move_together
from model_runner.worker.linear import ModuleKernels, NativeLinear, has_onednn, pack_linears
from model_runner.worker.native import Kernels, load_kernels
from model_runner.worker.torch_kernels import TorchKernels
from model_runner.worker.weights import MOST_HELD_TWICE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Execution:
    """How a model will be run."""

    description: str  # a few words for the log
    attention: PagedAttention  # for the ModelRunner


@torch.inference_mode()
def accelerate(
    model: nn.Module,
    attention_modules: Sequence[nn.Module],
    *,
    cache_dir: str | os.PathLike[str],
    mode: Literal["auto", "off"] | str = "auto",
) -> Execution:
    """Swap parts of `model`, in place, for faster ones that compute the same; its plain weights are let go.

    `attention_modules` are the model's, set to the block-paged implementation; they stay the same
    objects. Call it once, after loading and before the ModelRunner is made. Compiled kernels are kept in
    `cache_dir`. With `mode` "off", or without a C++ compiler, the weights are still packed by oneDNN
    where that helps; on another device than a CPU nothing is done.
    """
    parameter = next(model.parameters())
    if parameter.device.type != "cpu":
        return Execution(f"eager on {parameter.device.type}, torch attention", torch_paged_attention)
    kernels = load_kernels(cache_dir) if mode != "off" else None
    if kernels is None or parameter.dtype not in kernels.dtypes:
        # In float32 there is nothing to be packed, and transformers' own modules stay.
        in_torch = TorchKernels(has_linear=parameter.dtype == torch.bfloat16 and has_onednn())
        fused_modules = _fuse(model, attention_modules, in_torch) if in_torch.has_linear else 0
        packed = pack_linears(model, None)
        description = f"eager, torch attention, {fused_modules} fused modules"
        return Execution(description + _weights(packed, "oneDNN"), torch_paged_attention)
    if machine.has_amx():
        _use_tiles(model, kernels)
    fused_modules = _fuse(model, attention_modules, kernels)
    packed = pack_linears(model, kernels)
    move_together([(module, "panels") for module in model.modules() if isinstance(module, NativeLinear)])
    fused_layers = fuse_layers(model, kernels)
    logger.info("fused %d whole layers", fused_layers)
    description = f"eager, native attention, {fused_modules} fused modules, {fused_layers} fused layers"
    packer = "native" if kernels.has_linear else "oneDNN"
    packer += ", oneDNN for many rows" if kernels.wide else ""
    return Execution(description + _weights(packed, packer), kernels.paged_attention)


def _use_tiles(model: nn.Module, kernels: Kernels) -> None:
    """AMX's tiles are oneDNN's to use: for all products of a large model, for those of many rows of a small
    one."""
    linears = (module for module in model.modules() if type(module) is nn.Linear)
    twice = sum(linear.weight.nbytes for linear in linears)
    if twice <= MOST_HELD_TWICE:
        kernels.wide = kernels.has_linear
    else:
        kernels.has_linear = False


def _fuse(model: nn.Module, attention_modules: Sequence[nn.Module], kernels: ModuleKernels) -> int:
    counts = (
        fused.fuse_attentions(list(attention_modules), kernels),
        fused.fuse_mlps(model, kernels),
        fused.fuse_norms(model, kernels),
    )
    logger.info("fused %d attentions, %d feed-forwards, %d norms", *counts)
    return sum(counts)


def _weights(packed: int, packer: str) -> str:
    return f", {packed} weights packed ({packer})" if packed else ""
