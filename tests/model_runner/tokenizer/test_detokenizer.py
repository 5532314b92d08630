from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_runner.tokenizer import IncrementalDetokenizer, Tokenizer
from model_runner.tokenizer.gguf import define

texts = st.text(max_size=60) | st.text(
    alphabet="aé \n日本한국🙂🏽👨‍👩‍👧e\u0301\u0302क्षि\U0001f1e9\U0001f1ea", max_size=40
)
cut_lists = st.lists(st.integers(0, 1000), max_size=12)
pure = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def in_pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    return [ids[a:b] for a, b in pairwise(edges)]


def stream(tokenizer: Tokenizer, pieces: list[list[int]], **options: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()]


@given(text=texts, cuts=cut_lists)
@pure
def test_pieces_join_to_the_text(default_tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = default_tokenizer.encode(text)
    # The model has no token for a few bytes, of control characters and unassigned ones.
    text = text.encode().translate(None, delete=default_tokenizer._unwritable).decode(errors="replace")
    pieces = stream(default_tokenizer, in_pieces(ids, cuts), skip_special_tokens=False)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


@given(ids=st.lists(st.integers(0, 49_200), max_size=40), cuts=cut_lists, skip=st.booleans())
@pure
def test_any_tokens_in_any_pieces_join_to_what_decode_gives(
    default_tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    pieces = stream(default_tokenizer, in_pieces(ids, cuts), begins_text=True, skip_special_tokens=skip)
    assert "".join(pieces) == default_tokenizer.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 49_151), max_size=40), skip=st.booleans())
@pure
def test_decode_equals_the_library_s(default_tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    expected = default_tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert default_tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_a_character_of_several_tokens_comes_out_whole(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("🦙")
    assert len(ids) > 1
    pieces = stream(default_tokenizer, [[id_] for id_ in ids])
    assert [piece for piece in pieces if piece] == ["🦙"]


def test_a_character_that_is_never_completed_shows_at_the_end(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("ok 🦙")[:-1]
    *pushed, flushed = stream(default_tokenizer, [ids])
    assert "".join(pushed) == "ok "
    assert flushed == "\ufffd"


def test_special_tokens_are_left_out_unless_asked_for(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("hi<|im_end|>")
    assert "".join(stream(default_tokenizer, [ids])) == "hi"
    assert "".join(stream(default_tokenizer, [ids], skip_special_tokens=False)) == "hi<|im_end|>"


class TestSentencePiece:
    @pytest.fixture
    def tokenizer(self, sentence_piece: Callable[[], dict[str, Any]]) -> Tokenizer:
        fields = sentence_piece()
        return Tokenizer(define({f"tokenizer.ggml.{key}": value for key, value in fields.items()}))

    @given(text=texts, cuts=cut_lists)
    @pure
    def test_pieces_join_to_the_text(self, tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        # U+2581 is how this kind of vocabulary writes a space, so it can't be told from one.
        expected = text.replace("▁", " ")
        assert "".join(stream(tokenizer, in_pieces(ids, cuts), begins_text=True)) == expected
        assert tokenizer.decode(ids) == expected

    def test_the_first_space_is_the_text_s_own_after_a_prompt(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("hello", add_special_tokens=False)
        assert [tokenizer.token_text(id_) for id_ in ids] == [" hello"]
        assert "".join(stream(tokenizer, [ids])) == " hello"
        assert "".join(stream(tokenizer, [ids], begins_text=True)) == "hello"

    def test_only_the_artificial_space_is_dropped(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("  hello", add_special_tokens=True)
        assert "".join(stream(tokenizer, [[id_] for id_ in ids], begins_text=True)) == "  hello"

    def test_bytes_wait_for_the_rest_of_their_character(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("é", add_special_tokens=False)
        assert [tokenizer.token_bytes(id_) for id_ in ids] == [b" ", b"\xc3", b"\xa9"]
        assert stream(tokenizer, [[id_] for id_ in ids], begins_text=True) == ["", "", "é", ""]
