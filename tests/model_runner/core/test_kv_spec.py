from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.core.kv_spec import KVCacheSpec, LayerGroup
from model_runner.errors import ModelNotServable
from tests.model_runner.core.fake_runner import spec_with

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "head_dim": 64,
}


def spec_of(config: dict[str, Any], block_size: int = 16, element_bytes: int = 2) -> KVCacheSpec:
    return KVCacheSpec.from_config(config, block_size=block_size, element_bytes=element_bytes)


def layer_windows(spec: KVCacheSpec) -> list[int | None]:
    by_layer = {layer: group.window for group in spec.groups for layer in group.layers}
    return [by_layer[layer] for layer in range(len(by_layer))]


# -- the one equation ----------------------------------------------------------------------------------------


def test_bytes_per_token_is_the_one_equation() -> None:
    spec = spec_of(LLAMA)
    assert spec.bytes_per_token == 2 * 30 * 3 * 64 * 2 == 23_040
    assert spec.block_bytes == 16 * 23_040
    assert spec.groups == (LayerGroup("full", tuple(range(30)), 3, 64),)


def test_request_of_a_plain_model_by_hand() -> None:
    spec = spec_of(LLAMA)
    assert spec.request_blocks(100, 29) == 8  # 128 tokens are written
    assert spec.request_blocks(100, 30) == 9  # 129
    assert spec.request_bytes(100, 30) == 9 * 16 * 23_040
    # 6 full blocks shared; the 7th is copied, and each choice goes on to block 8
    assert spec.request_blocks(100, 29, n=4) == 6 + 4 * 2
    assert spec.request_blocks(96, 33, n=4) == 6 + 4 * 2
    assert spec.request_blocks(96, 1, n=4) == 6


def test_request_of_a_sliding_model_by_hand() -> None:
    spec = spec_with([None, 128], block_size=16)
    assert spec.cap_blocks(128) == 9
    assert spec.request_blocks(1000, 25) == 64 + 9
    assert spec.request_blocks(1000, 25, n=2) == (62 + 2 * 2) + (2 * 2 + 7)
    assert spec.request_blocks(1000, 1001, n=2) == (62 + 2 * 63) + 2 * 9


@pytest.mark.parametrize(("window", "block_size", "cap"), [(1, 16, 1), (2, 16, 2), (17, 16, 2), (18, 16, 3)])
def test_cap_counts_the_block_that_straddles(window: int, block_size: int, cap: int) -> None:
    assert spec_with([window], block_size).cap_blocks(window) == cap


def test_spec_travels_as_data() -> None:
    spec = spec_of(
        {**LLAMA, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 15}
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=KVCacheSpec) == spec


@pytest.mark.parametrize("arguments", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_pricing_nothing_is_an_error(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="nothing to price"):
        spec_of(LLAMA).request_blocks(*arguments)


# -- never under-priced, and not over-priced either ----------------------------------------------------------


def blocks_held(spec: KVCacheSpec, group: LayerGroup, prompt: int, n: int, position: int) -> int:
    """Blocks of one group while n choices each run the token at `position`: counted one key at a time."""
    seen = range(0 if group.window is None else max(0, position - group.window + 1), position + 1)
    shared_blocks = prompt // spec.block_size
    held = {key // spec.block_size for key in seen}
    return sum(1 if block < shared_blocks else n for block in held)


def most_held(spec: KVCacheSpec, prompt: int, max_tokens: int, n: int) -> int:
    """Token by token: the prompt (one sequence), then n choices side by side."""
    peak = 0
    for position in range(prompt + max_tokens - 1):
        choices = 1 if position < prompt else n
        # A choice's copy of the partial block is made when its first own token runs, never before.
        peak = max(peak, sum(blocks_held(spec, group, prompt, choices, position) for group in spec.groups))
    return peak


windows = st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3)
specs = st.builds(spec_with, windows, st.integers(1, 5))


@given(windows, st.integers(1, 5), st.integers(1, 30), st.integers(2, 30), st.integers(1, 3))
def test_price_is_exactly_the_most_blocks_ever_held_by_each_group(
    windows: list[int | None], block_size: int, prompt: int, max_tokens: int, n: int
) -> None:
    spec = spec_with(windows, block_size)
    assert most_held(spec, prompt, max_tokens, n) <= spec.request_blocks(prompt, max_tokens, n)
    own_blocks = -(-(prompt + max_tokens - 1) // block_size) - prompt // block_size
    if prompt % block_size and own_blocks < 2 and n > 1:
        return  # the choices part in the middle of their first own block: a little less is held
    for window in windows:
        alone = spec_with([window], block_size)
        assert most_held(alone, prompt, max_tokens, n) == alone.request_blocks(prompt, max_tokens, n)


@given(specs, st.integers(1, 30), st.integers(1, 3))
def test_a_single_token_is_never_under_priced(spec: KVCacheSpec, prompt: int, n: int) -> None:
    assert most_held(spec, prompt, 1, n) <= spec.request_blocks(prompt, 1, n)


@given(specs, st.integers(1, 40), st.integers(1, 40))
def test_one_choice_costs_one_sequence(spec: KVCacheSpec, prompt: int, max_tokens: int) -> None:
    assert spec.request_blocks(prompt, max_tokens) == spec.sequence_blocks(prompt + max_tokens - 1)


@given(specs, st.integers(1, 40), st.integers(1, 3), st.integers(0, 200), st.integers(0, 60))
def test_largest_max_tokens_fits_and_one_more_does_not(
    spec: KVCacheSpec, prompt: int, n: int, budget: int, limit: int
) -> None:
    largest = spec.largest_max_tokens(prompt, n, budget, limit)
    assert 0 <= largest <= limit
    if largest:
        assert spec.request_blocks(prompt, largest, n) <= budget
    if largest < limit:
        assert spec.request_blocks(prompt, largest + 1, n) > budget


@given(specs, st.integers(0, 60), st.integers(1, 20))
def test_headroom_covers_the_excess_of_the_largest_chunk(spec: KVCacheSpec, start: int, budget: int) -> None:
    """A chunk anywhere in a prompt, counted key by key: what it touches over the price of the sequence."""
    end = start + budget
    touched = sum(
        len(
            {
                k // spec.block_size
                for k in range(0 if g.window is None else max(0, start - g.window + 1), end)
            }
        )
        for g in spec.groups
    )
    assert touched <= spec.sequence_blocks(end) + spec.headroom_blocks(budget)


def test_models_without_windows_need_no_headroom() -> None:
    assert spec_of(LLAMA).headroom_blocks(512) == 0
    assert spec_with([None, 128, 128], 16).headroom_blocks(512) == 2 * 32
    assert spec_with([128], 16).headroom_blocks(1) == 0


def test_max_sequences() -> None:
    spec = spec_of(LLAMA)
    assert spec.max_sequences(1024, budget_blocks=200) == 3
    assert spec.max_sequences(1024, budget_blocks=63) == 0


# -- read off a configuration --------------------------------------------------------------------------------


def test_groups_are_equal_and_cover_every_layer_once() -> None:
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2
    spec = spec_of({**LLAMA, "num_hidden_layers": 26, "sliding_window": 512, "layer_types": types})
    assert len(spec.groups) == 13
    assert {len(group.layers) for group in spec.groups} == {2}
    assert sorted(layer for group in spec.groups for layer in group.layers) == list(range(26))
    assert layer_windows(spec) == [512 if kind == "sliding_attention" else None for kind in types]
    assert spec.bytes_per_token == 2 * 26 * 3 * 64 * 2


FULL: int | None = None
SLIDES: int | None = 128
FAMILIES: dict[str, tuple[str, dict[str, Any], list[int | None]]] = {
    "llama": ("LlamaConfig", {}, [FULL] * 4),
    "mistral slides everywhere": ("MistralConfig", {"sliding_window": 128}, [SLIDES] * 4),
    "mistral without a window": ("MistralConfig", {"sliding_window": None}, [FULL] * 4),
    "qwen2 with an unused window": ("Qwen2Config", {"sliding_window": 128}, [FULL] * 4),
    "qwen2": (
        "Qwen2Config",
        {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1},
        [FULL, SLIDES, SLIDES, SLIDES],
    ),
    "qwen2-moe, window 0": ("Qwen2MoeConfig", {}, [FULL] * 4),
    "qwen3": ("Qwen3Config", {}, [FULL] * 4),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_key_value_heads": 4}, [FULL] * 4),
    "qwen3-moe slides": (
        "Qwen3MoeConfig",
        {"sliding_window": 128, "use_sliding_window": True},
        [SLIDES] * 4,
    ),
    "gemma": ("GemmaConfig", {}, [FULL] * 4),
    "gemma2": ("Gemma2Config", {"sliding_window": 128}, [SLIDES, FULL] * 2),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 128, "num_hidden_layers": 7},
        [SLIDES] * 5 + [FULL, SLIDES],
    ),
    "phi3": ("Phi3Config", {"sliding_window": 128}, [SLIDES] * 4),
    "phi3 without a window": ("Phi3Config", {}, [FULL] * 4),
    "olmo2": ("Olmo2Config", {}, [FULL] * 4),
    "granite": ("GraniteConfig", {}, [FULL] * 4),
    "smollm3": ("SmolLM3Config", {}, [FULL] * 4),
    "gpt-oss": ("GptOssConfig", {"sliding_window": 128}, [SLIDES, FULL] * 2),
    "a window that no layer uses": (
        "Qwen3Config",
        {"sliding_window": 128, "use_sliding_window": True, "layer_types": ["full_attention"] * 4},
        [FULL] * 4,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_that_transformers_defines(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    class_name, overrides, expected = FAMILIES[name]
    config = getattr(transformers, class_name)(**{"num_hidden_layers": 4, **overrides})
    spec = spec_of(config.to_dict())
    assert layer_windows(spec) == expected
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert {(group.kv_heads, group.head_dim) for group in spec.groups} == {
        (config.num_key_value_heads, head_dim)
    }


def test_missing_kv_heads_and_head_dim_are_derived() -> None:
    spec = spec_of({"num_hidden_layers": 1, "num_attention_heads": 8, "hidden_size": 96, "head_dim": None})
    assert (spec.groups[0].kv_heads, spec.groups[0].head_dim) == (8, 12)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"layer_types": ["chunked_attention"] * 30}, "layer 0 is 'chunked_attention'"),
        ({"layer_types": ["full_attention"] * 29 + ["linear_attention"]}, "layer 29 is 'linear_attention'"),
        ({"layer_types": ["full_attention"] * 29}, "30 layers and 29 layer_types"),
        ({"layer_types": ["sliding_attention"] * 30}, "layer 0 slides"),
        ({"layer_types": ["sliding_attention"] * 30, "sliding_window": -4}, "sliding_window is -4"),
        ({"sliding_window": 8, "max_window_layers": 3}, "max_window_layers"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"num_kv_shared_layers": 15}, "num_kv_shared_layers"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"per_layer_config": {5: {"head_dim": 512}}}, "per_layer_config"),
        ({"num_key_value_heads": [3, 1]}, r"num_key_value_heads is \[3, 1\]"),
        ({"num_attention_heads_per_layer": [9] * 30}, "num_attention_heads_per_layer"),
        ({"swa_head_dim": 32}, "swa_head_dim"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"ssm_state_size": 16}, "ssm_state_size"),
        ({"conv_L_cache": 3}, "conv_L_cache"),
        ({"layers_block_type": ["hybrid"]}, "layers_block_type"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"alibi": True}, "alibi"),
        ({"v_head_dim": 32}, "v_head_dim=32"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_key_value_heads": 2}, "9 query heads are not a multiple of 2"),
    ],
)
def test_what_cannot_be_priced_is_refused_by_name(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelNotServable, match=named):
        spec_of({**LLAMA, **overrides})


@pytest.mark.parametrize(
    "class_name",
    [
        "DeepseekV3Config",
        "Gemma3nTextConfig",
        "Gemma4TextConfig",
        "Llama4TextConfig",
        "Qwen3NextConfig",
        "JambaConfig",
        "FalconH1Config",
        "NemotronHConfig",
        "MiniMaxConfig",
        "Lfm2Config",
        "Zamba2Config",
        "Mamba2Config",
        "T5Config",
        "RecurrentGemmaConfig",
        "RwkvConfig",
        "MiMoV2FlashConfig",
    ],
)
def test_families_beyond_us_are_refused(class_name: str) -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ModelNotServable, match="can't serve"):
        spec_of(getattr(transformers, class_name)().to_dict())
