"""What a model's files say about its tokenizer, whatever their format: the one input of `Tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import tokenizers
from tokenizers import processors


class TokenizerDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """Plain data, so that one derived from a large file can be kept and read back fast."""

    backend_json: str  # as `tokenizers.Tokenizer.from_str` reads it
    special_tokens: Mapping[str, str]  # "bos_token", "eos_token", ... to their text; only those that are set
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    chat_template: str | None = None


def add_bos_and_eos(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `encode` put these tokens, where given, first and last."""
    marks = dict.fromkeys(token for token in (bos, eos) if token is not None)
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])],
        pair="$A $B",
        special_tokens=[(token, backend.token_to_id(token)) for token in marks],
    )
