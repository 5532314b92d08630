"""What a model is, read from its configuration and from the headers of its weights. No weight is loaded.

Weights are counted from the headers of safetensors or GGUF files where there are any; else from the model
that transformers makes of the configuration, on torch's meta device, where parameters have shapes and no
memory.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import get_safetensors_metadata, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError
from safetensors import SafetensorError, safe_open
from torch import float32
from transformers import AutoConfig, PreTrainedConfig

from model_runner import model_files
from model_runner.errors import ModelNotServable, StartupError
from model_runner.worker.loader import read_source, skeleton
from model_runner.worker.model_config import resolved

# A parameter that belongs to one of a layer's routed experts, or holds all of them stacked.
_EXPERT = re.compile(r"(^|\.)(experts|switch_mlp)\.")


@dataclass(frozen=True, slots=True)
class Weights:
    """How many numbers a model has, and how they are stored. Tied ones count once."""

    source: str  # safetensors | gguf | config
    parameters: int
    expert_parameters: int  # those of routed experts, of which a token uses some
    stored_bytes: int | None  # as the files have them; None where there are none


def describe(model: str, cache_dir: str) -> dict[str, Any]:
    """{"name", "config", "weights"}: the resolved configuration, and Weights, as plain data.

    `model` is a directory (with or without weights), a hub id, a config.json, a .gguf file, or "" for the
    embedded model. Raises StartupError, with the reason, for what can't be read.
    """
    path = Path(model).expanduser()
    if model and (path.suffix == ".json" or (path.is_dir() and not model_has_weights(path))):
        config = _read_config(path if path.is_file() else path / "config.json")
        name, weights = model, _count(config)
    elif model and not path.exists() and not model.endswith(".gguf"):
        config, weights = _from_hub(model)
        name = model
    else:
        files = model_files.resolve(model, cache_dir)
        config = read_source(files).config
        name = model_files.default_name(model)
        weights = _gguf_weights(files.path) if files.kind == "gguf" else _safetensors_weights(files.path)
    return {"name": name, "config": resolved(config), "weights": asdict(weights)}


def model_has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _read_config(path: Path) -> PreTrainedConfig:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        model_type = fields.pop("model_type")
        config: PreTrainedConfig = AutoConfig.for_model(model_type, **fields)
    except OSError as error:
        raise StartupError(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelNotServable(
            f"{path} is no model configuration that transformers can read: {error}"
        ) from error
    return config


def _count(config: PreTrainedConfig) -> Weights:
    text = config.get_text_config(decoder=True)
    counts = {name: parameter.numel() for name, parameter in skeleton(text, float32).named_parameters()}
    return Weights("config", sum(counts.values()), _of_experts(counts), None)


def _safetensors_weights(folder: Path) -> Weights:
    counts: dict[str, int] = {}
    stored = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in sorted(tensors.keys()):
                    part = tensors.get_slice(name)
                    counts[name] = math.prod(part.get_shape())
                    stored += counts[name] * _element_bits(part.get_dtype()) // 8
        except SafetensorError as error:
            raise StartupError(f"{file} is not a whole safetensors file: {error}") from error
    return Weights("safetensors", sum(counts.values()), _of_experts(counts), stored)


def _element_bits(dtype: str) -> int:
    """Of a safetensors type name: F32, BF16, F8_E4M3, I8, U4, BOOL …"""
    digits = re.match(r"[A-Z]+(\d+)", dtype)
    return int(digits[1]) if digits else 8


def _gguf_weights(path: Path) -> Weights:
    from gguf import GGUFReader  # reads the header; maps the rest

    tensors = GGUFReader(path).tensors
    counts = {tensor.name: math.prod(int(n) for n in tensor.shape) for tensor in tensors}
    experts = sum(count for name, count in counts.items() if "_exps." in name)
    return Weights("gguf", sum(counts.values()), experts, sum(int(tensor.n_bytes) for tensor in tensors))


def _from_hub(model: str) -> tuple[PreTrainedConfig, Weights]:
    """The configuration, and the weights' headers, which are small; the weights stay where they are."""
    try:
        config = _read_config(Path(hf_hub_download(model, "config.json")))
        metadata = get_safetensors_metadata(model)
    except NotASafetensorsRepoError:
        return config, _count(config)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise StartupError(
            f"There is no file or directory {model}, and it can't be read from the Hugging Face hub: {error}"
        ) from error
    counts, stored = {}, 0
    for file in metadata.files_metadata.values():
        for name, tensor in file.tensors.items():
            counts[name] = math.prod(tensor.shape)
            stored += tensor.data_offsets[1] - tensor.data_offsets[0]
    return config, Weights("safetensors", sum(counts.values()), _of_experts(counts), stored)


def _of_experts(counts: dict[str, int]) -> int:
    return sum(count for name, count in counts.items() if _EXPERT.search(name))
