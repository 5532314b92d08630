from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.core.block_layout import BlockGroup, BlockLayout
from model_runner.core.kv_spec import KVCacheSpec
from model_runner.errors import ModelNotServable
from tests.model_runner.core.fake_runner import layout_with

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "head_dim": 64,
}


def spec_of(config: dict[str, Any], block_size: int = 16, kv_dtype: str = "bfloat16") -> BlockLayout:
    return BlockLayout.from_spec(KVCacheSpec.from_config(config, kv_dtype=kv_dtype), block_size=block_size)


def layer_windows(layout: BlockLayout) -> list[int | None]:
    by_layer = {layer: group.window for group in layout.groups for layer in group.layers}
    return [by_layer[layer] for layer in range(len(by_layer))]


# -- the one equation ----------------------------------------------------------------------------------------


def test_bytes_per_token_is_the_one_equation() -> None:
    layout = spec_of(LLAMA)
    assert layout.bytes_per_token == 2 * 30 * 3 * 64 * 2 == 23_040
    assert layout.block_bytes == 16 * 23_040
    assert layout.groups == (BlockGroup("full", tuple(range(30)), 3, 64),)


def test_request_of_a_plain_model_by_hand() -> None:
    layout = spec_of(LLAMA)
    assert layout.request_blocks(100, 29) == 8  # 128 tokens are written
    assert layout.request_blocks(100, 30) == 9  # 129
    assert layout.request_bytes(100, 30) == 9 * 16 * 23_040
    # 6 full blocks shared; the 7th is copied, and each choice goes on to block 8
    assert layout.request_blocks(100, 29, n=4) == 6 + 4 * 2
    assert layout.request_blocks(96, 33, n=4) == 6 + 4 * 2
    assert layout.request_blocks(96, 1, n=4) == 6


def test_request_of_a_sliding_model_by_hand() -> None:
    layout = layout_with([None, 128], block_size=16)
    assert layout.cap_blocks(128) == 9
    assert layout.request_blocks(1000, 25) == 64 + 9
    assert layout.request_blocks(1000, 25, n=2) == (62 + 2 * 2) + (2 * 2 + 7)
    assert layout.request_blocks(1000, 1001, n=2) == (62 + 2 * 63) + 2 * 9


@pytest.mark.parametrize(("window", "block_size", "cap"), [(1, 16, 1), (2, 16, 2), (17, 16, 2), (18, 16, 3)])
def test_cap_counts_the_block_that_straddles(window: int, block_size: int, cap: int) -> None:
    assert layout_with([window], block_size).cap_blocks(window) == cap


def test_spec_travels_as_data() -> None:
    layout = spec_of(
        {**LLAMA, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 15}
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=BlockLayout) == layout


@pytest.mark.parametrize("arguments", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_pricing_nothing_is_an_error(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="nothing to price"):
        spec_of(LLAMA).request_blocks(*arguments)


# -- never under-priced, and not over-priced either ----------------------------------------------------------


def blocks_held(layout: BlockLayout, group: BlockGroup, prompt: int, n: int, position: int) -> int:
    """Blocks of one group while n choices each run the token at `position`: counted one key at a time."""
    seen = range(0 if group.window is None else max(0, position - group.window + 1), position + 1)
    shared_blocks = prompt // layout.block_size
    held = {key // layout.block_size for key in seen}
    return sum(1 if block < shared_blocks else n for block in held)


def most_held(layout: BlockLayout, prompt: int, max_tokens: int, n: int) -> int:
    """Token by token: the prompt (one sequence), then n choices side by side."""
    peak = 0
    for position in range(prompt + max_tokens - 1):
        choices = 1 if position < prompt else n
        # A choice's copy of the partial block is made when its first own token runs, never before.
        peak = max(
            peak, sum(blocks_held(layout, group, prompt, choices, position) for group in layout.groups)
        )
    return peak


windows = st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3)
specs = st.builds(layout_with, windows, st.integers(1, 5))


@given(windows, st.integers(1, 5), st.integers(1, 30), st.integers(2, 30), st.integers(1, 3))
def test_price_is_exactly_the_most_blocks_ever_held_by_each_group(
    windows: list[int | None], block_size: int, prompt: int, max_tokens: int, n: int
) -> None:
    layout = layout_with(windows, block_size)
    assert most_held(layout, prompt, max_tokens, n) <= layout.request_blocks(prompt, max_tokens, n)
    own_blocks = -(-(prompt + max_tokens - 1) // block_size) - prompt // block_size
    if prompt % block_size and own_blocks < 2 and n > 1:
        return  # the choices part in the middle of their first own block: a little less is held
    for window in windows:
        alone = layout_with([window], block_size)
        assert most_held(alone, prompt, max_tokens, n) == alone.request_blocks(prompt, max_tokens, n)


@given(specs, st.integers(1, 30), st.integers(1, 3))
def test_a_single_token_is_never_under_priced(layout: BlockLayout, prompt: int, n: int) -> None:
    assert most_held(layout, prompt, 1, n) <= layout.request_blocks(prompt, 1, n)


@given(specs, st.integers(1, 40), st.integers(1, 40))
def test_one_choice_costs_one_sequence(layout: BlockLayout, prompt: int, max_tokens: int) -> None:
    assert layout.request_blocks(prompt, max_tokens) == layout.sequence_blocks(prompt + max_tokens - 1)


@given(specs, st.integers(1, 40), st.integers(1, 3), st.integers(0, 200), st.integers(0, 60))
def test_largest_max_tokens_fits_and_one_more_does_not(
    layout: BlockLayout, prompt: int, n: int, budget: int, limit: int
) -> None:
    largest = layout.largest_max_tokens(prompt, n, budget, limit)
    assert 0 <= largest <= limit
    if largest:
        assert layout.request_blocks(prompt, largest, n) <= budget
    if largest < limit:
        assert layout.request_blocks(prompt, largest + 1, n) > budget


@given(specs, st.integers(0, 60), st.integers(1, 20))
def test_headroom_covers_the_excess_of_the_largest_chunk(
    layout: BlockLayout, start: int, budget: int
) -> None:
    """A chunk anywhere in a prompt, counted key by key: what it touches over the price of the sequence."""
    end = start + budget
    touched = sum(
        len(
            {
                k // layout.block_size
                for k in range(0 if g.window is None else max(0, start - g.window + 1), end)
            }
        )
        for g in layout.groups
    )
    assert touched <= layout.sequence_blocks(end) + layout.headroom_blocks(budget)


def test_models_without_windows_need_no_headroom() -> None:
    assert spec_of(LLAMA).headroom_blocks(512) == 0
    assert layout_with([None, 128, 128], 16).headroom_blocks(512) == 2 * 32
    assert layout_with([128], 16).headroom_blocks(1) == 0


def test_max_sequences() -> None:
    layout = spec_of(LLAMA)
    assert layout.max_sequences(1024, budget_blocks=200) == 3
    assert layout.max_sequences(1024, budget_blocks=63) == 0


# -- read off a configuration --------------------------------------------------------------------------------


def test_groups_are_equal_and_cover_every_layer_once() -> None:
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2
    layout = spec_of({**LLAMA, "num_hidden_layers": 26, "sliding_window": 512, "layer_types": types})
    assert len(layout.groups) == 13
    assert {len(group.layers) for group in layout.groups} == {2}
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(26))
    assert layer_windows(layout) == [512 if kind == "sliding_attention" else None for kind in types]
    assert layout.bytes_per_token == 2 * 26 * 3 * 64 * 2


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
    layout = spec_of(config.to_dict())
    assert layer_windows(layout) == expected
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert {(group.kv_heads, group.head_dim) for group in layout.groups} == {
        (config.num_key_value_heads, head_dim)
    }


def test_missing_kv_heads_and_head_dim_are_derived() -> None:
    layout = spec_of({"num_hidden_layers": 1, "num_attention_heads": 8, "hidden_size": 96, "head_dim": None})
    assert (layout.groups[0].kv_heads, layout.groups[0].head_dim) == (8, 12)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            {"layer_types": ["chunked_attention"] * 30, "attention_chunk_size": 64},
            "first is 0. attend within chunks",
        ),
        ({"layer_types": ["chunked_attention"] * 30}, "attention_chunk_size: it is None"),
        ({"layer_types": ["hyper_attention"] * 30}, "layer 0 is 'hyper_attention'"),
        ({"layer_types": ["full_attention"] * 29 + ["linear_attention"]}, "layer 29 is 'linear_attention'"),
        ({"layer_types": ["full_attention"] * 29}, "layer_types: it lists 29, and there are 30 layers"),
        ({"layer_types": ["sliding_attention"] * 30}, "sliding_window: it is None"),
        ({"layer_types": ["sliding_attention"] * 30, "sliding_window": -4}, "sliding_window: it is -4"),
        ({"sliding_window": 8, "max_window_layers": 3}, "max_window_layers"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim: it is None"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "compressed latent"),
        ({"num_kv_shared_layers": 15}, "num_kv_shared_layers"),
        ({"attention_chunk_size": 8192}, "attend within chunks"),
        ({"per_layer_config": {5: {"head_dim": 512}}}, "its layers differ"),
        ({"num_key_value_heads": [3, 1]}, r"num_key_value_heads: it is \[3, 1\]"),
        (
            {
                "swa_head_dim": 32,
                "sliding_window": 8,
                "layer_types": ["sliding_attention"] + ["full_attention"] * 29,
            },
            "its layers differ",
        ),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"ssm_state_size": 16}, "ssm_state_size"),
        ({"conv_L_cache": 3}, "conv_L_cache"),
        ({"layers_block_type": ["hybrid"]}, "layer_types: it lists 1"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"alibi": True}, "ALiBi"),
        ({"attn_config": {"alibi": True}}, "ALiBi"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"v_head_dim": 32}, "keys of 64 and values of 32"),
        ({"num_hidden_layers": None}, "num_hidden_layers: it is None"),
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
    with pytest.raises(ModelNotServable, match=r"does not serve the model type|can't be priced by its"):
        spec_of(getattr(transformers, class_name)().to_dict())


@given(specs)
def test_what_is_laid_out_can_be_told_from_the_layout(layout: BlockLayout) -> None:
    needs = layout.needs("made")
    again = BlockLayout.from_spec(needs, block_size=layout.block_size)
    assert again.bytes_per_token == layout.bytes_per_token == needs.bytes_per_token
    assert sorted(layer for g in again.groups for layer in g.layers) == sorted(
        layer for g in layout.groups for layer in g.layers
    )
    assert {(g.kind, g.window) for g in again.groups} == {(g.kind, g.window) for g in layout.groups}
