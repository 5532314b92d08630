"""The embedded default model's tokens, against llama.cpp's own for the same file."""

from __future__ import annotations

import json
from pathlib import Path

from model_runner.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden_smollm.json").read_text(encoding="utf-8"))


def test_every_text_has_the_tokens_that_llama_cpp_gives_it(default_tokenizer: Tokenizer) -> None:
    assert len(GOLDEN["cases"]) >= 300
    wrong = [
        text
        for text, ids in GOLDEN["cases"]
        if default_tokenizer.encode(text, add_special_tokens=False) != ids
    ]
    assert wrong == []


def test_every_text_comes_back_from_its_tokens(default_tokenizer: Tokenizer) -> None:
    for text, ids in GOLDEN["cases"]:
        assert default_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_cases_tell_digits_apart(default_tokenizer: Tokenizer) -> None:
    """Without the split of digits that the file asks for, many of the texts would have other tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    without = default_tokenizer._backend.__class__.from_str(default_tokenizer._backend.to_str())
    without.pre_tokenizer = ByteLevel(add_prefix_space=False)
    differing = [text for text, ids in GOLDEN["cases"] if without.encode(text).ids != ids]
    assert differing
