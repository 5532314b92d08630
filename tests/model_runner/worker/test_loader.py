"""Hugging Face folders: what is read, and what is refused rather than half read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedConfig

from model_runner.errors import DoesNotFit, ModelNotServable, StartupError
from model_runner.model_files import ModelFiles
from model_runner.worker import gguf_cache
from model_runner.worker.loader import load_model, read_source, skeleton, weights

CPU = torch.device("cpu")


def files(folder: Path) -> ModelFiles:
    return ModelFiles("hf", folder, folder)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(read_source(files(folder)), dtype, CPU, lambda stage, fraction: None)


@pytest.fixture
def folder(tmp_path: Path, families: Any) -> Path:
    families.make("llama", eos_token_id=7).save_pretrained(tmp_path)
    return tmp_path


def test_weights_come_back_in_the_served_dtype(folder: Path, families: Any) -> None:
    saved = families.make("llama").state_dict()
    loaded = load(folder, torch.bfloat16).state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name].bfloat16(), loaded[name]) for name in saved)


def test_progress_is_told(folder: Path) -> None:
    told: list[tuple[str, float]] = []
    load_model(read_source(files(folder)), torch.float32, CPU, lambda *progress: told.append(progress))
    assert {stage for stage, _ in told} == {"reading weights"}
    assert told[-1][1] == 1.0


def test_weights_are_counted_before_they_are_read(folder: Path) -> None:
    source = read_source(files(folder))
    assert weights(skeleton(source.config, torch.bfloat16))[0].total_bytes == sum(
        p.nbytes for p in load(folder, torch.bfloat16).parameters()
    )


def test_a_nested_decoder_has_the_type_of_the_whole(tmp_path: Path) -> None:
    whole = {"model_type": "llava", "dtype": "float16", "text_config": {"model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert read_source(files(tmp_path)).config.dtype == torch.float16


def test_end_tokens(folder: Path) -> None:
    assert read_source(files(folder)).eos_token_ids == (7,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert read_source(files(folder)).eos_token_ids == (5, 9)


def test_missing_weights_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelNotServable, match=r"lacks 1 of the model's weights.*layers\.2\.mlp\.up_proj"):
        load(folder)


def test_quantised_weights_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}})
    )
    with pytest.raises(ModelNotServable, match=r"quantised \(mxfp4\)"):
        read_source(files(folder))


def test_a_config_that_is_none(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no_such_type"}')
    with pytest.raises(ModelNotServable, match="no model config that transformers can read"):
        read_source(files(folder))


def test_code_that_comes_with_a_model_is_not_run_and_nobody_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("it waits for an answer on stdin"))
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelNotServable, match="no model config that transformers can read"):
        read_source(files(folder))


def test_a_device_without_room_for_the_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(DoesNotFit, match=r"weights don't fit .* 3 GiB"):
        load(folder)


def test_a_full_disk_is_named_when_a_gguf_is_converted(
    tmp_path: Path, families: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(gguf_cache, "load_gguf_checkpoint", lambda *_, **__: {"tensors": {}})
    monkeypatch.setattr(gguf_cache, "save_file", full)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    cache = gguf_cache.GGUFCache(tmp_path / "model.gguf", tmp_path / "cache")
    with pytest.raises(StartupError, match=r"can't be written: No space left.*--cache-dir"):
        cache.convert(families.config("llama"), torch.float32, lambda fraction: None)
    assert list((tmp_path / "cache" / "weights").glob("*/*")) == []


@pytest.mark.parametrize("package", ["transformers", "gguf"])
def test_what_another_version_has_derived_from_a_gguf_is_not_read(
    tmp_path: Path, families: Any, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    derived: list[int] = []

    def derive(*_: Any, **__: Any) -> dict[str, Any]:
        derived.append(1)
        return {"tensors": {}}

    monkeypatch.setattr(gguf_cache, "load_gguf_checkpoint", derive)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")

    def converted() -> Path:
        cache = gguf_cache.GGUFCache(tmp_path / "model.gguf", tmp_path / "cache")
        return cache.convert(families.config("llama"), torch.float32, lambda fraction: None)

    first = converted()
    assert (converted(), len(derived)) == (first, 1)
    installed = gguf_cache.version
    monkeypatch.setattr(gguf_cache, "version", lambda name: "0.0.1" if name == package else installed(name))
    assert converted() != first
    assert len(derived) == 2


def test_an_encoder_decoder_has_no_decoder_alone(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ModelNotServable, match="no causal language model for 't5'"):
        skeleton(read_source(files(folder)).config, torch.float32)


def test_a_model_without_a_decoder_is_not_told_every_one_that_there_is() -> None:
    with pytest.raises(ModelNotServable) as refused:
        skeleton(AutoConfig.for_model("t5"), torch.float32)
    assert "\n" not in refused.value.message
    assert "LlamaConfig" not in refused.value.message


def test_longrope_is_served_up_to_its_first_context(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    factors = [1.0] * 8
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 64,
    }
    assert read_source(files(folder)).context == config["max_position_embeddings"] == 256
    (folder / "config.json").write_text(json.dumps(config))
    assert read_source(files(folder)).context == 64


def test_the_text_decoder_of_a_model_that_sees(tmp_path: Path, families: Any) -> None:
    text: PreTrainedConfig = families.config("gemma3_text", tie_word_embeddings=True)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text.to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=500,
        boi_token_index=501,
        eoi_token_index=502,
    )
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    decoder = load(tmp_path)
    assert type(decoder).__name__ == "Gemma3ForCausalLM"
    tokens = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        torch.testing.assert_close(decoder(tokens).logits, whole(tokens).logits)
