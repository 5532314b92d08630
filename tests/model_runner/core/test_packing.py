"""What quantised weights take, by hand, for each method whose size a configuration tells."""

from __future__ import annotations

from typing import Any

import pytest

from model_runner.core.packing import find_packing
from model_runner.errors import ModelNotServable

LAYER = "model.layers.3.mlp.down_proj"
EXPERTS = "model.layers.3.mlp.experts.down_proj"


def compressed(**weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 256 * 512 + 4 * 2 * 4),
        ({"quant_method": "fp8", "weight_block_size": [100, 128]}, 256 * 512 + 4 * 3 * 4),
        ({"quant_method": "fp8"}, 256 * 512 + 4),
        ({"quant_method": "fbgemm_fp8"}, 256 * 512 + 4 * 256),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128},
            256 * 512 // 2 + 4 * (2 * 256 + 256 // 2),
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1},
            256 * 512 + (2 * 256 + 256) + 4 * 512,
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 256 * 512 + 4 * 256),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 256 * 512 // 2 + 4 * 2048),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            256 * 512 // 2 + 2048 + 4 * 8,
        ),
        (compressed(strategy="channel"), 256 * 512 + 2 * 256),
        (compressed(strategy="tensor"), 256 * 512 + 2),
        (
            compressed(num_bits=4, strategy="group", group_size=128, symmetric=False),
            256 * 512 // 2 + 2 * 256 * 4 + 256 * 4 // 2,
        ),
        (
            compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16),
            256 * 512 // 2 + 256 * 32,
        ),
    ],
)
def test_a_matrix_by_hand(quantisation: dict[str, Any], expected: int) -> None:
    packing = find_packing(quantisation)
    assert packing is not None
    assert packing.size(LAYER, (256, 512)) == expected
    assert packing.size(EXPERTS, (5, 256, 512)) == 5 * expected
    assert packing.size("lm_head", (256, 512)) is None
    assert packing.size("model.layers.3.mlp.gate", (256, 512)) is None  # a router


def test_mxfp4_packs_experts_alone() -> None:
    packing = find_packing({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    assert packing is not None
    assert packing.size(EXPERTS, (2, 64, 32)) == 2 * (64 * 16 + 64)
    assert packing.size(LAYER, (64, 32)) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.3.mlp",
        "down_proj",
        "model.layers.*.mlp",
        "re:.*down_proj",
        "model.language_model.layers.3",
    ],
)
def test_modules_that_are_left_alone(pattern: str) -> None:
    packing = find_packing({"quant_method": "fp8", "modules_to_not_convert": [pattern]})
    assert packing is not None
    assert packing.size(LAYER, (64, 32)) is None
    assert packing.size("model.layers.4.self_attn.q_proj", (64, 32)) == 64 * 32 + 4


@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "hqq"},
        {},
        {"quant_method": "compressed-tensors"},
        {**compressed(strategy="channel"), "sparsity_config": {"format": "sparse-24-bitmask"}},
        compressed(strategy="no such"),
    ],
)
def test_what_a_configuration_does_not_tell(quantisation: dict[str, Any]) -> None:
    assert find_packing(quantisation) is None


@pytest.mark.parametrize(
    ("quantisation", "field"),
    [
        ({"quant_method": "awq", "bits": "4"}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        (compressed(num_bits=None, strategy="channel"), "num_bits"),
    ],
)
def test_what_cannot_be_read_is_named(quantisation: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelNotServable, match=f"field {field} of quantization_config"):
        find_packing(quantisation)
