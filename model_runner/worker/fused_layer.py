"""A decoder layer of Llama's kind as one call into the kernels.

At small batches what stands between a layer's kernels, some twenty calls from Python, takes as long as the
products themselves. A layer is taken over only after both ways were run on the same random numbers, with a
cache, and agreed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from model_runner.core.output import ScheduledSequence
from model_runner.worker.attention import LAYER_ATTRIBUTE, PagedLayer, StepContext
from model_runner.worker.batch import pack
from model_runner.worker.fused import (
    FusedAttention,
    GatedMLP,
    NativeRMSNorm,
    agree,
    check_tokens,
    random_tensor,
)
from model_runner.worker.linear import WIDE_ROWS, NativeLinear
from model_runner.worker.native import Kernels, LayerArguments, set_cache

_CHECK_BLOCK_SIZE = 16


class FusedLayer:
    """A decoder layer's forward. Its parts stay in their places, and hold the weights that this points at."""

    def __init__(self, kernels: Kernels, layer: Any) -> None:
        """`layer` is one that `fits`, and whose weights will not move any more."""
        self._kernels = kernels
        self._in_parts: Callable[..., Tensor] = layer.forward  # transformers' own, over the swapped parts
        self._attention_module: nn.Module = layer.self_attn
        attention: FusedAttention = layer.self_attn.forward
        self._attention = attention
        norms: tuple[NativeRMSNorm, ...] = layer.input_layernorm, layer.post_attention_layernorm
        arguments = LayerArguments()
        arguments.input_norm, arguments.post_norm = (norm.weight.data_ptr() for norm in norms)
        arguments.input_eps, arguments.post_eps = (norm.eps for norm in norms)
        arguments.input_round_first, arguments.post_round_first = (norm.round_first for norm in norms)
        arguments.hidden = norms[0].weight.shape[0]
        for name, linear in (
            ("qkv", attention.qkv),
            ("out", attention.output),
            ("gate_up", layer.mlp.gate_up),
            ("down", layer.mlp.down),
        ):
            assert isinstance(linear, NativeLinear)
            setattr(arguments, name, linear.arguments())
        arguments.attention.query_heads = attention.query_heads
        arguments.attention.scale = attention.scale
        self._arguments = arguments
        # Views of the two structures inside, made once.
        self._write_arguments, self._attention_arguments = arguments.write, arguments.attention

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **_: Any
    ) -> Tensor:
        """hidden_states [1, T, hidden] bfloat16 -> the same shape."""
        if self._kernels.wide and hidden_states.shape[1] >= WIDE_ROWS:
            return self._in_parts(hidden_states, position_embeddings=position_embeddings)
        x = hidden_states.contiguous()
        y = torch.empty_like(x)
        arguments, tokens = self._arguments, x.shape[1]
        arguments.x, arguments.y, arguments.tokens = x.data_ptr(), y.data_ptr(), tokens
        if self._attention.rotary:
            assert position_embeddings is not None
            cosine, sine = (part[0].to(x.dtype).contiguous() for part in position_embeddings)
            assert cosine.shape == sine.shape == (tokens, self._attention.head_dim)
            arguments.cosine, arguments.sine = cosine.data_ptr(), sine.data_ptr()
        layer: PagedLayer = getattr(self._attention_module, LAYER_ATTRIBUTE)
        write, attention = self._write_arguments, self._attention_arguments
        set_cache(write, attention, layer.key_cache, layer.value_cache, layer.metadata, layer.group)
        write.tokens = tokens
        attention.window = layer.window or 0
        self._kernels.decoder_layer(arguments)
        return y

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        attention = getattr(layer, "self_attn", None)
        mlp = getattr(layer, "mlp", None)
        norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
        return (
            isinstance(vars(attention).get("forward") if attention is not None else None, FusedAttention)
            and isinstance(mlp, GatedMLP)
            and isinstance(mlp.gate_up, NativeLinear)
            and all(isinstance(norm, NativeRMSNorm) for norm in norms)
        )


def fuse_layers(model: nn.Module, kernels: Kernels) -> int:
    """Give the decoder layers of Llama's kind the fused forward. Returns how many were.

    Call it last: it keeps pointers to the weights of what the other fusions have put in.
    """
    fused = 0
    for layer in model.modules():
        if FusedLayer.fits(layer) and (native := _fitting_layer(kernels, layer)):
            layer.forward = native
            fused += 1
    return fused


def _fitting_layer(kernels: Kernels, layer: Any) -> FusedLayer | None:
    attention: FusedAttention = layer.self_attn.forward
    like = torch.empty(0, dtype=torch.bfloat16)
    x = check_tokens(layer.input_layernorm.weight.shape[0], like=like)[None]
    embeddings = tuple(random_tensor(2, 1, x.shape[1], attention.head_dim, like=like))
    native = FusedLayer(kernels, layer)
    with _stand_in_cache(kernels, layer.self_attn, attention, x.shape[1]):
        expected = layer(x, position_embeddings=embeddings, attention_mask=None)
        if not isinstance(expected, Tensor):
            return None
        return native if agree(native(x, position_embeddings=embeddings), expected) else None


@contextmanager
def _stand_in_cache(
    kernels: Kernels, module: nn.Module, attention: FusedAttention, tokens: int
) -> Iterator[None]:
    """A cache of one block for the attention module, and a step of one sequence in it."""
    assert tokens <= _CHECK_BLOCK_SIZE
    context = StepContext()
    sequence = ScheduledSequence(0, [0] * tokens, 0, [[0]])
    context.metadata = pack([sequence], _CHECK_BLOCK_SIZE, torch.device("cpu")).metadata
    shape = (1, 2, attention.kv_heads, _CHECK_BLOCK_SIZE, attention.head_dim)
    cache = torch.zeros(shape, dtype=torch.bfloat16)
    layer = PagedLayer(context, kernels.paged_attention, cache[:, 0], cache[:, 1], 0, None)
    setattr(module, LAYER_ATTRIBUTE, layer)
    try:
        yield
    finally:
        delattr(module, LAYER_ATTRIBUTE)
