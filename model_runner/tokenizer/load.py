"""From a model's files to its tokenizer."""

from __future__ import annotations

from model_runner.model_files import ModelFiles
from model_runner.tokenizer import gguf, hf
from model_runner.tokenizer.tokenizer import Tokenizer


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Raises ModelNotServable for a tokenizer that can't be reproduced exactly."""
    definition = (
        gguf.load_definition(files.path, files.cache_dir)
        if files.kind == "gguf"
        else hf.read_definition(files.path)
    )
    return Tokenizer(definition)
