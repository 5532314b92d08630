"""What a model needs: each kind of layer by hand, then what holds for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from model_runner.core.block_layout import BlockLayout
from model_runner.core.kv_dtypes import KV_DTYPES
from model_runner.core.kv_spec import KVCacheSpec, LayerGroup
from model_runner.core.layer_cache import LayerCache, StateTensor, heads_per_rank
from model_runner.errors import ModelNotPriced, ModelNotServable

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "head_dim": 128,
}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def spec_of(config: dict[str, Any], **options: Any) -> KVCacheSpec:
    return KVCacheSpec.from_config({**LLAMA_8B, **config}, **options)


# -- each kind, by hand --------------------------------------------------------------------------------------


def test_full_is_the_one_equation() -> None:
    spec = spec_of({})
    assert spec.growing_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131_072
    assert spec.sequence_bytes(1000) == 1000 * 131_072
    assert spec.fixed_bytes_per_sequence == 0
    assert [(g.kind, len(g.layers)) for g in spec.groups] == [("full", 32)]


def test_head_dim_is_the_configs_own() -> None:
    assert spec_of({"head_dim": 256}).growing_bytes_per_token == 2 * 32 * 8 * 256 * 2


def test_multi_query_and_multi_head() -> None:
    assert spec_of({"num_key_value_heads": 1}).growing_bytes_per_token == 2 * 32 * 128 * 2
    assert spec_of({"num_key_value_heads": None}).growing_bytes_per_token == 2 * 32 * 32 * 128 * 2
    assert spec_of({"multi_query": True}).growing_bytes_per_token == 2 * 32 * 128 * 2


def test_values_may_be_narrower_than_keys() -> None:
    assert spec_of({"v_head_dim": 64}).growing_bytes_per_token == 32 * 8 * (128 + 64) * 2


def test_sliding_stops_at_its_window() -> None:
    types = ["sliding_attention"] * 31 + ["full_attention"]
    spec = spec_of({"layer_types": types, "sliding_window": 1024})
    assert spec.growing_bytes_per_token == 2 * 8 * 128 * 2
    assert spec.bytes_per_token == 131_072
    assert spec.sequence_bytes(1024) == 1024 * 131_072
    assert spec.sequence_bytes(5000) == (31 * 1024 + 5000) * 4096


def test_chunked_stops_at_its_chunk() -> None:
    types = ["chunked_attention"] * 24 + ["full_attention"] * 8
    spec = spec_of({"layer_types": types, "attention_chunk_size": 8192})
    assert spec.sequence_bytes(100_000) == (24 * 8192 + 8 * 100_000) * 4096


def test_latent_has_no_factor_two_and_no_heads() -> None:
    assert spec_of(MLA).growing_bytes_per_token == 32 * (512 + 64) * 2


def test_an_indexer_adds_its_keys_and_a_shared_one_does_not() -> None:
    config = {
        **MLA,
        "layer_types": ["indexed_attention"] * 32,
        "index_head_dim": 128,
        "indexer_types": ["full", "shared"] * 16,
    }
    assert spec_of(config).growing_bytes_per_token == (32 * (512 + 64) + 16 * 128) * 2


def test_recurrent_is_fixed_and_its_state_stays_float32() -> None:
    config = {
        "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    spec = spec_of(config)
    state, convolution = 32 * 128 * 128 * 4, (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert spec.fixed_bytes_per_sequence == 24 * (state + convolution)
    assert spec.growing_bytes_per_token == 8 * 4096
    assert spec_of(config, kv_dtype="fp8").fixed_bytes_per_sequence == spec.fixed_bytes_per_sequence
    assert spec_of(config, kv_dtype="float32").fixed_bytes_per_sequence == 24 * (state + 2 * convolution)


def test_shared_layers_cost_nothing() -> None:
    spec = spec_of({"kv_sharing_modes": [None] * 20 + ["reuse"] * 12})
    assert spec.growing_bytes_per_token == 20 * 4096
    assert {g.kind: len(g.layers) for g in spec.groups} == {"full": 20, "shared": 12}


def test_layers_may_differ_one_by_one() -> None:
    spec = spec_of({"per_layer_config": {"05": {"head_dim": 512}, "11": {"num_key_value_heads": 4}}})
    assert spec.growing_bytes_per_token == (30 * 8 * 128 + 8 * 512 + 4 * 128) * 2 * 2


def test_nested_language_models_are_found() -> None:
    nested = {"model_type": "gemma3", "vision_config": {"num_hidden_layers": 27}, "text_config": LLAMA_8B}
    assert KVCacheSpec.from_config(nested).growing_bytes_per_token == 131_072


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_per_vector"),
    [
        ("float32", 512),
        ("bfloat16", 256),
        ("float16", 256),
        ("fp8", 128),
        ("int8", 128 + 4),
        ("int4", 64 + 2 * 4),
        ("q8_0", 128 + 4 * 2),
        ("q4_0", 64 + 4 * 2),
    ],
)
def test_element_sizes_with_their_scales(kv_dtype: str, bytes_per_vector: int) -> None:
    assert spec_of({}, kv_dtype=kv_dtype).growing_bytes_per_token == 2 * 32 * 8 * bytes_per_vector


# -- among ranks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_heads_are_divided_then_repeated(ranks: int, heads: int) -> None:
    assert spec_of({}, tensor_parallel=ranks).growing_bytes_per_token == 2 * 32 * heads * 128 * 2


@pytest.mark.parametrize(
    ("changes", "ranks", "why", "nearest"),
    [
        ({}, 3, "num_attention_heads is 32, num_key_value_heads is 8", "2 and 4 do"),
        ({}, 12, "num_attention_heads is 32, num_key_value_heads is 8", "8 and 16 do"),
        # Twenty-four devices could repeat eight KV heads; they can't divide sixty-four query heads.
        ({"num_attention_heads": 64}, 24, "num_attention_heads is 64", "16 and 32 do"),
        ({}, 64, "num_attention_heads is 32", "32 does, and no greater number"),
        ({"num_attention_heads": 24, "num_key_value_heads": 8}, 6, "num_key_value_heads is 8", "4 and 8 do"),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused(
    changes: dict[str, Any], ranks: int, why: str, nearest: str
) -> None:
    with pytest.raises(ModelNotPriced, match=rf"among {ranks} devices: {why}\. .*to {ranks}, {nearest}"):
        spec_of(changes, tensor_parallel=ranks)


def test_latents_belong_to_no_head_and_queries_do() -> None:
    with pytest.raises(ModelNotPriced, match="num_attention_heads is 128"):
        spec_of({**MLA, "num_attention_heads": 128, "num_key_value_heads": 128}, tensor_parallel=10)


def test_latents_are_kept_by_every_rank() -> None:
    assert spec_of(MLA, tensor_parallel=8).growing_bytes_per_token == spec_of(MLA).growing_bytes_per_token


def test_a_group_of_a_state_space_is_kept_by_every_rank_that_reads_it() -> None:
    config = {
        "layer_types": ["mamba"] * 32,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
    }
    state, convolution, of_group = 8 * 64 * 128 * 4, 8 * 64 * 3 * 2, 2 * 128 * 3 * 2
    for ranks in (1, 2, 8):
        price = spec_of(config, tensor_parallel=ranks).fixed_bytes_per_sequence
        assert price == 32 * ((state + convolution) // ranks + of_group)
    # Sixteen ranks for eight heads: two of them keep the same head.
    assert spec_of(config, tensor_parallel=16).fixed_bytes_per_sequence == price


def test_layers_that_read_pictures_keep_nothing_of_a_text() -> None:
    assert spec_of({"cross_attention_layers": [3, 8]}).growing_bytes_per_token == 30 * 4096


@pytest.mark.parametrize("options", [{"kv_dtype": "bf16"}, {"tensor_parallel": 0}, {"model_dtype": "fp8"}])
def test_options_that_mean_nothing_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bf16|at least 1|does not run in"):
        spec_of({}, **options)


# -- what can't be priced ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"is_decoder": False}, "is_decoder"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"num_kv_shared_layers": 15}, "num_kv_shared_layers"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types: layer 0 is 'linear_attention'"),
        ({"hidden_size": 4100, "head_dim": None}, "head_dim"),
        ({"model_type": "xlnet"}, "mem_len"),
    ],
)
def test_refused_by_name_with_the_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelNotPriced, match=rf"{config.get('model_type', 'llama')}.*{field}"):
        spec_of(config)


# -- of all of them ------------------------------------------------------------------------------------------

heads = st.sampled_from([1, 2, 4, 8])
widths = st.integers(1, 5).map(lambda n: 16 * n)
reaches = st.integers(1, 40)
attention = st.one_of(
    st.builds(LayerCache, st.just("full"), heads, widths, widths),
    st.builds(LayerCache, st.just("sliding"), heads, widths, widths, reach=reaches),
    st.builds(LayerCache, st.just("chunked"), heads, widths, widths, reach=reaches),
)
states = st.lists(
    st.builds(
        StateTensor, st.just("state"), heads, st.integers(1, 99), st.sampled_from(["float32", "model"])
    ),
    min_size=1,
    max_size=2,
).map(tuple)
caches = st.one_of(
    attention,
    st.builds(
        LayerCache, st.just("latent"), latent_dim=widths, rope_dim=widths, stride=st.sampled_from([1, 4])
    ),
    st.builds(LayerCache, st.just("recurrent"), state=states),
    st.just(LayerCache("shared")),
)
kv_dtypes = st.sampled_from(list(KV_DTYPES))


def made_of(layers: Sequence[LayerCache], kv_dtype: str = "bfloat16", ranks: int = 1) -> KVCacheSpec:
    groups = tuple(
        LayerGroup(
            cache, tuple(i for i, other in enumerate(layers) if other == cache), kv_dtype, "bfloat16", ranks
        )
        for cache in dict.fromkeys(layers)
    )
    return KVCacheSpec("made", groups, kv_dtype, ranks)


specs = st.builds(made_of, st.lists(caches, min_size=1, max_size=5), kv_dtypes)


@given(specs, st.integers(0, 100), st.integers(0, 100))
def test_price_never_falls_with_tokens(spec: KVCacheSpec, a: int, b: int) -> None:
    assert spec.sequence_bytes(min(a, b)) <= spec.sequence_bytes(max(a, b))


@given(st.lists(caches, min_size=1, max_size=5), kv_dtypes, st.integers(0, 100))
def test_price_is_the_sum_of_its_layers(layers: list[LayerCache], kv_dtype: str, tokens: int) -> None:
    alone = sum(made_of([layer], kv_dtype).sequence_bytes(tokens) for layer in layers)
    assert made_of(layers, kv_dtype).sequence_bytes(tokens) == alone


@given(specs, st.integers(1, 100), st.integers(0, 10**6))
def test_max_sequences_fit_and_one_more_does_not(spec: KVCacheSpec, tokens: int, budget: int) -> None:
    most = spec.max_sequences(tokens, budget)
    if most is None:
        assert spec.sequence_bytes(tokens) == 0
    else:
        assert most * spec.sequence_bytes(tokens) <= budget < (most + 1) * spec.sequence_bytes(tokens)


@given(specs, st.integers(1, 20), st.integers(0, 10**6), st.integers(1, 200))
def test_the_longest_context_fits_and_one_more_does_not(
    spec: KVCacheSpec, sequences: int, budget: int, limit: int
) -> None:
    longest = spec.longest_context(sequences, budget, limit)
    if longest:
        assert sequences * spec.sequence_bytes(longest) <= budget
    if longest < limit:
        assert sequences * spec.sequence_bytes(longest + 1) > budget


@given(
    st.lists(attention, min_size=1, max_size=4), kv_dtypes, st.sampled_from([1, 2, 4, 8]), st.integers(1, 99)
)
def test_the_ranks_shares_add_up(layers: list[LayerCache], kv_dtype: str, ranks: int, tokens: int) -> None:
    assume(all(layer.kv_heads % ranks == 0 for layer in layers))
    share = made_of(layers, kv_dtype, ranks).sequence_bytes(tokens)
    assert ranks * share == made_of(layers, kv_dtype).sequence_bytes(tokens)


@given(heads, st.integers(1, 32))
def test_no_head_is_left_out_and_none_is_kept_without_need(count: int, ranks: int) -> None:
    each = heads_per_rank(count, ranks)
    if each is None:
        assert count % ranks
        assert ranks % count
    else:
        assert each * ranks >= count
        assert each == 1 or each * ranks == count


windows = st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=4)


@given(windows, st.integers(1, 17), st.integers(1, 200))
def test_what_is_allocated_covers_what_is_needed(
    windows: list[int | None], block_size: int, tokens: int
) -> None:
    layers = [LayerCache("full" if w is None else "sliding", 2, 16, 16, reach=w) for w in windows]
    spec = made_of(layers)
    layout = BlockLayout.from_spec(spec, block_size=block_size)
    allocated = layout.sequence_blocks(tokens) * layout.block_bytes
    assert allocated >= spec.sequence_bytes(tokens)
    # And by no more than the block that the last token began, and one that a window straddles, of each layer.
    assert allocated - spec.sequence_bytes(tokens) < 2 * block_size * len(layers) * 2 * 2 * 16 * 2


@given(st.lists(attention, min_size=1, max_size=4), st.lists(caches, max_size=2))
def test_what_is_not_served_says_why(plain: list[LayerCache], others: list[LayerCache]) -> None:
    spec = made_of([*plain, *others])
    shapes = {(cache.kv_heads, cache.key_dim) for cache in spec_caches(spec)}
    one_shape = len(shapes) == 1 and all(cache.key_dim == cache.value_dim for cache in spec_caches(spec))
    if one_shape and {group.kind for group in spec.groups} <= {"full", "sliding"}:
        assert BlockLayout.from_spec(spec, block_size=16).bytes_per_token == spec.bytes_per_token
    else:
        with pytest.raises(ModelNotServable, match="does not serve the model type 'made' yet, because"):
            BlockLayout.from_spec(spec, block_size=16)


def spec_caches(spec: KVCacheSpec) -> list[LayerCache]:
    return [group.cache for group in spec.groups]
