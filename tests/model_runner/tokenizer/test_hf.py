from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from model_runner.errors import ModelNotServable
from model_runner.model_files import ModelFiles
from model_runner.tokenizer import Tokenizer, load_tokenizer
from model_runner.tokenizer.hf import read_definition
from model_runner.tokenizer.token_bytes import byte_alphabet

MESSAGES = [{"role": "user", "content": "x"}]


def write(directory: Path, name: str, value: Any) -> None:
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    vocabulary = {character: id_ for id_, character in enumerate(byte_alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>"), AddedToken("<|eot|>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    return tmp_path


def load(directory: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles("hf", directory, directory / "cache"))


def test_special_tokens_and_text(directory: Path) -> None:
    tokenizer = load(directory)
    assert tokenizer.bos_token_id == 256
    assert tokenizer.special_token_ids == {256, 257, 258}
    assert tokenizer.decode(tokenizer.encode("<s>naïve</s>")) == "naïve"


def test_special_tokens_from_the_older_file(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()
    write(directory, "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    assert load(directory).bos_token_id == 256


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({}, {}, (257,)),
        ({"eos_token_id": [258, 257]}, {}, (257, 258)),
        ({"eos_token_id": 258}, {"eos_token_id": 3}, (257, 258)),
        ({}, {"eos_token_id": 258}, (257, 258)),
        ({}, {"text_config": {"eos_token_id": [258]}}, (257, 258)),
    ],
)
def test_tokens_that_end_a_generation(
    directory: Path, generation: dict[str, Any], config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    write(directory, "generation_config.json", generation)
    write(directory, "config.json", config)
    assert load(directory).eos_token_ids == expected


def test_it_encodes_as_transformers_does(directory: Path) -> None:
    """Also what only tokenizer_config.json declares; but its flag for BOS, tokenizer.json overrules."""
    from transformers import PreTrainedTokenizerFast

    write(
        directory,
        "tokenizer_config.json",
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "q",
            "add_bos_token": True,
            "added_tokens_decoder": {
                "258": {"content": "<|eot|>", "special": True},
                "259": {"content": "<tool>", "special": False, "normalized": False, "rstrip": True},
            },
        },
    )
    reference = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer = load(directory)
    for text in ("a", "<s>a</s>", "x<tool>  y", "aqa <|eot|>", "naïve 日本"):
        assert tokenizer.encode(text) == reference(text)["input_ids"], text
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True), text
    assert tokenizer.encode("<tool>") == [259]


def test_a_declared_token_must_have_its_declared_id(directory: Path) -> None:
    declared = {"added_tokens_decoder": {"300": {"content": "<tool>", "special": False}}}
    write(directory, "tokenizer_config.json", declared)
    with pytest.raises(ModelNotServable, match="<tool>"):
        load(directory)


def test_the_template_file_comes_first(directory: Path) -> None:
    config = {"bos_token": "<s>", "chat_template": "config"}
    write(directory, "tokenizer_config.json", config)
    assert load(directory).apply_chat_template(MESSAGES) == "config"
    write(directory, "chat_template.jinja", "{{ bos_token }}file")
    assert load(directory).apply_chat_template(MESSAGES) == "<s>file"


def test_of_several_templates_the_default_one(directory: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write(directory, "tokenizer_config.json", {"chat_template": templates})
    assert load(directory).apply_chat_template(MESSAGES) == "plain"


def test_a_directory_without_a_template(directory: Path) -> None:
    assert not load(directory).has_chat_template


def test_only_a_sentencepiece_model_is_refused_with_what_to_do(directory: Path) -> None:
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")
    with pytest.raises(ModelNotServable, match="save_pretrained"):
        read_definition(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_spoilt_file_is_named(directory: Path, name: str) -> None:
    write(directory, name, "{not json")
    with pytest.raises(ModelNotServable, match=name):
        read_definition(directory)
