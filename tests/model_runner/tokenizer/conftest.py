"""Tokenizers for the tests: the embedded default model's, and small ones written as files on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from model_runner.model_files import ModelFiles, resolve
from model_runner.tokenizer import Tokenizer, load_tokenizer
from model_runner.tokenizer.token_bytes import byte_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

WriteGGUF = Callable[..., Path]


@pytest.fixture(scope="session")
def default_files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve("", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def default_tokenizer(default_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(default_files)


def byte_level_fields(pre: str | None = "gpt-2") -> dict[str, Any]:
    """256 bytes, two merges, two marks and a token of two spaces that is found before anything else."""
    tokens = [*byte_alphabet(), "ab", "abc", "<|start|>", "<|im_end|>", "  "]
    fields: dict[str, Any] = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [NORMAL] * 258 + [CONTROL, CONTROL, USER_DEFINED],
        "merges": ["a b", "ab c"],
        "bos_token_id": tokens.index("<|start|>"),
        "eos_token_id": tokens.index("<|im_end|>"),
    }
    return fields if pre is None else fields | {"pre": pre}


def sentence_piece_fields() -> dict[str, Any]:
    """Unknown, BOS, EOS, 256 bytes, and a few pieces whose scores say in which order they join."""
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "▁hell", "▁hello"]
    return {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)],
        "scores": [0.0] * 259 + [float(-rank) for rank in range(len(pieces))],
    }


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """Writes tokenizer fields (without "tokenizer.ggml.") with the `gguf` package's own writer."""

    def write(fields: dict[str, Any], file: str = "tiny.gguf", **general: str) -> Path:
        writer = gguf.GGUFWriter(tmp_path / file, "llama")
        for key, value in general.items():
            if key == "chat_template":
                writer.add_chat_template(value)
            else:
                writer.add_string(f"general.{key}", value)
        for key, value in fields.items():
            full = f"tokenizer.ggml.{key}"
            if isinstance(value, bool):
                writer.add_bool(full, value)
            elif isinstance(value, int):
                writer.add_uint32(full, value)
            elif isinstance(value, str):
                writer.add_string(full, value)
            else:
                writer.add_array(full, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / file

    return write


@pytest.fixture
def byte_level() -> Callable[..., dict[str, Any]]:
    return byte_level_fields


@pytest.fixture
def sentence_piece() -> Callable[[], dict[str, Any]]:
    return sentence_piece_fields
