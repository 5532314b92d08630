"""From token ids to text, as the ids arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenBytes(Protocol):
    """What the detokenizer needs of a tokenizer."""

    @property
    def strips_leading_space(self) -> bool: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """Turns the tokens of one choice into text, never breaking a UTF-8 sequence that is still to be
    completed.

    A token is a run of bytes, so the text of a sequence is its tokens' bytes, joined and decoded: the pushes
    and the flush join to exactly `tokenizer.decode(ids)`. Each token costs its own bytes and no more, however
    long the text is.

    `begins_text`: the ids are the whole text, so a SentencePiece tokenizer's artificial first space is
    dropped; for ids that continue a prompt (the usual case) that space is a real one.
    """

    def __init__(
        self, tokenizer: TokenBytes, *, begins_text: bool = False, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._strip_space = begins_text and tokenizer.strips_leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete. May be empty: a token can end in the middle of a character."""
        parts = [self._tokenizer.token_bytes(id_) for id_ in token_ids if id_ not in self._skipped]
        return self._decode(b"".join(parts), final=False)

    def flush(self) -> str:
        """What was held back, when no more tokens come: U+FFFD for a character never completed."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._decoder.decode(data, final)
