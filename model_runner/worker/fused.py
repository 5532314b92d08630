"""Faster counterparts of the modules that decoder layers are made of, for the native kernels or for torch's
own.

A counterpart takes a module's place only after both were run on the same random numbers and agreed. So a
model is recognised by what its modules compute, not by its name, and what is not recognised stays
transformers' own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from model_runner.worker.attention import LAYER_ATTRIBUTE, PagedLayer
from model_runner.worker.linear import ModuleKernels, fits, packed, packed_gated, walk

logger = logging.getLogger(__name__)

_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# One token of each size: small ones show a bias or the shape of an activation, large ones what is clipped.
_CHECK_SCALES = (1 / 8, 1.0, 8.0, 64.0, 512.0)
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of a token's largest value


class NativeRMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension."""

    weight: Tensor

    def __init__(self, kernels: ModuleKernels, weight: Tensor, eps: float, *, round_first: bool) -> None:
        super().__init__()
        self._kernels = kernels
        self.eps = eps
        self.round_first = round_first
        self.register_buffer("weight", weight.float().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight, self.eps, round_first=self.round_first)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)), gate and up in one product."""

    def __init__(self, kernels: ModuleKernels, mlp: nn.Module) -> None:
        super().__init__()
        gate, up, down = _linears(mlp, *_FEED_FORWARD)
        self.gate_up = packed_gated(kernels, gate, up)
        self.down = packed(kernels, down.weight.detach(), down.bias)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.gate_up(x))
        return down

    @staticmethod
    def fits(kernels: ModuleKernels, mlp: nn.Module) -> bool:
        if not all(fits(kernels, getattr(mlp, name, None)) for name in _FEED_FORWARD):
            return False
        gate, up, _ = _linears(mlp, *_FEED_FORWARD)
        return gate.out_features % 16 == 0 and (gate.bias is None) == (up.bias is None)


class FusedAttention:
    """An attention module's forward: one product for queries, keys and values, which are rotated in place.

    Set as the module's own `forward`, because the module is what its part of the cache is bound to.
    """

    def __init__(self, kernels: ModuleKernels, module: nn.Module, *, rotary: bool) -> None:
        self._kernels = kernels
        self._module = module
        self.head_dim: int = module.head_dim  # type: ignore[assignment]
        self.scale: float = module.scaling  # type: ignore[assignment]
        self.rotary = rotary
        query, key, value, output = _linears(module, *_PROJECTIONS)
        self.query_heads = query.out_features // self.head_dim
        self.kv_heads = key.out_features // self.head_dim
        projections = (query, key, value)
        bias = None if query.bias is None else torch.cat([p.bias.detach() for p in projections])
        self.qkv = packed(kernels, torch.cat([p.weight.detach() for p in projections]), bias)
        self.output = packed(kernels, output.weight.detach(), output.bias)

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        heads = [self.query_heads, self.kv_heads, self.kv_heads]
        mixed: Tensor = self.qkv(hidden_states[0])
        if self.rotary:
            assert position_embeddings is not None
            cosine, sine = (part[0].to(mixed.dtype) for part in position_embeddings)  # OLMo's are float32
            rotated = self.query_heads + self.kv_heads
            self._kernels.rotate(mixed, cosine, sine, rotated, self.head_dim)
        query, key, value = torch.split(mixed.view(len(mixed), -1, self.head_dim), heads, dim=1)
        layer: PagedLayer = getattr(self._module, LAYER_ATTRIBUTE)
        attended = layer(query, key, value, scale=self.scale, softcap=None, sinks=None)
        output: Tensor = self.output(attended.flatten(1))
        return output[None], None

    def install(self) -> None:
        for name in _PROJECTIONS:
            delattr(self._module, name)
        self._module.qkv_proj, self._module.out_proj = self.qkv, self.output
        self._module.forward = self

    @staticmethod
    def fits(kernels: ModuleKernels, module: nn.Module) -> bool:
        if not all(fits(kernels, getattr(module, name, None)) for name in _PROJECTIONS):
            return False
        query, key, value, _ = _linears(module, *_PROJECTIONS)
        biases = {p.bias is None for p in (query, key, value)}
        head_dim = getattr(module, "head_dim", None)
        return (
            isinstance(head_dim, int)
            and isinstance(getattr(module, "scaling", None), float)
            and len(biases) == 1
            and key.out_features == value.out_features
            and query.out_features % head_dim == 0
        )


def fuse_norms(model: nn.Module, kernels: ModuleKernels) -> int:
    """Swap the RMS norms, Llama's kind and Gemma's, in place. Returns how many were."""
    fused = 0
    for parent, name, child in walk(model):
        if type(child).__name__.endswith("RMSNorm") and (native := _native_norm(kernels, child)):
            setattr(parent, name, native)
            fused += 1
    return fused


def _native_norm(kernels: ModuleKernels, norm: nn.Module) -> NativeRMSNorm | None:
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    weight = weight.detach()
    x = check_tokens(weight.shape[0], like=weight)
    expected = norm(x)
    candidates = [
        NativeRMSNorm(kernels, weight, eps, round_first=True),
        NativeRMSNorm(kernels, weight, eps, round_first=False),
        NativeRMSNorm(kernels, 1.0 + weight.float(), eps, round_first=False),
    ]
    best = min(candidates, key=lambda candidate: _error(candidate(x), expected))
    return best if agree(best(x), expected) else None


def fuse_mlps(model: nn.Module, kernels: ModuleKernels) -> int:
    """Swap the silu-gated feed-forward modules, in place. Returns how many were."""
    fused = 0
    for parent, name, child in walk(model):
        if not GatedMLP.fits(kernels, child):
            continue
        native = GatedMLP(kernels, child)
        weight = _linears(child, *_FEED_FORWARD)[0].weight
        x = check_tokens(weight.shape[1], like=weight)
        if agree(native(x), child(x)):
            setattr(parent, name, native)
            fused += 1
    return fused


def fuse_attentions(modules: list[nn.Module], kernels: ModuleKernels) -> int:
    """Give the attention modules of Llama's kind the fused forward. Returns how many were."""
    fused = 0
    for module in modules:
        if not FusedAttention.fits(kernels, module):
            continue
        with _stand_in_layer(module):
            fitting = _fitting_attention(kernels, module)
        if fitting is not None:
            fitting.install()
            fused += 1
    return fused


def _fitting_attention(kernels: ModuleKernels, module: nn.Module) -> FusedAttention | None:
    weight = _linears(module, *_PROJECTIONS)[0].weight
    head_dim: int = module.head_dim  # type: ignore[assignment]
    x = check_tokens(weight.shape[1], like=weight)[None]

    def arguments(rotated: int) -> dict[str, Any]:
        # Unlike any real angle's, so that a rotation of another kind can't agree by accident.
        embeddings = tuple(random_tensor(2, 1, x.shape[1], rotated, like=weight))
        return {"hidden_states": x, "position_embeddings": embeddings, "attention_mask": None}

    whole = _run(module, arguments(head_dim))
    if whole is None:
        return None
    for rotary in (True, False):
        candidate = FusedAttention(kernels, module, rotary=rotary)
        if agree(candidate(**arguments(head_dim))[0], whole):
            # One that can rotate a part of each head may be asked to (Nemotron).
            in_part = rotary and _run(module, arguments(head_dim // 2)) is not None
            return None if in_part else candidate
    return None


def _run(module: nn.Module, arguments: dict[str, Any]) -> Tensor | None:
    """Its output; None when it doesn't take such arguments."""
    try:
        output: Tensor = module(**arguments)[0]
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        logger.debug("%s is not of Llama's kind: %s", type(module).__name__, error)
        return None
    return output


@contextmanager
def _stand_in_layer(module: nn.Module) -> Iterator[None]:
    """A layer without a cache, whose output shows everything that it was given."""

    def layer(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        share = query.shape[1] // key.shape[1]
        shown = query * (8 * scale) + key.repeat_interleave(share, 1) - value.repeat_interleave(share, 1)
        if softcap is not None:
            shown = shown * softcap
        return shown if sinks is None else shown + sinks[:, None]

    setattr(module, LAYER_ATTRIBUTE, layer)
    try:
        yield
    finally:
        delattr(module, LAYER_ATTRIBUTE)


def _linears(module: nn.Module, *names: str) -> list[nn.Linear]:
    return [getattr(module, name) for name in names]


def random_tensor(*shape: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).to(like.dtype)


def check_tokens(width: int, *, like: Tensor) -> Tensor:
    """[tokens, width], random, each token of another size."""
    return random_tensor(len(_CHECK_SCALES), width, like=like) * like.new_tensor(_CHECK_SCALES)[:, None]


def _error(actual: Tensor, expected: Tensor) -> float:
    """The largest there is, as a share of the largest value of the same token."""
    actual, expected = actual.float(), expected.float()
    return float(((actual - expected).abs() / expected.abs().amax(dim=-1, keepdim=True)).max())


def agree(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and _error(actual, expected) <= _TOLERANCE[expected.dtype]
