"""A model's configuration with nothing left out, as plain data for the pure price list.

`config.json` files leave out what their authors took for granted, and families spell the same thing in
different ways. transformers' configuration classes know the defaults and the other names; this is where they
are asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from model_runner.errors import ModelNotPriced

# What transformers' configuration classes raise for fields that they can't take.
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, StrictDataclassError)

# What a cache's price may follow from. Some are computed by a configuration class, and not among its fields.
_COMPUTED = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "qk_head_dim",
    "v_head_dim",
    "intermediate_size",
    "sliding_window",
    "layer_types",
    "kv_sharing_modes",
    "max_position_embeddings",
)


def resolved(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a model's decoder, under their own names and under transformers' common ones."""
    text = config.get_text_config(decoder=True)
    fields: dict[str, Any] = text.to_dict()
    for name in (*text.attribute_map, *_COMPUTED):
        if fields.get(name) is None and getattr(text, name, None) is not None:
            fields[name] = getattr(text, name)
    return fields


def resolve(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same from what a `config.json` says.

    Raises ModelNotPriced for a model type that transformers does not know, and for fields it refuses.
    """
    fields = dict(config)
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ModelNotPriced("The configuration has no model_type.")
    try:
        return resolved(AutoConfig.for_model(model_type, **fields))
    except UNREADABLE as error:
        raise ModelNotPriced(
            f"transformers can't read this configuration of model type {model_type!r}: {reason_of(error)}"
        ) from error


def reason_of(error: Exception) -> str:
    """transformers' own words, on one line, without the list of every model type that it knows."""
    return " ".join(str(error).split(" Should contain one of")[0].split())
