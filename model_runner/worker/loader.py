"""From a model's files to a transformers model in memory: its config first, its weights later."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from model_runner.core.weights import WeightsRead
from model_runner.errors import DoesNotFit, ModelNotServable
from model_runner.model_files import ModelFiles
from model_runner.tokenizer.gguf import load_definition
from model_runner.worker.gguf_cache import GGUFCache
from model_runner.worker.model_config import UNREADABLE, dtype_of, reason_of
from model_runner.worker.weight_parts import weights_read

logger = logging.getLogger(__name__)

# Where checkpoints of models that do more than text keep the weights of the text decoder.
_DECODER_NAMES = {r"^model\.language_model\.": "model.", r"^language_model\.": ""}

OnProgress = Callable[[str, float], None]  # stage, fraction


@dataclass(frozen=True, slots=True)
class Source:
    """A model whose config has been read. `config` is of its text decoder alone."""

    config: PreTrainedConfig
    gguf: GGUFCache | None
    folder: Path | None  # of safetensors; None until a GGUF is converted
    eos_token_ids: tuple[int, ...]
    nested: bool = False  # the decoder is one part of what the folder holds (images, speech …)

    @property
    def architecture(self) -> str:
        return (self.config.architectures or [self.config.model_type])[0]

    @property
    def context(self) -> int | None:
        return served_context(self.config)


def served_context(config: PreTrainedConfig) -> int | None:
    """The longest sequence that a decoder computes rightly, in tokens, when its config says so.

    That is what the model was made for, but with `longrope` only up to the length it was first trained at:
    beyond that, transformers rotates a sequence otherwise in a batch than alone.
    """
    declared: int | None = getattr(config, "max_position_embeddings", None)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    original: int | None = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and original and declared:
        return min(original, declared)
    return declared


def read_source(files: ModelFiles) -> Source:
    """Read the config, from local files only. Raises ModelNotServable when there is none to be served."""
    if files.kind == "gguf":
        gguf = GGUFCache(files.path, Path(files.cache_dir))
        config = gguf.read_config()
        # A file seldom names every token that ends a turn; its vocabulary tells the rest.
        of_vocabulary = load_definition(files.path, files.cache_dir).eos_token_ids
        eos_token_ids = tuple(sorted({*_eos_token_ids(config, None), *of_vocabulary}))
        return Source(config, gguf, None, eos_token_ids)
    try:
        # Unless it is told no, transformers asks on stdin whether code that comes with a model may run.
        whole = AutoConfig.from_pretrained(str(files.path), local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise ModelNotServable(
            f"{files.path} holds no model config that transformers can read: {error}"
        ) from error
    if getattr(whole, "quantization_config", None):
        method = dict(whole.quantization_config).get("quant_method", "unknown")
        raise ModelNotServable(
            f"The weights in {files.path} are quantised ({method}), which is not supported: use the model in "
            "bfloat16 or float32, or a .gguf file, which is dequantised."
        )
    config = whole.get_text_config(decoder=True)
    config.dtype = dtype_of(whole)
    eos_token_ids = _eos_token_ids(config, files.path)
    return Source(config, None, files.path, eos_token_ids, nested=config is not whole)


def _eos_token_ids(config: PreTrainedConfig, folder: Path | None) -> tuple[int, ...]:
    """Where generation stops: what generation_config.json says, if there is one, else the model's config."""
    declared: Any = config.eos_token_id
    if folder is not None and (folder / "generation_config.json").exists():
        generation = json.loads((folder / "generation_config.json").read_text())
        declared = generation.get("eos_token_id", declared)
    if declared is None:
        return ()
    return tuple(declared) if isinstance(declared, list) else (declared,)


def weights(model: nn.Module) -> tuple[WeightsRead, int]:
    """What the weights of a `skeleton` will take, tied ones counted once; and how many numbers they are."""
    return weights_read(model), sum(parameter.numel() for parameter in model.parameters())


def skeleton(config: PreTrainedConfig, dtype: torch.dtype, auto: Any = AutoModelForCausalLM) -> nn.Module:
    """The model without its weights. Raises ModelNotServable when transformers has no such model for it."""
    try:
        with torch.device("meta"):
            model: nn.Module = auto.from_config(config, dtype=dtype, trust_remote_code=False)
    except (*UNREADABLE, RuntimeError, ImportError) as error:
        raise ModelNotServable(
            f"transformers has no causal language model for {config.model_type!r}: {reason_of(error)}"
        ) from error
    model.tie_weights()  # type: ignore[operator]
    return model


def load_model(
    source: Source, dtype: torch.dtype, device: torch.device, on_progress: OnProgress
) -> nn.Module:
    """The model with its weights, ready for inference. A GGUF is converted first, if it was not yet.

    Raises ModelNotServable when the files lack weights that the model needs, DoesNotFit when the device has
    no room for them.
    """
    folder = source.folder
    if source.gguf is not None:
        folder = source.gguf.convert(source.config, dtype, partial(on_progress, "converting the GGUF file"))
    assert folder is not None
    try:
        with _weights_progress(partial(on_progress, "reading weights")):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                config=source.config,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                key_mapping=_DECODER_NAMES if source.nested else None,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotServable(f"The weights in {folder} can't be loaded: {error}") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ModelNotServable(f"{folder} lacks {len(missing)} of the model's weights, such as {missing[0]}.")
    if unexpected := sorted(report["unexpected_keys"]):
        logger.info("%d tensors of the checkpoint are not used, such as %s", len(unexpected), unexpected[0])
    try:
        ready: nn.Module = model.eval().requires_grad_(False).to(device)
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(f"The weights don't fit into the memory of {device}: {error}") from error
    return ready


@contextmanager
def _weights_progress(on_fraction: Callable[[float], None]) -> Iterator[None]:
    """Report transformers' loading instead of letting it draw its own progress bar."""

    def watch(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        items = args[0] if args else options["iterable"]
        total = options.get("total") or len(items)
        return _reported(items, total, on_fraction)

    transformers_logging.set_tqdm_hook(watch)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(None)


def _reported(items: Any, total: int, on_fraction: Callable[[float], None]) -> Iterator[Any]:
    for number, item in enumerate(items, 1):
        yield item
        on_fraction(number / total)
