"""Is this a model's configuration at all? Asked before a model is made of it, which would fail in its own
words, or never end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from model_runner.errors import ModelNotServable

# From what to what each may be: far past any model there is, and still few enough to build one in no memory.
_RANGES = {
    "vocab_size": (1, 100_000_000),
    "num_hidden_layers": (1, 10_000),
    "hidden_size": (1, 10_000_000),
    "intermediate_size": (0, 100_000_000),
    "moe_intermediate_size": (0, 100_000_000),
    "num_attention_heads": (1, 1_000_000),
    "num_key_value_heads": (1, 1_000_000),
    "head_dim": (1, 1_000_000),
    "num_experts": (0, 1_000_000),
    "num_local_experts": (0, 1_000_000),
    "n_routed_experts": (0, 1_000_000),
}
_SHAPES: dict[str, type] = {
    "layer_types": list,
    "architectures": list,
    "per_layer_config": dict,
    "rope_scaling": dict,
    "rope_parameters": dict,
    "dtype": str,
    "torch_dtype": str,
    "text_config": dict,
    "vision_config": dict,
    "audio_config": dict,
    "quantization_config": dict,
}
_NUMBERS = re.compile(r"(torch\.)?(auto|bfloat16|float(16|32|64)|float8_\w+)")


def check_config(fields: Any, where: str) -> dict[str, Any]:
    """The fields of a `config.json`. Raises ModelNotServable for what is no configuration, by the field.

    Fields that are left out, or of another type than transformers' class has, are for that class to judge.
    """
    if not isinstance(fields, dict):
        raise ModelNotServable(f"{where} is no model configuration: it holds {_kind(fields)}, not an object.")
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        was = "is missing" if model_type is None else f"is {model_type!r}, not a name"
        raise ModelNotServable(f"{where} is no model configuration: its model_type {was}.")
    _check_fields(fields, where, "")
    return fields


def _check_fields(fields: Mapping[str, Any], where: str, within: str) -> None:
    for name, value in fields.items():
        if why := _problem(name, value):
            raise ModelNotServable(f"{where} can't be read: its {within}{name} is {why}.")
        if isinstance(value, dict) and not within and name.endswith("_config"):
            _check_fields(value, where, f"{name}.")


def _problem(name: str, value: Any) -> str | None:
    shape = _SHAPES.get(name)
    if shape is not None and value is not None and not isinstance(value, shape):
        return f"{_kind(value)}, not {_NAMES[shape]}"
    if shape is str and value and not _NUMBERS.fullmatch(value):
        return f"{value[:40]!r}, which is no type of numbers; bfloat16, float16 and float32 are"
    low, high = _RANGES.get(name, (None, None))
    if low is None or high is None:
        return None
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, int | float) and not low <= each <= high:
            return f"{each:.12g}, and must be from {low} to {high:,}"
    return None


_NAMES = {list: "a list", str: "a text", bool: "true or false", dict: "an object"}


def _kind(value: Any) -> str:
    return "nothing" if value is None else _NAMES.get(type(value), "a number")
