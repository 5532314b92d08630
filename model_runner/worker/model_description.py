"""What a model is, read from its configuration and from the headers of its weights. No weight is loaded.

Weights are counted from the headers of safetensors or GGUF files where there are any; else from the model
that transformers makes of the configuration, on torch's meta device, where parameters have shapes and no
memory.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from httpx2 import HTTPError
from huggingface_hub import get_safetensors_metadata, hf_hub_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, NotASafetensorsRepoError
from safetensors import SafetensorError, safe_open
from torch import float32, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)

from model_runner import model_files
from model_runner.core.config_checks import check_config
from model_runner.core.packing import Packing, find_packing, method_of
from model_runner.errors import ModelNotServable, StartupError
from model_runner.worker.loader import read_source, served_context, skeleton
from model_runner.worker.machine import describe_machine
from model_runner.worker.model_config import UNREADABLE, dtype_of, reason_of, resolved
from model_runner.worker.weight_parts import UNREAD, Part, is_of_tower, parts, total, without_tied_output

logger = logging.getLogger(__name__)

# Where transformers keeps models that read more than text.
_WHOLE = (AutoModelForMultimodalLM, AutoModelForImageTextToText)


@dataclass(frozen=True, slots=True)
class Weights:
    """How many numbers a model has, and how they are stored. Tied ones count once."""

    source: str  # safetensors | gguf | config
    parameters: int
    expert_parameters: int  # those of routed experts, of which a token uses some
    unread_parameters: int = 0  # held, and not read by a decode step
    unread: tuple[str, ...] = ()  # what those are
    uncounted: tuple[str, ...] = ()  # fields of the configuration, of parts whose size is not known
    stored_bytes: int | None = None  # as the files have them; None where there are none
    stored_expert_bytes: int | None = None  # None where only an index was there
    stored_unread_bytes: int | None = None
    quantisation: str | None = None  # the method, where the checkpoint is quantised
    packing: str | None = None  # what a packed weight takes, where the configuration tells
    packed_parameters: int = 0  # of `parameters`, those that the method packs
    packed_bytes: int = 0  # what those take
    packed_expert_parameters: int = 0
    packed_expert_bytes: int = 0
    packed_unread_parameters: int = 0
    packed_unread_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Of a file's header, or of a model that has none: then `size` is what it is packed into, if it is."""

    elements: int
    size: int | None  # bytes


def describe(model: str, cache_dir: str) -> dict[str, Any]:
    """{"name", "architecture", "config", "served_context", "has_decoder", "weights", "machine"}: the class
    that the configuration names, its fields resolved, the longest context that a server would take, whether
    transformers has a model of the decoder alone, Weights, and what a server would find on this machine, as
    plain data.

    `model` is a directory (with or without weights), a hub id, a config.json, a .gguf file, or "" for the
    embedded model. Raises StartupError, with the reason, for what can't be read.
    """
    path = Path(model).expanduser()
    if model == "" or path.suffix == ".gguf":
        files = model_files.resolve(model, cache_dir)
        config = read_source(files).config
        weights = _stored("gguf", _gguf_tensors(files.path), config, None)
        return _described(model_files.default_name(model), config, weights)
    if path.is_dir():
        config, quantisation = _read_config(path / "config.json")
        weights = _of_folder(path, config, quantisation)
    elif path.is_file():
        config, quantisation = _read_config(path)
        weights = _count(config, quantisation)
    elif path.suffix == ".json" or not model_files.is_hub_id(model):
        raise StartupError(f"There is no file or directory {model}.")
    else:
        config, weights = _from_hub(model)
    return _described(model, config, weights)


def _described(name: str, config: PreTrainedConfig, weights: Weights) -> dict[str, Any]:
    return {
        "machine": describe_machine(dtype_of(config)),
        "name": name,
        "architecture": next(iter(config.architectures or ()), None),
        "config": resolved(config),
        "served_context": served_context(config.get_text_config(decoder=True)),
        "has_decoder": type(config.get_text_config(decoder=True)) in MODEL_FOR_CAUSAL_LM_MAPPING,
        "weights": asdict(weights),
    }


def _read_config(path: Path) -> tuple[PreTrainedConfig, dict[str, Any] | None]:
    """The configuration, and what it says of how the weights are quantised, if they are: that changes how
    they are stored, not the model."""
    try:
        fields = check_config(json.loads(path.read_text(encoding="utf-8")), str(path))
        quantisation = fields.pop("quantization_config", None)
        model_type = fields.pop("model_type")
        config: PreTrainedConfig = AutoConfig.for_model(model_type, **fields)
    except OSError as error:
        raise StartupError(f"{path} can't be read: {error.strerror}.") from error
    except UNREADABLE as error:
        raise ModelNotServable(
            f"{path} is no model configuration that transformers can read: {reason_of(error)}"
        ) from error
    return config, quantisation or None


def _count(config: PreTrainedConfig, quantisation: Mapping[str, Any] | None) -> Weights:
    """From the model that transformers makes of the configuration."""
    text = config.get_text_config(decoder=True)
    model: nn.Module | None = None
    uncounted: tuple[str, ...] = ()
    if text is not config:
        model = _whole(config)
        uncounted = () if model is not None else _other_parts(config, text)
    if model is None:
        # A copy: making a model of a configuration writes a dtype into it.
        model = skeleton(copy.deepcopy(text), float32)
    packing = find_packing(quantisation) if quantisation else None
    tensors = {name: _Tensor(parameter.numel(), size) for name, parameter, size in _packed(model, packing)}
    weights = _summary("config", tensors, config)
    return replace(
        weights,
        uncounted=uncounted,
        quantisation=method_of(quantisation) if quantisation else None,
        packing=packing.words if packing else None,
    )


def _whole(config: PreTrainedConfig) -> nn.Module | None:
    """A model of text and more, with its towers; None where transformers has none, or lacks a package for
    one."""
    for auto in _WHOLE:
        try:
            return skeleton(copy.deepcopy(config), float32, auto)
        except ModelNotServable as error:
            logger.debug("the whole of %s can't be counted: %s", config.model_type, error.message)
    return None


def _other_parts(config: PreTrainedConfig, text: PreTrainedConfig) -> tuple[str, ...]:
    """The fields that describe parts beside the decoder."""
    return tuple(
        name
        for name in config.sub_configs
        if (part := getattr(config, name, None)) is not None and part is not text
    )


def _packed(model: nn.Module, packing: Packing | None) -> Iterator[tuple[str, nn.Parameter, int | None]]:
    """(name, parameter, what it is packed into, if it is): linear layers' weights, and stacks of experts'."""
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, parameter in model.named_parameters():
        size = None
        fits = name in linear or (parameter.dim() > 2 and ".experts." in name)
        if packing is not None and fits and not (packing.decoder_only and is_of_tower(name)):
            size = packing.size(name.removesuffix(".weight"), parameter.shape)
        yield name, parameter, size


def _of_folder(folder: Path, config: PreTrainedConfig, quantisation: Mapping[str, Any] | None) -> Weights:
    """From the headers of the safetensors that transformers would load; from their index, where it is there
    alone."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        files = _files_without_index(folder)
        if not files:
            return _count(config, quantisation)
        return _stored("safetensors", _safetensors(files), config, quantisation)
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(listed["weight_map"].values()))]
        if not all(file.is_file() for file in files):
            total_size = int(listed["metadata"]["total_size"])
            if total_size < 1:
                raise ValueError(f"its total_size is {total_size}")
            return replace(_count(config, quantisation), stored_bytes=total_size)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StartupError(
            f"{index} is not an index of safetensors files that can be read: {error}"
        ) from error
    return _stored("safetensors", _safetensors(files), config, quantisation)


def _files_without_index(folder: Path) -> list[Path]:
    """model.safetensors alone, as transformers would load it, else shards of that name. Repositories keep the
    same weights a second time under other names (Mistral's consolidated.safetensors): those count only where
    they are all there is. None where some of their number are missing, as after half a download."""
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    numbers = [re.search(r"-of-0*(\d+)\.safetensors$", file.name) for file in files]
    return [] if any(of and int(of[1]) > len(files) for of in numbers) else files


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
    source: str,
    tensors: Mapping[str, _Tensor],
    config: PreTrainedConfig,
    quantisation: Mapping[str, Any] | None,
) -> Weights:
    if getattr(config, "tie_word_embeddings", False):
        tensors = without_tied_output(tensors)
    weights = _summary(source, tensors, config)
    if quantisation is None:
        return weights
    # Quantised formats pack several numbers into an element, and keep scales beside them.
    counted = _count(config, None)
    return replace(
        weights,
        parameters=counted.parameters,
        expert_parameters=counted.expert_parameters,
        unread_parameters=counted.unread_parameters,
        quantisation=method_of(quantisation),
    )


def _summary(source: str, tensors: Mapping[str, _Tensor], config: PreTrainedConfig) -> Weights:
    elements = {name: tensor.elements for name, tensor in tensors.items()}
    sizes = {name: tensor.size for name, tensor in tensors.items() if tensor.size is not None}
    of = parts(tensors, getattr(config.get_text_config(decoder=True), "num_hidden_layers", None))
    weights = Weights(
        source,
        parameters=sum(elements.values()),
        expert_parameters=total(elements, of, Part.EXPERT),
        unread_parameters=total(elements, of, *UNREAD),
        unread=tuple(part.value for part in UNREAD if part in of.values()),
    )
    if source == "config":
        packed = {name: elements[name] for name in sizes}
        return replace(
            weights,
            packed_parameters=sum(packed.values()),
            packed_bytes=sum(sizes.values()),
            packed_expert_parameters=total(packed, of, Part.EXPERT),
            packed_expert_bytes=total(sizes, of, Part.EXPERT),
            packed_unread_parameters=total(packed, of, *UNREAD),
            packed_unread_bytes=total(sizes, of, *UNREAD),
        )
    return replace(
        weights,
        stored_bytes=sum(sizes.values()),
        stored_expert_bytes=total(sizes, of, Part.EXPERT),
        stored_unread_bytes=total(sizes, of, *UNREAD),
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
        return config, _count(config, quantisation)
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
