"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path

from model_runner.tokenizer.definition import TokenizerDefinition


def load_definition(path: Path, cache_dir: Path) -> TokenizerDefinition:
    raise NotImplementedError
