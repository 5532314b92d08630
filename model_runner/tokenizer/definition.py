"""What a model's files say about its tokenizer, whatever their format: the one input of `Tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class TokenizerDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """Plain data, so that one derived from a large file can be kept and read back fast."""

    backend_json: str  # as `tokenizers.Tokenizer.from_str` reads it
    special_tokens: Mapping[str, str]  # "bos_token", "eos_token", ... to their text; only those that are set
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    chat_template: str | None = None
