"""Is this model one that the block-paged attention computes rightly? Found out by running it.

A few tokens go through the model with a probe in the place of its attention. The probe sees what every layer
asks of its attention function, and refuses, by name and with the reason, what Plimsoll would not honour: a
layer that never asks (recurrent, or with attention of its own), another shape than the price list's, another
window, a mask that is not causal, an argument not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from model_runner.core.block_layout import BlockGroup, BlockLayout
from model_runner.errors import ModelNotServable
from model_runner.worker import attention

_PROBE = "plimsoll_probe"
_PROBE_TOKENS = 4

# Arguments of the attention interface that paged_attention_forward honours, or that change nothing in it.
_HONOURED = frozenset({"scaling", "softcap", "s_aux", "sliding_window"})
_HARMLESS = frozenset(
    {"dropout", "position_ids", "use_cache", "is_causal", "cache_position", "position_embeddings"}
)


@dataclass(frozen=True, slots=True)
class _Call:
    module: nn.Module
    kv_heads: tuple[int, int]  # of the keys, of the values
    head_dims: tuple[int, int, int]  # of the queries, the keys, the values
    mask: Callable[..., Any] | None
    arguments: Mapping[str, Any]


class _Probe:
    """Records each attention call, and the mask function behind each mask that transformers builds."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self._masks: dict[int, tuple[Tensor, Callable[..., Any]]] = {}

    def mask(self, mask_function: Callable[..., Any], device: torch.device, **kwargs: Any) -> Tensor:
        mask = torch.ones((1, 1, _PROBE_TOKENS, _PROBE_TOKENS), dtype=torch.bool, device=device)
        self._masks[id(mask)] = mask, mask_function
        return mask

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        known = self._masks.get(id(attention_mask))
        self.calls.append(
            _Call(
                module,
                (key.shape[1], value.shape[1]),
                (query.shape[3], key.shape[3], value.shape[3]),
                known[1] if known else None,
                kwargs,
            )
        )
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def attention_modules(model: nn.Module, layout: BlockLayout) -> list[nn.Module]:
    """The model's attention modules in layer order, and the model set to call the block-paged attention.

    Raises ModelNotServable when the model needs something of its attention that Plimsoll doesn't give.
    """
    name = type(model).__name__
    calls = _run_probe(model, name)
    layers = {layer: group for group in layout.groups for layer in group.layers}
    if len(calls) != len(layers):
        raise ModelNotServable(
            f"{name} can't be served: it has {len(layers)} layers and calls transformers' attention "
            f"{len(calls)} times. Recurrent layers, cross-attention and attention of a model's own are not "
            "supported."
        )
    for layer, call in enumerate(calls):
        if problem := _problem(call, layers[layer]):
            raise ModelNotServable(f"{name} can't be served: layer {layer} {problem}.")
    if len({id(call.module) for call in calls}) != len(layers):
        raise ModelNotServable(f"{name} can't be served: some of its layers share one attention module.")
    _set_attention(model, attention.IMPLEMENTATION)
    return [call.module for call in calls]


@torch.inference_mode()
def _run_probe(model: nn.Module, name: str) -> list[_Call]:
    probe = _Probe()
    attention.register()
    ALL_ATTENTION_FUNCTIONS.register(_PROBE, probe.attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_PROBE, probe.mask)
    try:
        _set_attention(model, _PROBE)
        device = next(model.parameters()).device
        tokens = torch.arange(_PROBE_TOKENS, device=device)[None]
        model(input_ids=tokens, position_ids=tokens, use_cache=False)
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        raise ModelNotServable(
            f"{name} can't be served: it did not run with another attention function ({error})."
        ) from error
    finally:
        # transformers' registries have no way out, and must not keep the model alive.
        calls, probe.calls = probe.calls, []
    return calls


def _set_attention(model: Any, implementation: str) -> None:
    model.set_attn_implementation(implementation)


def _problem(call: _Call, group: BlockGroup) -> str | None:
    """What stands against this layer, or None."""
    if getattr(call.module, "is_causal", True) is not True:
        return "does not attend causally"
    if set(call.kv_heads) != {group.kv_heads} or set(call.head_dims) != {group.head_dim}:
        return (
            f"has keys and values of {call.kv_heads} heads and queries, keys and values of {call.head_dims} "
            f"elements, but is priced at {group.kv_heads} heads of {group.head_dim}"
        )
    window = call.arguments.get("sliding_window")
    if group.window is None and window is not None and window < _UNBOUNDED:
        return f"attends to a window of {window} tokens, but is priced as keeping them all"
    if call.mask is None or not _is_causal(call.mask, group.window):
        reach = "all earlier tokens" if group.window is None else f"the last {group.window} tokens"
        return f"does not attend to exactly {reach}"
    foreign = [
        argument
        for argument, value in call.arguments.items()
        if value is not None and value is not False and argument not in _HONOURED | _HARMLESS
    ]
    return (
        f"passes arguments to its attention that are not supported: {', '.join(foreign)}" if foreign else None
    )


_UNBOUNDED = 1 << 30


def _is_causal(mask: Callable[..., Any], window: int | None) -> bool:
    """Whether the mask lets query q see exactly the keys 0 … q, or the last `window` of them.

    Asked at the places where masks differ: the diagonal, the window's edge, the sequence's start, far away.
    """
    reach = window or 1000
    spots = [
        (q, q + d)
        for q in (0, 1, reach - 1, reach, reach + 1, 3 * reach)
        for d in (0, 1, -1, 1 - reach, -reach)
    ]
    zero = torch.tensor(0)
    for query, key in [*spots, (3 * reach, 0)]:
        if key < 0:
            continue
        expected = key <= query and (window is None or query - key < window)
        if bool(mask(zero, zero, torch.tensor(query), torch.tensor(key))) is not expected:
            return False
    return True
