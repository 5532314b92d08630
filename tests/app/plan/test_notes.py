"""What a plan says beside its figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from app.cli import main


def test_what_a_server_would_refuse_is_not_said_to_be_served(
    config_file: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
    sees = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}, **shape, "num_key_value_heads": 4}
    for config, reason in (
        (sees, "transformers has no model of that decoder alone"),
        ({"model_type": "falcon", **shape}, "its attention is code of its own"),
    ):
        words = ["--model", config_file(config), "--device-memory", "8GiB", "--format", "json"]
        assert main(["plan", *words]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["allocated"]["served"] is False
        assert reason in plan["allocated"]["reason"]
        assert plan["contexts"][0]["allocated_max_sequences"] is None
        assert plan["contexts"][0]["max_sequences"] > 0


def test_of_longrope_plimsoll_serves_the_first_context_alone(
    config_file: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = {
        "model_type": "phi3",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "pad_token_id": 0,
        "max_position_embeddings": 8192,
        "original_max_position_embeddings": 1024,
        "rope_scaling": {"type": "longrope", **factors},
    }
    words = ["plan", "--model", config_file(config), "--device-memory", "L4", "--batch", "1"]
    assert main([*words, "--format", "json"]) == 0
    (batch,) = json.loads(capsys.readouterr().out)["batches"]
    assert (batch["longest_context"], batch["allocated_longest_context"]) == (8192, 1024)
    assert main(words) == 0
    assert "Plimsoll serves up to 1,024 tokens" in capsys.readouterr().out


def test_what_is_noted_is_so(
    config_file: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of experts where there are any, of the type and the context where the configuration is silent."""

    def table(config: dict[str, Any], *words: str) -> str:
        assert main(["plan", "--model", config_file(config), "--device-memory", "L4", *words]) == 0
        return capsys.readouterr().out

    hybrid = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-*-", "num_hidden_layers": 4}
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256}
    said = table({**hybrid, **shape, "torch_dtype": "float16"})
    assert "experts a layer" not in said  # its class has defaults for them
    assert "does not say what the model runs in" not in said
    mpt = {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 8192}
    said = table(mpt)
    assert "(the model's own is 8,192)" in said
    assert "does not say what the model runs in; bfloat16 is taken" in said
    assert "bfloat16 is taken" not in table(mpt, "--dtype", "float16")
