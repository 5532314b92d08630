"""An EngineConfig becomes an engine that runs, or a StartupError that says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model_runner.build import build_engine
from model_runner.config import EngineConfig
from model_runner.errors import DoesNotFit, ModelNotServable
from model_runner.messages import ModelInfo, Submit
from model_runner.types import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, families: Any) -> Path:
    folder = tmp_path_factory.mktemp("model")
    families.make("gemma2").save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")  # the other process reads it
    return folder


def config(folder: Path, **changes: Any) -> EngineConfig:
    options = {
        "dtype": "float32",
        "kv_cache_memory_bytes": 4 << 20,
        "num_threads": 1,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "compile": "off",
    }
    return EngineConfig(model=str(folder), cache_dir=str(folder / "cache"), **{**options, **changes})


def test_the_plan_comes_before_the_weights_and_the_engine_runs(folder: Path, families: Any) -> None:
    events: list[Any] = []
    built = build_engine(config(folder), lambda stage, fraction: events.append(stage), events.append)
    planned = next(event for event in events if isinstance(event, ModelInfo))
    assert events.index(planned) < events.index("reading weights") < events.index("warming up")
    assert planned == built.model
    assert (planned.architecture, planned.dtype, planned.device) == ("Gemma2ForCausalLM", "float32", "cpu")
    assert (planned.max_model_len, planned.vocab_size, planned.eos_token_ids) == (256, 512, ())
    assert (planned.num_blocks + planned.headroom_blocks) * planned.layout.block_bytes == 4 << 20
    assert planned.headroom_blocks > 0
    assert built.decode_step_seconds > 0
    assert built.prefill_tokens_per_second > 0

    prompt = [5, 17, 300]
    blocks = planned.layout.request_blocks(len(prompt), 20)
    built.core.submit(Submit("a", prompt, SamplingParams(max_tokens=20, temperature=0.0), blocks))
    tokens: list[int] = []
    while built.core.has_work:
        result = built.core.step()
        assert result is not None
        tokens += [token for output in result.outputs for token in output.token_ids]
    model = families.make("gemma2")
    expected = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 3), max_new_tokens=20, do_sample=False
    )
    assert tokens == expected[0, 3:].tolist()


def test_the_cache_is_a_share_of_the_memory_unless_said(folder: Path) -> None:
    planned: list[ModelInfo] = []
    build_engine(config(folder, kv_cache_memory_bytes=None), lambda *_: None, planned.append)
    assert (
        planned[0].kv_budget_bytes
        >= 4 * planned[0].layout.sequence_blocks(256) * planned[0].layout.block_bytes
    )


def test_too_little_cache_for_one_request(folder: Path) -> None:
    with pytest.raises(DoesNotFit, match="One request of 256 tokens needs"):
        build_engine(config(folder, kv_cache_memory_bytes=1 << 17), lambda *_: None, lambda _: None)


def test_max_model_len_auto(folder: Path) -> None:
    planned: list[ModelInfo] = []
    small = config(folder, kv_cache_memory_bytes=1 << 17, max_model_len_auto=True)
    build_engine(small, lambda *_: None, planned.append)
    assert 0 < planned[0].max_model_len < 256


def test_more_than_the_machine_has(folder: Path) -> None:
    with pytest.raises(DoesNotFit, match="together are more than"):
        build_engine(config(folder, kv_cache_memory_bytes=1 << 50), lambda *_: None, lambda _: None)


def test_a_model_that_can_not_be_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelNotServable, match="mamba"):
        build_engine(config(tmp_path), lambda *_: None, lambda _: None)
