"""The bytes that each token stands for, worked out from the parts of a `tokenizers` tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
import tokenizers.models

from model_runner.errors import ModelNotServable

SPACE_MARK = "▁"  # SentencePiece writes a space as U+2581
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_LEVEL = frozenset({"ByteLevel"})
_SENTENCE_PIECE = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
_KEEP_ALL_TEXT = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})
# By how much a normalizer can shrink UTF-8. Canonical composition (NFC) makes one Hangul syllable of 3 bytes
# of three jamo of 9, and one Greek letter of 3 bytes of a letter and three accents of 8.
_SHRINKS = {"Replace": 1, "Prepend": 1, "NFC": 4, "ByteLevel": 1}


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes as printable characters, the other way round.

    Bytes that print as themselves in Latin-1 keep their character; the others take U+0100 and up, in order.
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenTable:
    """Bytes of every token id, and which ids are marks."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Raises ModelNotServable for a decoder that does more than join bytes."""
        steps = _steps(backend.decoder, "decoders")
        kinds = {step["type"] for step in steps}
        if not _supported(steps):
            raise ModelNotServable(
                f"The tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported. Plimsoll "
                "serves byte-level BPE and SentencePiece tokenizers."
            )
        self.strips_leading_space = any(_strips_first_space(step) for step in steps)
        spell = _byte_level_bytes if kinds <= _BYTE_LEVEL else _sentence_piece_bytes
        added = backend.get_added_tokens_decoder()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._bytes = [b""] * (max(vocabulary.values(), default=-1) + 1)
        alphabet = byte_alphabet()
        for token, token_id in vocabulary.items():
            self._bytes[token_id] = spell(token, alphabet)
        for token_id, added_token in added.items():
            self._bytes[token_id] = added_token.content.encode()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.swallows_spaces = any(token.lstrip or token.rstrip for token in added.values())

    def __len__(self) -> int:
        return len(self._bytes)

    def bytes_of(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    @property
    def unwritable(self) -> bytes:
        """The bytes that no token is. A vocabulary may lack some that its training text never had."""
        single = {token[0] for token in self._bytes if len(token) == 1}
        return bytes(byte for byte in range(256) if byte not in single)

    @property
    def longest(self) -> int:
        return max(map(len, self._bytes), default=0)


def most_bytes_per_token(backend: tokenizers.Tokenizer, table: TokenTable) -> int:
    """The most bytes of text, unwritable ones aside, that one token can stand for; 0 when unbounded."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return 0
    if model.unk_token is not None and (table.unwritable or not model.byte_fallback):
        return 0  # a run of unknown characters of any length can be one token
    for step in _steps(backend.pre_tokenizer, "pretokenizers"):
        if step["type"] not in _KEEP_ALL_TEXT or step.get("behavior") == "Removed":
            return 0
    factor = 1
    for step in _steps(backend.normalizer, "normalizers"):
        replaced = step.get("pattern", {}).get("String")
        if step["type"] not in _SHRINKS or (step["type"] == "Replace" and replaced != " "):
            return 0
        factor *= _SHRINKS[step["type"]]
    return factor * table.longest


def _steps(component: Any, members: str) -> list[Mapping[str, Any]]:
    """What a decoder, normalizer or pre-tokenizer consists of, as in tokenizer.json, sequences undone."""
    return [] if component is None else list(_flatten(json.loads(component.__getstate__()), members))


def _flatten(step: Mapping[str, Any], members: str) -> Iterator[Mapping[str, Any]]:
    if step["type"] == "Sequence":
        for member in step[members]:
            yield from _flatten(member, members)
    else:
        yield step


def _supported(steps: list[Mapping[str, Any]]) -> bool:
    kinds = {step["type"] for step in steps}
    replacements = [(step["pattern"], step["content"]) for step in steps if step["type"] == "Replace"]
    return bool(kinds) and (
        kinds <= _BYTE_LEVEL
        or (kinds <= _SENTENCE_PIECE and all(pair == ({"String": SPACE_MARK}, " ") for pair in replacements))
    )


def _strips_first_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["start"] > 0)
    return bool(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")


def _byte_level_bytes(token: str, alphabet: Mapping[str, int]) -> bytes:
    spelled = [alphabet.get(character) for character in token]
    return bytes(spelled) if None not in spelled else token.encode()  # type: ignore[arg-type]


def _sentence_piece_bytes(token: str, alphabet: Mapping[str, int]) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()
