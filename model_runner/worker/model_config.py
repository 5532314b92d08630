"""A model's configuration with nothing left out, as plain data for the pure price list.

`config.json` files leave out what their authors took for granted, and families spell the same thing in
different ways. transformers' configuration classes know the defaults and the other names; this is where they
are asked.
"""

from __future__ import annotations

import dataclasses
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


# Fields that say what is kept, of models whose configuration class has them.
_CLASSES_OWN = ("sliding_window", "attention_chunk_size")


def resolved(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a model's decoder, under their own names and under transformers' common ones.

    Where no layer_types say which layers slide, a window or a chunk that the configuration class does not
    have is left out: such classes take any field, and their models read no other than their own.
    """
    text = config.get_text_config(decoder=True)
    says_where = bool(getattr(text, "layer_types", None))
    foreign = set() if says_where else {name for name in _CLASSES_OWN if not _has(text, name)}
    fields: dict[str, Any] = {name: value for name, value in text.to_dict().items() if name not in foreign}
    for name in (*text.attribute_map, *_COMPUTED):
        if name not in foreign and fields.get(name) is None and getattr(text, name, None) is not None:
            fields[name] = getattr(text, name)
    if fields.get("max_position_embeddings") is None and fields.get("max_seq_len"):  # MPT's name for it
        fields["max_position_embeddings"] = fields["max_seq_len"]
    if (dtype := dtype_of(config)) is not None:
        fields["dtype"] = str(dtype).removeprefix("torch.")
    return fields


def dtype_of(config: PreTrainedConfig) -> Any:
    """What the decoder's weights are kept in, as the configuration says; None where it does not. Where the
    decoder is nested, most files say it once, of the whole."""
    text = config.get_text_config(decoder=True)
    return getattr(text, "dtype", None) or getattr(config, "dtype", None)


def _has(config: PreTrainedConfig, name: str) -> bool:
    """Whether its class has such a field, by this name or another."""
    declared = (
        {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else ()
    )
    return name in declared or name in config.attribute_map or hasattr(type(config), name)


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
    if isinstance(error, KeyError):
        return f"it does not know {error}"
    said = " ".join(str(error).split())
    return said.split(" Should contain one of")[0].split(" Model type should be one of")[0]
