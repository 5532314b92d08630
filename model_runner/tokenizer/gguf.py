"""A tokenizer from the metadata of a GGUF file, equal to llama.cpp's reading of the same file.

One thing a GGUF file doesn't carry is the normalizer some models have (NFC for Qwen 2): like llama.cpp, we do
without it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from model_runner.errors import ModelNotServable
from model_runner.model_files import file_identity, keep
from model_runner.tokenizer.definition import TokenizerDefinition
from model_runner.tokenizer.gguf_metadata import read_metadata
from model_runner.tokenizer.pre_tokenizers import word_split
from model_runner.tokenizer.token_bytes import SPACE_MARK

logger = logging.getLogger(__name__)

_FORMAT = 1  # raise it whenever the same file would give another definition
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_SPECIAL_TOKEN_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
    "pad_token": "padding_token_id",
}
_END_OF_TURN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Files seldom name every token that ends a turn; these control tokens do in every model that has them.
_END_OF_TURN_TEXTS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
    )
)


def load_definition(path: Path, cache_dir: Path) -> TokenizerDefinition:
    """The file's tokenizer, from the cache when it has been derived before.

    Raises ModelNotServable for a file that can't be read, or whose tokenizer can't be reproduced exactly.
    """
    kept = cache_dir / "tokenizers" / f"{file_identity(path)}-{_FORMAT}.msgpack"
    if kept.is_file():
        try:
            return msgspec.msgpack.decode(kept.read_bytes(), type=TokenizerDefinition)
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("the cached tokenizer %s can't be read and is derived again: %s", kept, error)
    definition = define(read_metadata(path))
    keep(kept, msgspec.msgpack.encode(definition))
    return definition


def define(metadata: Mapping[str, Any]) -> TokenizerDefinition:
    """Raises ModelNotServable for a kind of tokenizer, or a pre-tokenizer, that is not known."""
    ggml = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = ggml.get("model")
    if kind == "gpt2":
        backend, defaults = _byte_level(ggml)
    elif kind == "llama":
        backend, defaults = _sentence_piece(ggml)
    else:
        raise ModelNotServable(
            f"The GGUF file's tokenizer is of a kind that is not supported: {kind!r} (tokenizer.ggml.model). "
            "Supported: gpt2, llama."
        )
    ggml = defaults | ggml
    tokens = ggml["tokens"]
    name = str(metadata.get("general.name", "")).lower()
    _add_tokens(backend, ggml, phi3="phi-3" in name or "phi3" in name)
    special_tokens = {
        role: tokens[ggml[key]]
        for role, key in _SPECIAL_TOKEN_KEYS.items()
        if ggml.get(key, len(tokens)) < len(tokens)
    }
    _add_bos_and_eos(
        backend,
        special_tokens.get("bos_token") if ggml.get("add_bos_token") else None,
        special_tokens.get("eos_token") if ggml.get("add_eos_token") else None,
    )
    return TokenizerDefinition(
        backend_json=backend.to_str(),
        special_tokens=special_tokens,
        eos_token_ids=_eos_token_ids(ggml),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _byte_level(ggml: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """BPE over bytes spelled as characters. Also returns what holds where the file doesn't say otherwise."""
    if "pre" not in ggml:
        raise ModelNotServable(
            "The GGUF file doesn't name its pre-tokenizer (tokenizer.ggml.pre), so its text can't be "
            "tokenised as in training. Convert the model again with a current llama.cpp."
        )
    split = word_split(ggml["pre"])
    merges = [tuple(merge.split(" ")) for merge in _required(ggml, "merges")]
    if any(len(merge) != 2 for merge in merges):
        raise ModelNotServable("The GGUF file has a merge that is not a pair (tokenizer.ggml.merges).")
    vocabulary = {token: token_id for token_id, token in enumerate(_required(ggml, "tokens"))}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.ignore_merges)
    )
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, {"add_bos_token": split.adds_bos}


def _sentence_piece(ggml: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """SentencePiece's BPE: neighbours join while their union is a token, the best-scored union first."""
    tokens: list[str] = _required(ggml, "tokens")
    scores: list[float] = _required(ggml, "scores")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = tokens[ggml.get("unknown_token_id", 0)]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_from_scores(vocabulary, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    with_prefix = ggml.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces]) if with_prefix else spaces
    )
    strip = [decoders.Strip(content=" ", left=1, right=0)] if with_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True}


def _merges_from_scores(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first; of equal scores, as transformers orders
    them, the longer left part first.
    """
    merges = [
        (scores[token_id], cut, token[:cut], token[cut:])
        for token, token_id in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges.sort(key=lambda merge: (-merge[0], -merge[1]))
    return [(left, right) for _, _, left, right in merges]


def _add_tokens(backend: tokenizers.Tokenizer, ggml: Mapping[str, Any], *, phi3: bool) -> None:
    """Tokens that are found in text as a whole, before anything else.

    Phi-3's marks swallow the white space after them, which the file has no field for.
    """
    added = [
        AddedToken(
            token,
            special=kind in (_CONTROL, _UNKNOWN),
            normalized=False,
            rstrip=phi3 and token not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for token, kind in zip(_required(ggml, "tokens"), _required(ggml, "token_type"), strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _add_bos_and_eos(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `encode` put these tokens, where given, first and last."""
    marks = dict.fromkeys(token for token in (bos, eos) if token is not None)
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])],
        pair="$A $B",
        special_tokens=[(token, backend.token_to_id(token)) for token in marks],
    )


def _eos_token_ids(ggml: Mapping[str, Any]) -> tuple[int, ...]:
    stated = {ggml[key] for key in _END_OF_TURN_KEYS if key in ggml}
    marks = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(ggml["tokens"], ggml["token_type"], strict=True))
        if kind == _CONTROL and token in _END_OF_TURN_TEXTS
    }
    if {"<|return|>", "<|call|>"} <= marks.keys():
        marks.pop("<|end|>", None)  # the harmony format: one turn has several messages, each with its <|end|>
    return tuple(sorted(stated | set(marks.values())))


def _required(ggml: Mapping[str, Any], key: str) -> Any:
    if key not in ggml:
        raise ModelNotServable(f"The GGUF file has no tokenizer.ggml.{key}, which its tokenizer needs.")
    return ggml[key]
