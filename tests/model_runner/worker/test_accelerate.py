"""An accelerated model computes what transformers' own modules do, in every family."""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from model_runner.worker import accelerate as accelerate_module
from model_runner.worker import fused
from model_runner.worker import linear as linear_module
from model_runner.worker.accelerate import accelerate
from model_runner.worker.attention import PagedAttention, torch_paged_attention
from model_runner.worker.fused import FusedAttention, GatedMLP, NativeRMSNorm
from model_runner.worker.fused_layer import FusedLayer
from model_runner.worker.linear import WIDE_ROWS, NativeLinear, OneDNNLinear, has_onednn
from model_runner.worker.native import load_kernels

LENGTHS = (1, 6, 23, 37)
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    if load_kernels(folder) is None:
        pytest.skip("no C++ compiler on this machine")
    return folder


@pytest.fixture
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS)


def random_prompts(lengths: Iterable[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 512, (length,), generator=generator).tolist() for length in lengths]


def has_native_linear(cache_dir: Path) -> bool:
    kernels = load_kernels(cache_dir)
    return kernels is not None and kernels.has_linear


def parts(model: nn.Module) -> dict[str, int]:
    """How many of a model's parts were swapped, and how many plain linear layers are left."""
    modules = list(model.modules())
    return {
        "layers": sum(isinstance(vars(m).get("forward"), FusedLayer) for m in modules),
        "attentions": sum(isinstance(vars(m).get("forward"), FusedAttention) for m in modules),
        "mlps": sum(isinstance(m, GatedMLP) for m in modules),
        "norms": sum(isinstance(m, NativeRMSNorm) for m in modules),
        "plain": sum(type(m) is nn.Linear for m in modules),
    }


def test_float32_gives_the_same_tokens(
    family: str, families: Any, serve: Any, cache_dir: Path, prompts: list[list[int]]
) -> None:
    def prepare(model: nn.Module, modules: list[nn.Module]) -> PagedAttention:
        execution = accelerate(model, modules, cache_dir=cache_dir)
        assert "native attention" in execution.description
        return execution.attention

    model = families.make(family)
    plain = serve(model, max_num_batched_tokens=16)
    expected = plain.generate(prompts, MAX_TOKENS)
    fast = serve(model, max_num_batched_tokens=16, prepare=prepare)
    assert fast.generate(prompts, MAX_TOKENS) == expected
    errors = [(fast.sampler.logits[key] - logits).abs().max() for key, logits in plain.sampler.logits.items()]
    assert max(errors) < 1e-4


def test_bfloat16_is_as_near_to_float32_as_it_was(
    family: str, families: Any, serve: Any, cache_dir: Path
) -> None:
    prompts = random_prompts(range(2, 34))

    def prepare(model: nn.Module, modules: list[nn.Module]) -> PagedAttention:
        return accelerate(model, modules, cache_dir=cache_dir).attention

    def typical_error(served: Any) -> float:
        """Root mean square over the prompts: one prompt's error is a matter of luck, in either arithmetic."""
        for p in prompts:
            served.generate([p], 1)
        errors = [
            float((served.sampler.logits[tuple(p)] - exact.sampler.logits[tuple(p)]).norm())
            / float(exact.sampler.logits[tuple(p)].norm())
            for p in prompts
        ]
        return statistics.fmean(error**2 for error in errors) ** 0.5

    # Every expert takes part: else a rounding may send a token to another one, a jump in any arithmetic.
    routed = {"num_experts_per_tok": 4} if family in ("gpt_oss", "qwen3_moe") else {}
    model = families.make(family, **routed)
    exact = serve(model, max_num_batched_tokens=16)
    for p in prompts:
        exact.generate([p], 1)
    model = model.bfloat16()
    plain = typical_error(serve(model, max_num_batched_tokens=16))
    fast = typical_error(serve(model, max_num_batched_tokens=16, prepare=prepare))
    assert fast < 1.25 * plain


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"layers": 4, "attentions": 4, "mlps": 4, "norms": 9}),
        ("smollm3", {"layers": 4, "attentions": 4, "mlps": 4, "norms": 9}),  # one layer without rotation
        ("qwen2", {"layers": 4, "attentions": 4, "mlps": 4, "norms": 9}),  # biases
        ("granite", {"layers": 0, "attentions": 4, "mlps": 4, "norms": 9}),  # scales what it adds
        ("olmo2", {"layers": 0, "attentions": 0, "mlps": 4, "norms": 17}),  # norms after, not before
        ("qwen3", {"layers": 0, "attentions": 0, "mlps": 4, "norms": 17}),  # norms of queries and keys
        (
            "gemma3_text",
            {"layers": 0, "attentions": 0, "mlps": 0, "norms": 25},
        ),  # gelu, norms of another kind
    ],
)
def test_what_is_recognised(
    family: str, expected: dict[str, int], families: Any, serve: Any, cache_dir: Path
) -> None:
    if not has_native_linear(cache_dir):
        pytest.skip("this CPU has no AVX512-BF16")
    found = {}

    def prepare(model: nn.Module, modules: list[nn.Module]) -> PagedAttention:
        attention = accelerate(model, modules, cache_dir=cache_dir).attention
        found.update(parts(model))
        return attention

    serve(families.make(family).bfloat16(), prepare=prepare)
    assert found == {**expected, "plain": 0}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "smollm3"])
def test_a_fused_layer_is_its_parts_to_the_last_bit(
    family: str,
    families: Any,
    serve: Any,
    cache_dir: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same kernels in the same order: only what stands between them is gone."""
    if not has_native_linear(cache_dir):
        pytest.skip("this CPU has no AVX512-BF16")

    def prepare(model: nn.Module, modules: list[nn.Module]) -> PagedAttention:
        return accelerate(model, modules, cache_dir=cache_dir).attention

    model = families.make(family).bfloat16()
    fused = serve(model, max_num_batched_tokens=16, prepare=prepare)
    tokens = fused.generate(prompts, MAX_TOKENS)
    monkeypatch.setattr(accelerate_module, "fuse_layers", lambda *_: 0)
    in_parts = serve(model, max_num_batched_tokens=16, prepare=prepare)
    assert in_parts.generate(prompts, MAX_TOKENS) == tokens
    assert fused.sampler.logits.keys() == in_parts.sampler.logits.keys()
    for key, logits in in_parts.sampler.logits.items():
        assert torch.equal(fused.sampler.logits[key], logits)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "granite"])
def test_products_of_many_rows_can_be_left_to_onednn(
    family: str, families: Any, serve: Any, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CPU with AMX does, on any that has the native products: prompts above and below the limit."""
    if not has_native_linear(cache_dir):
        pytest.skip("this CPU has no AVX512-BF16")
    wide: list[str] = []

    def prepare(model: nn.Module, modules: list[nn.Module]) -> PagedAttention:
        execution = accelerate(model, modules, cache_dir=cache_dir)
        wide.append(execution.description)
        return execution.attention

    model = families.make(family)
    exact = serve(model)
    prompts = random_prompts((3, WIDE_ROWS - 1, WIDE_ROWS, 40))
    errors = []
    model = model.bfloat16()
    for has_amx in (False, True):
        monkeypatch.setattr(accelerate_module.machine, "has_amx", lambda has_amx=has_amx: has_amx)
        served = serve(model, prepare=prepare)
        for p in prompts:
            exact.generate([p], 1)
            served.generate([p], 1)
        errors.append(
            [
                float((served.sampler.logits[tuple(p)] - exact.sampler.logits[tuple(p)]).norm())
                / float(exact.sampler.logits[tuple(p)].norm())
                for p in prompts
            ]
        )
    assert ["oneDNN for many rows" in description for description in wide] == [False, True]
    native, mixed = errors
    assert mixed[:2] == native[:2]
    assert statistics.fmean(mixed) < 1.5 * statistics.fmean(native)


def test_a_large_model_on_amx_keeps_its_weights_once(
    families: Any, serve: Any, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerate_module.machine, "has_amx", lambda: True)
    monkeypatch.setattr(accelerate_module, "MOST_HELD_TWICE", 1000)
    kinds: set[type[nn.Module]] = set()

    def prepare(model: nn.Module, modules: list[nn.Module]) -> PagedAttention:
        execution = accelerate(model, modules, cache_dir=cache_dir)
        kinds.update(type(m) for m in model.modules())
        assert "native attention" in execution.description
        return execution.attention

    model = families.make("llama").bfloat16()
    served = serve(model, prepare=prepare)
    served.generate(random_prompts([20]), 4)
    assert NativeLinear not in kinds
    assert OneDNNLinear in kinds


@pytest.mark.parametrize("family", ["qwen2", "llama", "smollm3", "granite", "olmo2", "qwen3", "gemma3_text"])
def test_without_a_compiler_onednn_packs_the_weights(
    family: str,
    families: Any,
    serve: Any,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
) -> None:
    monkeypatch.setattr(accelerate_module, "load_kernels", lambda _: None)
    kinds: list[type[nn.Module]] = []

    def prepare(model: nn.Module, modules: list[nn.Module]) -> PagedAttention:
        execution = accelerate(model, modules, cache_dir=cache_dir)
        assert execution.attention is torch_paged_attention
        kinds.extend({type(m) for m in model.modules()} & {nn.Linear, OneDNNLinear, NativeLinear})
        return execution.attention

    model = families.make(family)
    exact = serve(model)
    exact.generate(prompts, 1)
    model = model.bfloat16()
    plain = serve(model)
    plain.generate(prompts, 1)
    fast = serve(model, prepare=prepare)
    fast.generate(prompts, 1)
    assert kinds == ([OneDNNLinear] if has_onednn() else [nn.Linear])

    def error(served: Any) -> float:
        keys = [tuple(prompt) for prompt in prompts]
        wrong = [served.sampler.logits[key] - exact.sampler.logits[key] for key in keys]
        return statistics.fmean(
            float(w.norm() / exact.sampler.logits[key].norm()) for w, key in zip(wrong, keys, strict=True)
        )

    assert error(fast) < 1.5 * error(plain)


def test_off_compiles_nothing(families: Any, tmp_path: Path) -> None:
    execution = accelerate(families.make("llama"), [], cache_dir=tmp_path, mode="off")
    assert execution.attention is torch_paged_attention
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_computes_otherwise_is_left_alone(families: Any, cache_dir: Path) -> None:
    model = families.make("llama").bfloat16()
    odd = model.model.layers[1].mlp
    odd.act_fn = nn.ReLU()
    norm = model.model.layers[2].input_layernorm
    norm.forward = lambda x: 2.0 * x
    accelerate(model, [], cache_dir=cache_dir)
    assert type(model.model.layers[1].mlp) is type(odd)
    assert model.model.layers[2].input_layernorm is norm
    if has_native_linear(cache_dir):
        assert isinstance(model.model.layers[0].mlp, GatedMLP)


def _rotating(share: float) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    return {"rope_parameters": rope}


@pytest.mark.parametrize(
    ("model_type", "own", "attentions"),
    [
        ("olmo", {}, 4),  # its angles come in float32
        ("olmo", {"clip_qkv": 50.0}, 0),
        ("nemotron", _rotating(0.5), 0),  # half of each head
        ("nemotron", _rotating(1.0), 0),
    ],
)
def test_families_that_resemble_llama(
    model_type: str,
    own: dict[str, Any],
    attentions: int,
    families: Any,
    serve: Any,
    cache_dir: Path,
    prompts: list[list[int]],
) -> None:
    found = {}

    def prepare(model: nn.Module, modules: list[nn.Module]) -> PagedAttention:
        attention = accelerate(model, modules, cache_dir=cache_dir).attention
        found.update(parts(model))
        return attention

    def logits(served: Any) -> torch.Tensor:
        served.generate(prompts, 1)
        return torch.stack([served.sampler.logits[tuple(prompt)] for prompt in prompts])

    model = families.make_of_type(model_type, **own)
    exact = logits(serve(model, max_num_batched_tokens=16))
    model = model.bfloat16()
    plain = logits(serve(model, max_num_batched_tokens=16))
    fast = logits(serve(model, max_num_batched_tokens=16, prepare=prepare))
    assert (fast - exact).norm() < 1.5 * (plain - exact).norm() + 0.01 * exact.norm()
    assert found["attentions"] == (attentions if has_native_linear(cache_dir) else 0)


def test_plain_weights_are_let_go_one_by_one(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.make("llama").bfloat16()
    plain = [weakref.ref(m) for m in model.modules() if type(m) is nn.Linear]
    alive: list[int] = []

    class Packed(nn.Module):
        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            super().__init__()
            alive.append(sum(reference() is not None for reference in plain))

        @staticmethod
        def fits(linear: object) -> bool:
            return True

    monkeypatch.setattr(linear_module, "OneDNNLinear", Packed)
    assert linear_module.pack_linears(model, None) == len(plain)
    assert alive == [len(plain) - done for done in range(len(plain))]


def test_fused_feed_forwards_let_go_of_theirs(
    families: Any, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_native_linear(cache_dir):
        pytest.skip("this CPU has no AVX512-BF16")
    model = families.make("llama").bfloat16()
    plain = [weakref.ref(layer.mlp) for layer in model.model.layers]
    alive: list[int] = []

    class Counting(GatedMLP):
        def __init__(self, *arguments: Any) -> None:
            alive.append(sum(reference() is not None for reference in plain))
            super().__init__(*arguments)

    monkeypatch.setattr(fused, "GatedMLP", Counting)
    kernels = load_kernels(cache_dir)
    assert kernels is not None
    with torch.inference_mode():
        assert fused.fuse_mlps(model, kernels) == 4
    assert alive == [4, 3, 2, 1]
