"""What a model is, read from its configuration and from the headers of its weights. No weight is loaded.

Weights are counted from the headers of safetensors or GGUF files where there are any; else from the model
that transformers makes of the configuration, on torch's meta device, where parameters have shapes and no
memory.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from httpx2 import HTTPError
from huggingface_hub import get_safetensors_metadata, hf_hub_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, NotASafetensorsRepoError
from safetensors import SafetensorError, safe_open
from torch import float32
from transformers import AutoConfig, PreTrainedConfig

from model_runner import model_files
from model_runner.errors import ModelNotServable, StartupError
from model_runner.worker.loader import read_source, skeleton
from model_runner.worker.model_config import UNREADABLE, reason_of, resolved

# A parameter that belongs to one of a layer's routed experts, or holds all of them stacked.
_EXPERT = re.compile(r"(^|\.)(experts|switch_mlp)\.|_exps\.")
# Of an input embedding a step reads a row for each token; tied to the output, it is read whole.
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|embeddings?|token_embd)\.weight$")
_OUTPUT = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")


@dataclass(frozen=True, slots=True)
class Weights:
    """How many numbers a model has, and how they are stored. Tied ones count once."""

    source: str  # safetensors | gguf | config
    parameters: int
    expert_parameters: int  # those of routed experts, of which a token uses some
    embedding_parameters: int = 0  # of an input embedding that is not the output's too
    stored_bytes: int | None = None  # as the files have them; None where there are none
    stored_expert_bytes: int | None = None  # None where only an index was there
    stored_embedding_bytes: int | None = None
    quantisation: str | None = None  # the method, where the checkpoint is quantised


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Of a file's header."""

    elements: int
    size: int  # bytes


def describe(model: str, cache_dir: str) -> dict[str, Any]:
    """{"name", "config", "weights"}: the resolved configuration, and Weights, as plain data.

    `model` is a directory (with or without weights), a hub id, a config.json, a .gguf file, or "" for the
    embedded model. Raises StartupError, with the reason, for what can't be read.
    """
    path = Path(model).expanduser()
    if model == "" or path.suffix == ".gguf":
        files = model_files.resolve(model, cache_dir)
        config = read_source(files).config
        weights = _stored("gguf", _gguf_tensors(files.path), config, None)
        return {
            "name": model_files.default_name(model),
            "config": resolved(config),
            "weights": asdict(weights),
        }
    if path.is_dir():
        config, quantisation = _read_config(path / "config.json")
        weights = _of_folder(path, config, quantisation)
    elif path.is_file():
        config, quantisation = _read_config(path)
        weights = replace(_count(config), quantisation=quantisation)
    elif path.suffix == ".json" or not model_files.is_hub_id(model):
        raise StartupError(f"There is no file or directory {model}.")
    else:
        config, weights = _from_hub(model)
    return {"name": model, "config": resolved(config), "weights": asdict(weights)}


def _read_config(path: Path) -> tuple[PreTrainedConfig, str | None]:
    """The configuration, and the method by which the weights are quantised, if they are: that changes how
    they are stored, not the model."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        quantisation = fields.pop("quantization_config", None)
        model_type = fields.pop("model_type")
        config: PreTrainedConfig = AutoConfig.for_model(model_type, **fields)
    except OSError as error:
        raise StartupError(f"{path} can't be read: {error.strerror}.") from error
    except UNREADABLE as error:
        raise ModelNotServable(
            f"{path} is no model configuration that transformers can read: {reason_of(error)}"
        ) from error
    return config, str(quantisation.get("quant_method", "unknown")) if quantisation else None


def _count(config: PreTrainedConfig) -> Weights:
    # A copy: making a model of a configuration writes a dtype into it.
    text = copy.deepcopy(config.get_text_config(decoder=True))
    counts = {name: parameter.numel() for name, parameter in skeleton(text, float32).named_parameters()}
    return Weights(
        "config",
        sum(counts.values()),
        sum(count for name, count in counts.items() if _EXPERT.search(name)),
        sum(counts[name] for name in _own_embeddings(counts)),
    )


def _own_embeddings(names: Iterable[str]) -> list[str]:
    """Input embeddings, where the output is another tensor."""
    listed = list(names)
    if not any(_OUTPUT.search(name) for name in listed):
        return []
    return [name for name in listed if _EMBEDDING.search(name)]


def _of_folder(folder: Path, config: PreTrainedConfig, quantisation: str | None) -> Weights:
    """From the headers of a folder's safetensors; from their index, where it is there alone."""
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if not index.is_file():
        if not files:
            return replace(_count(config), quantisation=quantisation)
        return _stored("safetensors", _safetensors(files), config, quantisation)
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(listed["weight_map"].values()))]
        if not all(file.is_file() for file in files):
            total = int(listed["metadata"]["total_size"])
            return replace(_count(config), stored_bytes=total, quantisation=quantisation)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StartupError(
            f"{index} is not an index of safetensors files that can be read: {error}"
        ) from error
    return _stored("safetensors", _safetensors(files), config, quantisation)


def _safetensors(files: Iterable[Path]) -> dict[str, _Tensor]:
    found: dict[str, _Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in sorted(tensors.keys()):
                    part = tensors.get_slice(name)
                    elements = math.prod(part.get_shape())
                    found[name] = _Tensor(elements, elements * _element_bits(part.get_dtype()) // 8)
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{file} is not a whole safetensors file: {error}") from error
    return found


def _element_bits(dtype: str) -> int:
    """Of a safetensors type name: F32, BF16, F8_E4M3, I8, U4, BOOL …"""
    digits = re.match(r"[A-Z]+(\d+)", dtype)
    return int(digits[1]) if digits else 8


def _stored(
    source: str, tensors: Mapping[str, _Tensor], config: PreTrainedConfig, quantisation: str | None
) -> Weights:
    embeddings = _own_embeddings(tensors)
    experts = [name for name in tensors if _EXPERT.search(name)]
    weights = Weights(
        source,
        sum(tensor.elements for tensor in tensors.values()),
        sum(tensors[name].elements for name in experts),
        sum(tensors[name].elements for name in embeddings),
        sum(tensor.size for tensor in tensors.values()),
        sum(tensors[name].size for name in experts),
        sum(tensors[name].size for name in embeddings),
        quantisation,
    )
    if quantisation is None:
        return weights
    # Quantised formats pack several numbers into an element, and keep scales beside them.
    counted = _count(config)
    return replace(
        weights,
        parameters=counted.parameters,
        expert_parameters=counted.expert_parameters,
        embedding_parameters=counted.embedding_parameters,
    )


def _gguf_tensors(path: Path) -> dict[str, _Tensor]:
    from gguf import GGUFReader  # reads the header; maps the rest

    return {
        tensor.name: _Tensor(math.prod(int(n) for n in tensor.shape), int(tensor.n_bytes))
        for tensor in GGUFReader(path).tensors
    }


def _from_hub(model: str) -> tuple[PreTrainedConfig, Weights]:
    """The configuration, and the weights' headers, which are small; the weights stay where they are."""
    try:
        config, quantisation = _read_config(Path(hf_hub_download(model, "config.json")))
        metadata = get_safetensors_metadata(model)
    except NotASafetensorsRepoError:
        return config, replace(_count(config), quantisation=quantisation)
    except GatedRepoError as error:
        raise StartupError(
            f"{model} is a gated model. Accept its terms on https://huggingface.co/{model} and set "
            "HF_TOKEN to a token of your account."
        ) from error
    except (HfHubHTTPError, HTTPError, OSError, ValueError) as error:
        # HTTPError is the client library's own: no connection, a timeout.
        raise StartupError(
            f"There is no file or directory {model}, and it can't be read from the Hugging Face hub: {error}"
        ) from error
    tensors = {
        name: _Tensor(math.prod(tensor.shape), tensor.data_offsets[1] - tensor.data_offsets[0])
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    }
    return config, _stored("safetensors", tensors, config, quantisation)
