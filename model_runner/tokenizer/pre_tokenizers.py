"""How a byte-level BPE vocabulary's text is cut into words before merging, by the name a GGUF file gives
(`tokenizer.ggml.pre`).

The names are llama.cpp's (src/llama-vocab.cpp); the patterns are those of the models' own tokenizer.json
files, which llama.cpp's follow. Each pattern is applied in turn to the pieces the ones before it left: a
match is a piece, and so is what lies between two matches. A name that is not here is refused, for tokens cut
otherwise than in training quietly make a model worse.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from model_runner.errors import ModelNotServable


class WordSplit(NamedTuple):
    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token stays whole, whatever the merges would make of it
    adds_bos: bool = False  # unless the file says otherwise

    def pre_tokenizer(self) -> PreTokenizer:
        """Splits by the patterns, then spells the bytes as printable characters."""
        *splits, last = self.patterns
        native = last == _GPT2  # ByteLevel has this very pattern compiled in, and applies it faster
        if not native:
            splits.append(last)
        steps: list[PreTokenizer] = [Split(Regex(pattern), behavior="isolated") for pattern in splits]
        return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=native)])


def word_split(name: str) -> WordSplit:
    """Raises ModelNotServable for a name that is not known."""
    if name not in _WORD_SPLITS:
        raise ModelNotServable(
            f"The GGUF file names a pre-tokenizer that Plimsoll does not know: {name!r}. Serving it with "
            "another would give the model other tokens than it was trained on. Known: "
            f"{', '.join(sorted(_WORD_SPLITS))}."
        )
    return _WORD_SPLITS[name]


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_LINES_AND_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_MARKS}|{_LINES_AND_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES_AND_SPACES}"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}",
)
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_EAST_ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_EAST_ASIAN, r"\p{N}")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_WORD_SPLITS: dict[str, WordSplit] = {
    name: split
    for names, split in (
        (
            "gpt-2 phi-2 mpt olmo jais trillion exaone4 granite-docling gigachat a.x-4.0 mellum",
            WordSplit((_GPT2,)),
        ),
        # Digits one by one, then as GPT-2.
        (
            "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
            WordSplit((r"\p{N}", _GPT2)),
        ),
        (
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
            WordSplit((_LLAMA3,), True, True),
        ),
        ("glm4", WordSplit((_LLAMA3,), True)),
        ("dbrx smaug-bpe chatglm-bpe", WordSplit((_LLAMA3,))),
        (
            "qwen2 deepseek-r1-qwen megrez kormo stablelm2 hunyuan grok-2 solar-open",
            WordSplit((_QWEN2,)),
        ),
        ("qwen35", WordSplit((_QWEN35,))),
        ("seed-coder", WordSplit((_SEED_CODER,))),
        ("bailingmoe bailingmoe2 llada-moe", WordSplit((_BAILING,))),
        ("tekken", WordSplit((_TEKKEN,), True, True)),
        ("gpt-4o llama4 kanana2", WordSplit((_GPT4O,))),
        ("deepseek-llm", WordSplit(_DEEPSEEK_LLM)),
        ("deepseek-coder", WordSplit(_DEEPSEEK_CODER)),
        ("deepseek-v3 hunyuan-dense", WordSplit(_DEEPSEEK_V3)),
        ("falcon", WordSplit(_FALCON)),
        ("bloom poro-chat gpt3-finnish", WordSplit((_BLOOM,))),
        ("viking", WordSplit((_BLOOM, r"\p{N}"))),
        # What llama.cpp does for files converted before the name existed and that say so.
        ("default", WordSplit((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    )
    for name in names.split()
}
