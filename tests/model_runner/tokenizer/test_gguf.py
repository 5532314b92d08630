"""Tokenizers from GGUF files written with the `gguf` package's own writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from model_runner.errors import ModelNotServable
from model_runner.model_files import ModelFiles
from model_runner.tokenizer import Tokenizer, load_tokenizer
from model_runner.tokenizer.gguf import load_definition
from model_runner.tokenizer.gguf_metadata import read_metadata
from model_runner.tokenizer.pre_tokenizers import word_split

WriteGGUF = Callable[..., Path]
Fields = Callable[..., dict[str, Any]]


def load(path: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles("gguf", path, path.parent / "cache"))


def spell(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[str]:
    return [tokenizer.token_text(id_) for id_ in tokenizer.encode(text, add_special_tokens)]


class TestMetadata:
    def test_it_reads_what_the_gguf_package_reads(self, default_files: ModelFiles) -> None:
        ours = read_metadata(default_files.path)
        theirs = gguf.GGUFReader(default_files.path).fields
        assert ours.keys() == {key for key in theirs if not key.startswith("GGUF.")}
        for key in ours:
            if key not in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):  # theirs are slow to read
                assert ours[key] == theirs[key].contents(), key
        assert len(ours["tokenizer.ggml.tokens"]) == 49152
        assert len(ours["tokenizer.ggml.merges"]) == 48900

    @pytest.mark.parametrize(
        "content", [b"", b"GG", b"not a model at all", b"GGUF\x00\x00\x00\x03" + b"\x00" * 20]
    )
    def test_a_file_of_another_kind_is_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "x.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelNotServable, match=r"x\.gguf is not a GGUF file"):
            read_metadata(path)

    def test_every_way_of_cutting_a_file_short_is_refused(
        self, tmp_path: Path, write_gguf: WriteGGUF
    ) -> None:
        whole = write_gguf({"model": "gpt2", "tokens": ["a", "b"], "token_type": [1, 1]}).read_bytes()
        header = whole.rstrip(b"\0")
        for size in range(1, len(header) - 4):
            path = tmp_path / "cut.gguf"
            path.write_bytes(header[:size])
            with pytest.raises(ModelNotServable):
                read_metadata(path)

    def test_an_absurd_count_is_refused_without_taking_memory(self, tmp_path: Path) -> None:
        key = b"\x01\0\0\0\0\0\0\0k" + (9).to_bytes(4, "little") + (4).to_bytes(4, "little")
        path = tmp_path / "x.gguf"
        path.write_bytes(
            b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little") + key + b"\xff" * 8
        )
        with pytest.raises(ModelNotServable):
            read_metadata(path)


class TestByteLevel:
    def test_bytes_merge_and_marks_stay_whole(self, write_gguf: WriteGGUF, byte_level: Fields) -> None:
        tokenizer = load(write_gguf(byte_level()))
        assert spell(tokenizer, "abcab<|im_end|>d") == ["abc", "ab", "<|im_end|>", "d"]
        assert tokenizer.decode(tokenizer.encode("über 日本<|im_end|>")) == "über 日本"

    def test_a_user_defined_token_comes_before_words(self, write_gguf: WriteGGUF, byte_level: Fields) -> None:
        tokenizer = load(write_gguf(byte_level()))
        assert spell(tokenizer, "a  b") == ["a", "  ", "b"]
        assert tokenizer.decode(tokenizer.encode("a  b")) == "a  b"

    @pytest.mark.parametrize(
        ("pre", "flags", "expected"),
        [
            ("gpt-2", {}, ["a"]),
            ("gpt-2", {"add_bos_token": True}, ["<|start|>", "a"]),
            ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ["<|start|>", "a", "<|im_end|>"]),
            ("llama-bpe", {}, ["<|start|>", "a"]),
            ("llama-bpe", {"add_bos_token": False}, ["a"]),
        ],
    )
    def test_the_bos_and_eos_flags(
        self, write_gguf: WriteGGUF, byte_level: Fields, pre: str, flags: dict[str, bool], expected: list[str]
    ) -> None:
        tokenizer = load(write_gguf(byte_level(pre) | flags))
        assert spell(tokenizer, "a", add_special_tokens=True) == expected
        assert spell(tokenizer, "a", add_special_tokens=False) == ["a"]

    def test_a_template_that_writes_bos_itself_gets_no_second_one(
        self, write_gguf: WriteGGUF, byte_level: Fields
    ) -> None:
        path = write_gguf(
            byte_level() | {"add_bos_token": True}, chat_template="{{ bos_token }}{{ messages[0].content }}"
        )
        tokenizer = load(path)
        ids = tokenizer.encode_chat([{"role": "user", "content": "a"}])
        assert [tokenizer.token_text(id_) for id_ in ids] == ["<|start|>", "a"]

    def test_tokens_that_end_a_turn(self, write_gguf: WriteGGUF, byte_level: Fields) -> None:
        tokenizer = load(write_gguf(byte_level() | {"eos_token_id": 65}))
        assert tokenizer.eos_token_ids == (65, 259)  # the one stated, and <|im_end|>

    def test_an_unknown_pre_tokenizer_is_refused_by_name(
        self, write_gguf: WriteGGUF, byte_level: Fields
    ) -> None:
        with pytest.raises(ModelNotServable, match=r"'brand-new'.*smollm"):
            load(write_gguf(byte_level("brand-new")))

    def test_a_file_that_names_no_pre_tokenizer_is_refused(
        self, write_gguf: WriteGGUF, byte_level: Fields
    ) -> None:
        with pytest.raises(ModelNotServable, match="pre-tokenizer"):
            load(write_gguf(byte_level(None)))

    @pytest.mark.parametrize("missing", ["tokens", "merges", "token_type"])
    def test_missing_metadata_is_named(self, write_gguf: WriteGGUF, byte_level: Fields, missing: str) -> None:
        fields = byte_level()
        del fields[missing]
        with pytest.raises(ModelNotServable, match=missing):
            load(write_gguf(fields))

    def test_another_kind_of_tokenizer_is_refused_by_name(self, write_gguf: WriteGGUF) -> None:
        with pytest.raises(ModelNotServable, match="'t5'"):
            load(write_gguf({"model": "t5", "tokens": ["a"]}))


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'm  12345 €5", ["I", "'m", " ", " 12345", " €", "5"]),
        ("smollm", "I'm 123", ["I", "'m", " ", "1", "2", "3"]),
        ("llama-bpe", "I'M 12345\n\n x", ["I", "'M", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "a12 b", ["a", "1", "2", " b"]),
        ("deepseek-v3", "x1234中文y", ["x", "123", "4", "中文", "y"]),
        ("deepseek-coder", "a\nb 12", ["a", "\n", "b", " ", "1", "2"]),
        ("falcon", "a 12345", ["a", " ", "123", "45"]),
        ("tekken", "fooBar12", ["foo", "Bar", "1", "2"]),
        ("gpt-4o", "fooBar's 1234", ["foo", "Bar's", " ", "123", "4"]),
        ("bloom", "one, two", ["one", ",", " two"]),
    ],
)
def test_words_are_cut_as_the_name_says(pre: str, text: str, words: list[str]) -> None:
    pieces = word_split(pre).pre_tokenizer().pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in pieces] == words


class TestSentencePiece:
    def test_pieces_join_best_score_first(self, write_gguf: WriteGGUF, sentence_piece: Fields) -> None:
        tokenizer = load(write_gguf(sentence_piece()))
        assert spell(tokenizer, "hello hell") == [" hello", " hell"]
        assert spell(tokenizer, "hel") == [" ", "he", "l"]

    def test_bos_is_added_unless_the_file_says_otherwise(
        self, write_gguf: WriteGGUF, sentence_piece: Fields
    ) -> None:
        with_bos = load(write_gguf(sentence_piece(), "with.gguf"))
        assert spell(with_bos, "hello", True) == ["<s>", " hello"]
        without = load(write_gguf(sentence_piece() | {"add_bos_token": False}, "without.gguf"))
        assert spell(without, "hello", True) == [" hello"]
        assert with_bos.eos_token_ids == (2,)

    def test_the_space_prefix_flag(self, write_gguf: WriteGGUF, sentence_piece: Fields) -> None:
        tokenizer = load(write_gguf(sentence_piece() | {"add_space_prefix": False}))
        assert spell(tokenizer, "hello hello") == ["hell", "o", " hello"]
        assert not tokenizer.strips_leading_space
        assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"

    def test_phi_3_s_marks_swallow_the_space_after_them(
        self, write_gguf: WriteGGUF, sentence_piece: Fields
    ) -> None:
        tokenizer = load(write_gguf(sentence_piece() | {"add_space_prefix": False}, "p.gguf"))
        assert spell(tokenizer, "</s>  hello") == ["</s>", " ", " hello"]
        phi3 = load(write_gguf(sentence_piece() | {"add_space_prefix": False}, "q.gguf", name="Phi-3-mini"))
        assert spell(phi3, "</s>  hello") == ["</s>", "hell", "o"]
        assert phi3.min_token_count("</s>" + " " * 1000) <= 1


class TestCache:
    def test_the_second_load_reads_the_derived_tokenizer(
        self, write_gguf: WriteGGUF, byte_level: Fields, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_gguf(byte_level())
        first = load_definition(path, path.parent / "cache")
        monkeypatch.setattr(
            "model_runner.tokenizer.gguf.define", lambda metadata: pytest.fail("derived again")
        )
        second = load_definition(path, path.parent / "cache")
        assert (second.special_tokens, second.eos_token_ids) == (first.special_tokens, first.eos_token_ids)
        assert json.loads(second.backend_json) == json.loads(first.backend_json)

    def test_another_file_under_the_same_name_is_derived_anew(
        self, write_gguf: WriteGGUF, byte_level: Fields
    ) -> None:
        assert spell(load(write_gguf(byte_level("gpt-2"))), "12") == ["1", "2"]
        fields = byte_level("gpt-2")
        fields["tokens"][fields["tokens"].index("ab")] = "12"
        fields["tokens"][fields["tokens"].index("abc")] = "123"
        fields["merges"] = ["1 2", "12 3"]
        assert spell(load(write_gguf(fields)), "12") == ["12"]

    def test_a_spoilt_cache_is_derived_again(
        self, write_gguf: WriteGGUF, byte_level: Fields, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write_gguf(byte_level())
        load(path)
        (kept,) = (path.parent / "cache" / "tokenizers").iterdir()
        kept.write_bytes(kept.read_bytes()[:-10])
        assert spell(load(path), "abc") == ["abc"]
        assert "derived again" in caplog.text
        assert spell(load(path), "abc") == ["abc"]
