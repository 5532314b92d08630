"""A tokenizer from a directory in Hugging Face's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from model_runner.errors import ModelNotServable
from model_runner.model_files import without_tokenizer_json
from model_runner.tokenizer.definition import TokenizerDefinition

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def read_definition(directory: Path) -> TokenizerDefinition:
    """From tokenizer.json and its neighbours. Raises ModelNotServable when it is missing or can't be read."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelNotServable(without_tokenizer_json(directory))
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for anything it can't read
        raise ModelNotServable(f"{path} is not a tokenizer that can be read: {error}") from error
    config = _read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(config, _read_json(directory / "special_tokens_map.json"))
    _add_missing_tokens(backend, config, special_tokens)
    return TokenizerDefinition(
        backend_json=backend.to_str(),
        special_tokens=special_tokens,
        eos_token_ids=_eos_token_ids(directory, backend, special_tokens),
        chat_template=_chat_template(directory, config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """An absent file says nothing."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotServable(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelNotServable(f"{path} is not a JSON object.")
    return value


def _special_tokens(config: dict[str, Any], legacy_map: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name, legacy_map.get(name))
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """Tokens that only tokenizer_config.json declares, and named special tokens that are not marked as such.

    Its `add_bos_token` and `add_eos_token` are not read: as in transformers 5, tokenizer.json decides.
    """
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for stated, token in sorted(
        config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])
    ):
        if token["content"] in known:
            continue
        backend.add_tokens([AddedToken(**{key: token[key] for key in _ADDED_TOKEN_FIELDS if key in token})])
        if backend.token_to_id(token["content"]) != int(stated):
            raise ModelNotServable(
                f"tokenizer_config.json gives the token {token['content']!r} the id {stated}, but "
                "tokenizer.json does not."
            )
        known.add(token["content"])
    for content in special_tokens.values():
        if content not in known and backend.token_to_id(content) is not None:
            backend.add_special_tokens([AddedToken(content, normalized=False)])


def _eos_token_ids(
    directory: Path, backend: tokenizers.Tokenizer, special_tokens: dict[str, str]
) -> tuple[int, ...]:
    """What generation_config.json lists (or, without it, config.json), and the tokenizer's own."""
    stated = _read_json(directory / "generation_config.json").get("eos_token_id")
    if stated is None:
        config = _read_json(directory / "config.json")
        stated = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    ids = [stated] if isinstance(stated, int) else list(stated or [])
    own = backend.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return tuple(sorted({*ids, *([] if own is None else [own])}))


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the older places. Of several named templates, the one named "default"."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template", _read_json(directory / "chat_template.json").get("chat_template"))
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
