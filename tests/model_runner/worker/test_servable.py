"""Models that would be computed wrongly are refused, by name and with the reason, before they serve."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from model_runner.core import block_layout
from model_runner.core.block_layout import BlockGroup, BlockLayout
from model_runner.core.kv_spec import KVCacheSpec
from model_runner.errors import ModelNotPriced, ModelNotServable
from model_runner.worker.model_config import resolved
from model_runner.worker.servable import attention_modules
from tests.model_runner.worker.tiny_models import decoder_model_types, tiny_config


def spec_of(model: Any) -> BlockLayout:
    return BlockLayout.from_spec(
        KVCacheSpec.from_config(model.config.to_dict(), kv_dtype="float32"), block_size=4
    )


def plain_spec(layers: int = 2, kv_heads: int = 4, head_dim: int = 16) -> BlockLayout:
    return BlockLayout((BlockGroup("full", tuple(range(layers)), kv_heads, head_dim),), 4, 4)


def tiny(model_type: str, **config: Any) -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, vocab_size=64, **config)).eval()


def test_modules_come_in_layer_order_and_the_model_is_set(families: Any) -> None:
    model = families.make("gemma3_text")
    modules = attention_modules(model, spec_of(model))
    assert modules == [layer.self_attn for layer in model.model.layers]
    assert model.config._attn_implementation == "plimsoll_paged"


def test_position_biases_are_refused() -> None:
    model = tiny("bloom", hidden_size=64, n_layer=2, n_head=4)
    with pytest.raises(ModelNotServable, match="BloomForCausalLM can't be served"):
        attention_modules(model, plain_spec())


def test_recurrent_layers_are_refused() -> None:
    model = tiny("mamba", hidden_size=64, num_hidden_layers=2, state_size=4)
    with pytest.raises(ModelNotServable, match="MambaForCausalLM can't be served"):
        attention_modules(model, plain_spec())


def test_chunked_attention_is_refused() -> None:
    model = tiny(
        "llama4_text",
        hidden_size=64,
        intermediate_size=96,
        intermediate_size_mlp=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        attention_chunk_size=8,
        num_local_experts=2,
        interleave_moe_layer_step=1,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    with pytest.raises(ModelNotServable, match="layer 0 does not attend to exactly all earlier tokens"):
        attention_modules(model, plain_spec())


def test_latent_attention_is_refused() -> None:
    model = tiny(
        "deepseek_v3",
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
    )
    with pytest.raises(ModelNotServable, match="layer 0 has keys and values of"):
        attention_modules(model, plain_spec())


@pytest.mark.parametrize("error", [-1, 1])
def test_another_window_than_the_priced_one_is_refused(families: Any, error: int) -> None:
    model = families.make("mistral")
    layout = spec_of(model)
    groups = tuple(dataclasses.replace(group, window=group.window + error) for group in layout.groups)
    with pytest.raises(ModelNotServable, match=f"does not attend to exactly the last {10 + error} tokens"):
        attention_modules(model, dataclasses.replace(layout, groups=groups))


def test_a_window_priced_as_full_is_refused(families: Any) -> None:
    model = families.make("phi3")
    with pytest.raises(ModelNotServable, match=r"priced as keeping them all|all earlier tokens"):
        attention_modules(model, plain_spec(4, 2))


def test_bidirectional_attention_is_refused(families: Any) -> None:
    model = families.make("llama")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ModelNotServable, match="layer 1 does not attend causally"):
        attention_modules(model, plain_spec(4, 2))


def test_unknown_arguments_are_refused(families: Any) -> None:
    model = families.make("llama")
    attention = model.model.layers[2].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs, position_bias=torch.ones(1))
    with pytest.raises(ModelNotServable, match=r"layer 2 passes arguments .* not supported: position_bias"):
        attention_modules(model, plain_spec(4, 2))


def test_fewer_calls_than_layers_are_refused(families: Any) -> None:
    model = families.make("llama")
    with pytest.raises(ModelNotServable, match="it has 5 layers and calls transformers' attention 4 times"):
        attention_modules(model, plain_spec(5, 2))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", sorted(decoder_model_types()))
def test_what_the_layout_takes_can_be_run_and_what_it_refuses_by_name_can_not(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every model type that transformers ships: a plan and a server say the same."""
    config = tiny_config(model_type).get_text_config(decoder=True)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        pytest.skip("there is no model of its decoder alone, which a plan says")
    known = config.model_type in block_layout._WHY_NOT_MODEL
    with monkeypatch.context() as without_names:
        without_names.setattr(block_layout, "_WHY_NOT_MODEL", {})
        try:
            spec = KVCacheSpec.from_config(resolved(config), kv_dtype="float32")
            layout = BlockLayout.from_spec(spec, block_size=16)
        except (ModelNotPriced, ModelNotServable):
            assert not known
            return
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if not known:
        assert len(attention_modules(model, layout)) == len({n for g in layout.groups for n in g.layers})
        return
    with pytest.raises(ModelNotServable):
        attention_modules(model, layout)
    with pytest.raises(ModelNotServable, match=f"does not serve the model type '{config.model_type}'"):
        BlockLayout.from_spec(spec, block_size=16)
