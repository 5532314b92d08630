"""GGUF files, dequantised once: a folder of safetensors and config.json in the cache, found again by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from model_runner.errors import ModelNotServable

# Raised whenever the conversion changes, so that older conversions are not used again.
FORMAT_VERSION = 1
_HASH_BUFFER_BYTES = 1 << 20


def read_gguf_config(path: Path) -> PreTrainedConfig:
    """The model's config, from the file's metadata. Raises ModelNotServable for an architecture not known."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    except (ValueError, KeyError) as error:
        raise ModelNotServable(f"{path.name} can't be read as a model: {error}") from error
    return config


def converted_gguf(
    path: Path, config: PreTrainedConfig, dtype: torch.dtype, cache_dir: Path, on_progress: Callable[[float], None]
) -> Path:
    """The folder that holds the file's weights in `dtype`; made now if it is not in the cache yet.

    The name carries the file's SHA-256, so another file under the same path is another folder. It appears whole or
    not at all: two servers that start at once both convert, and one of them wins.
    """
    name = f"{_sha256(path)}-{str(dtype).removeprefix('torch.')}-v{FORMAT_VERSION}"
    folder = cache_dir / "weights" / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name[:12]}-", dir=folder.parent))
    try:
        _convert(path, config, dtype, draft)
        on_progress(1.0)
        try:
            os.rename(draft, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _convert(path: Path, config: PreTrainedConfig, dtype: torch.dtype, folder: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    checkpoint = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model, torch_dtype=dtype)
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint["tensors"].items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_BUFFER_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
