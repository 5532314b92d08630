"""What a model's weights take as they lie in memory: on a CPU, more than each counted once.

An output layer that is tied to the embedding is read in the layout of the products, while the embedding is
looked up in its own: packing it is a second copy. On CPUs with AMX tiles a small model's layers are all kept
in two layouts (worker.linear).
"""

from __future__ import annotations

import torch
from torch import nn

from model_runner.worker import machine
from model_runner.worker.fused import NativeRMSNorm
from model_runner.worker.linear import NativeLinear, OneDNNLinear, has_onednn

MOST_HELD_TWICE = 512 << 20  # bytes of weights that may be kept in two layouts


def planned_bytes(skeleton: nn.Module, dtype: torch.dtype, device: torch.device, mode: str) -> int:
    """Bytes, before anything is loaded, of the model on torch's meta device. `mode` is accelerate's.

    What worker.accelerate will make of it, but for some kilobytes of norms; on a CPU with AMX and without a
    compiler it is more than that.
    """
    once = sum(parameter.nbytes for parameter in skeleton.parameters())
    if device.type != "cpu" or dtype != torch.bfloat16 or not has_onednn():
        return once
    linears = [module for module in skeleton.modules() if type(module) is nn.Linear]
    tables = {id(module.weight) for module in skeleton.modules() if isinstance(module, nn.Embedding)}
    copies = sum(linear.weight.nbytes for linear in linears if id(linear.weight) in tables)
    twice = sum(linear.weight.nbytes for linear in linears)
    if machine.has_amx() and mode != "off" and twice <= MOST_HELD_TWICE:
        copies += twice
    return once + copies


def held_bytes(model: nn.Module) -> int:
    """Bytes, of a model that is loaded, and accelerated or not."""
    held = sum(parameter.nbytes for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, NativeLinear | OneDNNLinear):
            held += module.held_bytes
        elif isinstance(module, NativeRMSNorm):
            held += module.weight.nbytes
    return held
