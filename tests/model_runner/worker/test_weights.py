"""What is said of the weights' memory is what is held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from model_runner.worker import machine, weights
from model_runner.worker.accelerate import accelerate
from model_runner.worker.attention import PagedAttention
from model_runner.worker.linear import NativeLinear, OneDNNLinear, has_onednn
from model_runner.worker.loader import skeleton
from model_runner.worker.weights import held_bytes, planned_bytes

CPU = torch.device("cpu")
NORMS = 0.02  # in float32 they are twice what they were; nothing else may differ


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.skipif(not has_onednn(), reason="this CPU packs no bfloat16")
@pytest.mark.parametrize("mode", ["auto", "off"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_output_layer_is_held_twice_and_said_to_be(
    families: Any, serve: Any, cache_dir: Path, mode: str, tied: bool
) -> None:
    model = families.make("llama", tie_word_embeddings=tied).bfloat16()
    plain = sum(parameter.nbytes for parameter in model.parameters())
    planned = planned_bytes(skeleton(model.config, torch.bfloat16), torch.bfloat16, CPU, mode)
    accelerated, memory = packed(model, serve, cache_dir, mode)
    table = accelerated.get_input_embeddings().weight
    assert isinstance(accelerated.lm_head, NativeLinear | OneDNNLinear)
    copies = table.nbytes if tied else 0
    assert planned == plain + copies
    assert memory == pytest.approx(plain + copies, rel=NORMS)


@pytest.mark.skipif(not has_onednn(), reason="this CPU packs no bfloat16")
def test_layouts_for_few_rows_and_for_many_are_both_counted(
    families: Any, serve: Any, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "has_amx", lambda: True)
    model = families.make("llama", tie_word_embeddings=True).bfloat16()
    plain = sum(parameter.nbytes for parameter in model.parameters())
    planned = planned_bytes(skeleton(model.config, torch.bfloat16), torch.bfloat16, CPU, "auto")
    accelerated, memory = packed(model, serve, cache_dir, "auto")
    if not isinstance(accelerated.lm_head, NativeLinear):
        pytest.skip("this CPU has no AVX512-BF16, or no compiler was found")
    table = accelerated.get_input_embeddings().weight.nbytes
    assert planned > 2 * plain
    assert memory > 2 * plain + table * 0.9
    assert memory == pytest.approx(planned, rel=NORMS)


def test_what_is_not_packed_is_held_once(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.make("llama", tie_word_embeddings=True)
    plain = sum(parameter.nbytes for parameter in model.parameters())
    assert held_bytes(model) == plain
    on_meta = skeleton(model.config, torch.float32)
    assert planned_bytes(on_meta, torch.float32, CPU, "auto") == plain
    bfloat16 = skeleton(model.config, torch.bfloat16)
    for device, onednn in ((torch.device("cuda"), True), (CPU, False)):
        monkeypatch.setattr(weights, "has_onednn", lambda onednn=onednn: onednn)
        assert planned_bytes(bfloat16, torch.bfloat16, device, "auto") == plain // 2


def packed(model: nn.Module, serve: Any, cache_dir: Path, mode: str) -> tuple[Any, int]:
    """The model as it is served, and what it says that it holds."""
    kept: list[nn.Module] = []

    def prepare(model: nn.Module, modules: list[nn.Module]) -> PagedAttention:
        execution = accelerate(model, modules, cache_dir=cache_dir, mode=mode)
        kept.append(model)
        return execution.attention

    serve(model, prepare=prepare)
    return kept[0], held_bytes(kept[0])
