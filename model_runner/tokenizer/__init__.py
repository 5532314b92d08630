"""Text to token ids and back, chat templates, and stop strings: the API process's share of a model.

`tokenizers` and a sandboxed `jinja2` do the work; nothing here imports torch or transformers.
"""

from __future__ import annotations

from model_runner.tokenizer.chat_template import ChatTemplate
from model_runner.tokenizer.definition import TokenizerDefinition
from model_runner.tokenizer.detokenizer import IncrementalDetokenizer
from model_runner.tokenizer.load import load_tokenizer
from model_runner.tokenizer.stop_strings import StopResult, StopStringMatcher
from model_runner.tokenizer.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "StopResult",
    "StopStringMatcher",
    "Tokenizer",
    "TokenizerDefinition",
    "load_tokenizer",
]
