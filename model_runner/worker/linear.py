"""Linear layers whose weights are laid out once, at load, in the order in which the products read them.

Two kinds: Plimsoll's own kernel for bfloat16 where it was compiled for the CPU, and oneDNN's packed form,
which needs no compiler. Each layer's plain weights are let go as soon as it is packed.

On CPUs with AMX tiles, which oneDNN uses and Plimsoll's kernel does not, a layer may hold both: its own for
few rows, which memory bounds, and oneDNN's for many, which the multipliers bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

from model_runner.worker.native import PANEL_OUTPUTS, Kernels, LinearArguments, pack_panels
from model_runner.worker.torch_kernels import TorchKernels

ModuleKernels: TypeAlias = Kernels | TorchKernels

# oneDNN lays the weights out for a number of rows; this one is good from one row to hundreds.
_ONEDNN_ROWS = 32
# From so many rows on, tiles of sixteen rows are full.
WIDE_ROWS = 16


class NativeLinear(nn.Module):
    """x · Wᵀ + b in bfloat16; `gated`: silu(x · Gᵀ) · (x · Uᵀ), W being `interleave_gated`(G, U)."""

    panels: Tensor
    bias: Tensor | None

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> None:
        """weight [N, K] bfloat16, bias [N]."""
        super().__init__()
        self._kernels = kernels
        self._outputs = weight.shape[0]
        self._gated = gated
        self._wide = _pack_onednn(weight) if kernels.wide else None
        self.register_buffer("panels", pack_panels(weight))
        padding = (0, -self._outputs % PANEL_OUTPUTS)
        self.register_buffer("bias", None if bias is None else nn.functional.pad(bias.float(), padding))

    def forward(self, x: Tensor) -> Tensor:
        if self._wide is not None and x.numel() >= WIDE_ROWS * x.shape[-1]:
            return self._wide_forward(x)
        return self._kernels.linear(x, self.panels, self.bias, self._outputs, gated=self._gated)

    def _wide_forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[: self._outputs].to(x.dtype)
        product = _onednn_product(x, self._wide, bias)
        if not self._gated:
            return product
        # In interleave_gated's order.
        gate, up = product.view(*product.shape[:-1], -1, 2, PANEL_OUTPUTS // 2).unbind(-2)
        opened: Tensor = (nn.functional.silu(gate) * up).flatten(-2)
        return opened

    @property
    def held_bytes(self) -> int:
        """Of its weights, in all the layouts that it keeps."""
        layouts = [tensor for tensor in (self.panels, self._wide, self.bias) if tensor is not None]
        return sum(_bytes(tensor) for tensor in layouts)

    def arguments(self) -> LinearArguments:
        """What kernels need to apply it. Holds pointers: the layer must outlive it, and stay where it is."""
        arguments = LinearArguments(gated=self._gated, inputs=2 * self.panels.shape[1], outputs=self._outputs)
        arguments.panels = self.panels.data_ptr()
        arguments.bias = None if self.bias is None else self.bias.data_ptr()
        return arguments

    @staticmethod
    def fits(kernels: Kernels, linear: object) -> bool:
        return (
            kernels.has_linear
            and type(linear) is nn.Linear
            and linear.weight.dtype == torch.bfloat16
            and linear.in_features % 2 == 0
        )


class OneDNNLinear(nn.Module):
    """x · Wᵀ + b with the weights in oneDNN's own layout; `gated`: silu(x · Gᵀ) · (x · Uᵀ), W being G over
    U."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> None:
        """weight [N, K] bfloat16, bias [N]."""
        super().__init__()
        self._weight = _pack_onednn(weight)
        self._gated = gated
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        product = _onednn_product(x, self._weight, self.bias)
        if not self._gated:
            return product
        gate, up = product.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up

    @property
    def held_bytes(self) -> int:
        """Of its weights."""
        return _bytes(self._weight) + (0 if self.bias is None else _bytes(self.bias))

    @staticmethod
    def fits(linear: object) -> bool:
        return type(linear) is nn.Linear and linear.weight.dtype == torch.bfloat16 and has_onednn()


def has_onednn() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU."""
    return bool(torch._C._has_mkldnn) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def fits(kernels: ModuleKernels, linear: object) -> bool:
    """Whether `packed` and `packed_gated` take this layer."""
    if isinstance(kernels, Kernels):
        return NativeLinear.fits(kernels, linear)
    return kernels.has_linear and OneDNNLinear.fits(linear)


def packed(kernels: ModuleKernels, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """weight [N, K], bias [N]: in the layout that these kernels read."""
    if isinstance(kernels, Kernels):
        return NativeLinear(kernels, weight, bias)
    return OneDNNLinear(weight, bias)


def packed_gated(kernels: ModuleKernels, gate: nn.Linear, up: nn.Linear) -> nn.Module:
    """silu(gate(x)) · up(x) as one product."""
    weights = gate.weight.detach(), up.weight.detach()
    biases = None if gate.bias is None else (gate.bias.detach(), up.bias.detach())
    if isinstance(kernels, Kernels):
        bias = None if biases is None else interleave_gated(*biases)
        return NativeLinear(kernels, interleave_gated(*weights), bias, gated=True)
    return OneDNNLinear(torch.cat(weights), None if biases is None else torch.cat(biases), gated=True)


def _pack_onednn(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_ROWS)
    return packed


def _bytes(tensor: Tensor) -> int:
    """Of oneDNN's opaque tensors too, which have no storage to ask."""
    return tensor.numel() * tensor.element_size()


def _onednn_product(x: Tensor, packed: Tensor | None, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def interleave_gated(gate: Tensor, up: Tensor) -> Tensor:
    """[N, ...] and [N, ...] -> [2 N, ...]: sixteen of the one, sixteen of the other, and so on.

    N is a multiple of 16. It puts a gate and what it opens into one panel.
    """
    half = PANEL_OUTPUTS // 2
    pairs = [part.view(-1, half, *part.shape[1:]) for part in (gate, up)]
    return torch.stack(pairs, dim=1).flatten(0, 2)


def pack_linears(model: nn.Module, kernels: Kernels | None) -> int:
    """Swap every nn.Linear that can be packed, in place. Returns how many were."""
    packed = 0
    for parent, name, child in walk(model):
        if not isinstance(child, nn.Linear):
            continue
        if kernels is not None and NativeLinear.fits(kernels, child):
            setattr(parent, name, NativeLinear(kernels, child.weight.detach(), child.bias))
        elif OneDNNLinear.fits(child):
            bias = None if child.bias is None else child.bias.detach()
            setattr(parent, name, OneDNNLinear(child.weight.detach(), bias))
        else:
            continue
        packed += 1
    return packed


def walk(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, child) of everything below `module`. A child may be swapped as it comes.

    Holds on to no child that was swapped: a list of all modules would keep every plain weight to the end, and
    loading would take twice the memory.
    """
    for name in list(module._modules):
        child = module._modules[name]
        if child is None:
            continue
        yield module, name, child
        if module._modules[name] is child:
            yield from walk(child)
