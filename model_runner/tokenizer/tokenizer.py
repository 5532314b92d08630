"""A model's tokenizer, as the API process needs it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from model_runner.errors import InvalidRequest
from model_runner.tokenizer.chat_template import ChatTemplate
from model_runner.tokenizer.definition import TokenizerDefinition
from model_runner.tokenizer.detokenizer import IncrementalDetokenizer
from model_runner.tokenizer.token_bytes import TokenTable, most_bytes_per_token

_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """Safe to use from several threads at once; encoding releases the interpreter lock.

    Text that spells a special token ("<|im_end|>") is read as that token, in prompts and in messages, as the
    field's servers do: whoever puts untrusted text in a prompt has to know it.
    """

    def __init__(self, definition: TokenizerDefinition) -> None:
        """Raises ModelNotServable for a kind of tokenizer whose tokens are not runs of bytes."""
        self._backend = tokenizers.Tokenizer.from_str(definition.backend_json)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._table = TokenTable(self._backend)
        self._most_bytes_per_token = most_bytes_per_token(self._backend, self._table)
        self._unwritable = self._table.unwritable
        self._special_tokens = dict(definition.special_tokens)
        self._eos_token_ids = definition.eos_token_ids
        self._chat_template = (
            None
            if definition.chat_template is None
            else ChatTemplate(definition.chat_template, self._special_tokens)
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id. The model's own vocabulary may be padded beyond it."""
        return len(self._table)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Any of them ends a generation."""
        return self._eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        token = self._special_tokens.get("bos_token")
        return None if token is None else self._backend.token_to_id(token)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that are marks rather than text: left out of what a client reads."""
        return self._table.special_ids

    @property
    def strips_leading_space(self) -> bool:
        """A text's first token carries a space that is not part of the text (SentencePiece)."""
        return self._table.strips_leading_space

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens`: put the marks around it that the model knows (usually a first BOS).

        Half a surrogate pair, which JSON can spell and UTF-8 can't, is read as U+FFFD.
        """
        if _SURROGATE.search(text):
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_prompt(self, text: str) -> list[int]:
        """A prompt of /v1/completions."""
        return self.encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation of /v1/chat/completions. The template writes its own marks, so none are added a
        second time.

        Raises InvalidRequest as `apply_chat_template` does.
        """
        return self.encode(self.apply_chat_template(messages), add_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """`messages` as the model's own template writes them. `variables` are further names the template may
        read.

        Raises InvalidRequest when the model has no template, or its template refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidRequest(
                "This model has no chat template, so it cannot take messages. Send text to /v1/completions "
                "instead.",
                param="messages",
            )
        return self._chat_template.render(messages, variables, add_generation_prompt=add_generation_prompt)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Bytes that are no UTF-8 become U+FFFD."""
        whole = IncrementalDetokenizer(self, begins_text=True, skip_special_tokens=skip_special_tokens)
        return whole.push(token_ids) + whole.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text; none for an id beyond the vocabulary."""
        return self._table.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """One token alone, for people to read: U+FFFD stands for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def min_token_count(self, text: str) -> int:
        """A lower bound on `len(encode(text))`, far cheaper than encoding: no token stands for more bytes
        than the longest.

        0 where the tokenizer's normalisation makes no such bound possible. It lets an absurdly long prompt be
        refused before the work of tokenising it.
        """
        if self._most_bytes_per_token == 0:
            return 0
        counted = "".join(text.split()) if self._table.swallows_spaces else text
        data = counted.encode("utf-8", errors="replace").translate(None, delete=self._unwritable)
        return -(-len(data) // self._most_bytes_per_token)
