"""GGUF files, dequantised once: what is derived from them is kept in the cache folder."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from model_runner.errors import ModelNotServable, StartupError
from model_runner.model_files import file_identity

# What derives them beside our own lines: another version of it may name, shape or round them otherwise.
_DERIVED_BY = ("transformers", "gguf")
# Raised whenever the conversion changes, so that older conversions are not used again.
FORMAT_VERSION = 1


class GGUFCache:
    """What is derived from one GGUF file: its config, and its weights in each dtype that was served."""

    def __init__(self, path: Path, cache_dir: Path) -> None:
        self._path = path
        self._folder = cache_dir / "weights" / f"{file_identity(path)}-v{FORMAT_VERSION}-{_versions()}"

    def read_config(self) -> PreTrainedConfig:
        """The model's config, from the file's metadata (kept: parsing them takes seconds).

        Raises ModelNotServable for an architecture that transformers can't read from GGUF.
        """
        kept = self._folder / "config"
        if not kept.is_dir():
            try:
                config = AutoConfig.from_pretrained(str(self._path.parent), gguf_file=self._path.name)
                config.architectures = [type(_skeleton(config, torch.float32)).__name__]
            except (ValueError, KeyError) as error:
                raise ModelNotServable(f"{self._path.name} can't be served from GGUF: {error}") from error
            _make_folder(kept, config.save_pretrained)
        config = AutoConfig.from_pretrained(str(kept), local_files_only=True)
        assert isinstance(config, PreTrainedConfig)
        return config

    def convert(
        self, config: PreTrainedConfig, dtype: torch.dtype, on_progress: Callable[[float], None]
    ) -> Path:
        """The folder that holds the weights in `dtype`, made now unless it was made before."""
        folder = self._folder / str(dtype).removeprefix("torch.")
        if not folder.is_dir():
            _make_folder(folder, lambda draft: self._convert(config, dtype, draft, on_progress))
        return folder

    def _convert(
        self, config: PreTrainedConfig, dtype: torch.dtype, folder: Path, on_progress: Callable[[float], None]
    ) -> None:
        model = _skeleton(config, dtype)
        with redirect_stderr(_ProgressBar(on_progress)):
            checkpoint = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
                str(self._path), return_tensors=True, model_to_load=model, torch_dtype=dtype
            )
        try:
            save_file(checkpoint["tensors"], folder / "model.safetensors", metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise _unwritable(error) from error
        config.save_pretrained(folder)


def _versions() -> str:
    return "-".join(f"{name}-{version(name)}" for name in _DERIVED_BY)


class _ProgressBar(io.TextIOBase):
    """Turns the progress bar that transformers draws on stderr into fractions; all else goes on to stderr."""

    def __init__(self, on_progress: Callable[[float], None]) -> None:
        self._on_progress = on_progress
        self._stderr = sys.stderr

    def write(self, text: str) -> int:
        if percent := re.search(r"(\d+)%\|", text):
            self._on_progress(int(percent[1]) / 100)
        elif text.strip():
            self._stderr.write(text)
        return len(text)


def _skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return model


def _make_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """`folder` appears whole or not at all. Of two processes that make it at once, one wins and both go on.

    Raises StartupError when the cache can't be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(error) from error
    try:
        fill(draft)
        try:
            os.rename(draft, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _unwritable(error: Exception) -> StartupError:
    return StartupError(
        f"A GGUF model is dequantised once, into the cache folder, which can't be written: {error}. "
        "Name another with --cache-dir."
    )
