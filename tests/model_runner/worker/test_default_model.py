"""The embedded default model, whole: GGUF in, transformers' own greedy text out, alone and batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from model_runner import model_files
from model_runner.tokenizer import Tokenizer, load_tokenizer
from model_runner.worker.loader import Source, load_model, read_source, skeleton, weights

MAX_TOKENS = 24
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who never slept. "
    * 3,
    "1",
]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def source(cache_dir: Path) -> Source:
    return read_source(model_files.resolve("", cache_dir))


@pytest.fixture(scope="module")
def tokenizer(cache_dir: Path) -> Tokenizer:
    return load_tokenizer(model_files.resolve("", cache_dir))


@pytest.fixture(scope="module")
def model(source: Source) -> nn.Module:
    told: dict[str, list[float]] = {}
    model = load_model(
        source,
        torch.float32,
        torch.device("cpu"),
        lambda stage, done: told.setdefault(stage, []).append(done),
    )
    assert list(told) == ["converting the GGUF file", "reading weights"]
    assert all(done == sorted(done) and done[-1] == 1.0 for done in told.values())
    model.generation_config.eos_token_id = None  # type: ignore[union-attr, assignment]  # all run to the end
    return model


def reference_tokens(model: Any, prompt: list[int]) -> list[int]:
    inputs = torch.tensor([prompt])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
    )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def expected(model: nn.Module, tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """(prompt, what transformers' generate makes of it), for each of TEXTS."""
    prompts = [tokenizer.encode(text, False) for text in TEXTS]
    return [(prompt, reference_tokens(model, prompt)) for prompt in prompts]


def test_the_text_makes_sense(expected: Any, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(expected[0][1]).startswith(" Paris.")
    assert "return n * fibonacci(n - 1)" in tokenizer.decode(expected[1][1])


def test_alone(expected: Any, model: nn.Module, serve: Any) -> None:
    served = serve(model)
    for prompt, tokens in expected:
        assert served.generate([prompt], MAX_TOKENS) == [tokens]


def test_in_a_mixed_batch_with_chunked_prefill(expected: Any, model: nn.Module, serve: Any) -> None:
    served = serve(model, max_num_batched_tokens=24)
    assert served.generate([prompt for prompt, _ in expected], MAX_TOKENS) == [
        tokens for _, tokens in expected
    ]


def test_weights_are_counted_as_they_are(source: Source, model: nn.Module) -> None:
    """Tied weights once."""
    assert weights(skeleton(source.config, torch.float32))[0].total_bytes == sum(
        parameter.nbytes for parameter in model.parameters()
    )


def test_conversion_is_done_once(source: Source, cache_dir: Path, model: nn.Module) -> None:
    before = {path: path.stat().st_mtime_ns for path in (cache_dir / "weights").rglob("*")}
    again = read_source(model_files.resolve("", cache_dir))
    load_model(again, torch.float32, torch.device("cpu"), lambda stage, done: None)
    assert again.config.to_dict() == source.config.to_dict()
    assert {path: path.stat().st_mtime_ns for path in (cache_dir / "weights").rglob("*")} == before
