"""docs/kv-cache.md says what the price list says: its table and every figure of its worked examples."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from model_runner.core.kv_dtypes import KV_DTYPES
from model_runner.core.kv_spec import KVCacheSpec, LayerGroup
from model_runner.core.layer_cache import LayerKind
from model_runner.model_table import BEGIN, END, insert, table
from model_runner.worker.model_config import resolve

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "kv-cache.md").read_text()
MODELS: list[dict[str, Any]] = json.loads((DOCS / "models.json").read_text())["models"]


def spec_of(name: str, **options: Any) -> KVCacheSpec:
    (config,) = (model["config"] for model in MODELS if model["name"] == name)
    return KVCacheSpec.from_config(resolve(config), **options)


def group_of(name: str, kind: LayerKind) -> LayerGroup:
    (group,) = (group for group in spec_of(name).groups if group.kind == kind)
    return group


def says(heading: str, *figures: int) -> None:
    """Each figure stands in the section of that heading."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    for figure in figures:
        assert re.search(rf"(?<![\d,]){figure:,}(?![\d,]\d)", section), f"{heading}: {figure:,}"


def test_the_table_is_the_commands_own() -> None:
    assert table(MODELS) in PAGE
    assert len(MODELS) >= 12


def test_every_kind_of_layer_has_a_section_with_an_example() -> None:
    kinds = {group.kind for model in MODELS for group in spec_of(model["name"]).groups}
    assert kinds == {"full", "sliding", "chunked", "latent", "recurrent", "shared"}
    for kind in kinds:
        (section,) = re.findall(rf"^## {kind}\n(.*?)(?=^## )", PAGE, flags=re.MULTILINE | re.DOTALL)
        assert any(f"**{model['name']}**" in section for model in MODELS)


def test_full() -> None:
    spec = spec_of("Llama 3.1 70B")
    says("full", spec.growing_bytes_per_token, spec.sequence_bytes(131_072))


def test_sliding() -> None:
    spec, sliding = spec_of("Gemma 3 27B"), group_of("Gemma 3 27B", "sliding")
    says("sliding", sliding.bytes_per_token, sliding.sequence_bytes(131_072), spec.growing_bytes_per_token)
    says("sliding", spec.sequence_bytes(131_072), spec.bytes_per_token * 131_072)
    assert len(sliding.layers) == 52


def test_chunked() -> None:
    chunked = group_of("Llama 4 Maverick", "chunked")
    full = group_of("Llama 4 Maverick", "full")
    says("chunked", chunked.bytes_per_token, chunked.sequence_bytes(131_072), full.bytes_per_token)


def test_latent() -> None:
    says("latent", spec_of("DeepSeek-V3").growing_bytes_per_token)
    says("latent", spec_of("DeepSeek-V3.2").growing_bytes_per_token)


def test_recurrent() -> None:
    mamba, qwen = spec_of("Mamba 2.8B"), spec_of("Qwen3-Next 80B A3B")
    says("recurrent", mamba.fixed_bytes_per_sequence, qwen.fixed_bytes_per_sequence)
    says("recurrent", qwen.growing_bytes_per_token)
    assert mamba.growing_bytes_per_token == 0


def test_shared() -> None:
    spec = spec_of("Gemma 3n E4B")
    says("shared", spec.growing_bytes_per_token, len(group_of("Gemma 3n E4B", "shared").layers))
    (config,) = (model["config"] for model in MODELS if model["name"] == "Gemma 3n E4B")
    alone = KVCacheSpec.from_config(resolve({**config, "num_kv_shared_layers": 0}))
    says("shared", alone.growing_bytes_per_token)


def test_several_devices() -> None:
    four, sixteen = (spec_of("Llama 3.1 70B", tensor_parallel=ranks) for ranks in (4, 16))
    says("Several devices", four.growing_bytes_per_token, sixteen.growing_bytes_per_token)


@pytest.mark.parametrize("name", KV_DTYPES)
def test_element_types(name: str) -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith("|") and f"`{name}`" in line)
    assert row.split("|")[2].strip() == str(KV_DTYPES[name].vector_bytes(128))


def test_the_table_is_put_between_its_marks() -> None:
    assert insert(f"a\n{BEGIN}\nold\n{END}\nz", "| new |\n") == f"a\n{BEGIN}\n\n| new |\n\n{END}\nz"
