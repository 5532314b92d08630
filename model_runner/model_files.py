"""Where a model's files are: a directory, a .gguf file, a hub id, or the embedded default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ModelKind = Literal["hf", "gguf"]


@dataclass(frozen=True)
class ModelFiles:
    kind: ModelKind
    path: Path  # a directory (hf) or a file (gguf)
    name: str  # what the model is served as unless --served-model-name says otherwise
    cache_dir: Path  # for what is derived from the files


def resolve(
    model: str, cache_dir: str | Path, on_progress: Callable[[str, float], None] | None = None
) -> ModelFiles:
    """`model` as in EngineConfig; "" is the embedded default. Raises StartupError saying what to do."""
    raise NotImplementedError
