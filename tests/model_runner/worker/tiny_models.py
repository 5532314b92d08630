"""A tiny model of every type that transformers ships: its own default configuration, made small.

What matters to a cache stays as the defaults have it (which layers there are, how they differ, what they
share); sizes shrink by the rules below, and windows and chunks to 8 tokens, so that 40 show them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

REACH = 8
_MIN_LAYERS, _MAX_LAYERS = 4, 10
_MAX_PARAMETERS = 20_000_000

_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_dim", "emb_dim"), 64),
    **dict.fromkeys(("attention_hidden_size", "lru_width", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(
        ("head_dim", "swa_head_dim", "attention_head_dim", "kv_channels", "dim_head", "rotary_dim"), 16
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dim_ff", "dff"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size"), REACH),
    **dict.fromkeys(("attention_window_size", "local_attention"), REACH),
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "max_position_embeddings": 256,
}
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_NOT_ARGUMENTS = (
    "transformers_version",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "_name_or_path",
    "model_type",
)

# What the rules above can't know: sizes that must agree with each other, and defaults that don't run.
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_KDA = {"linear_num_heads": 2, "linear_head_dim": 16}
_TOWER = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
_TUNED: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _KDA,
    "bamba": {**_MAMBA2, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dory": {
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": None,
        "num_hidden_layers": 4,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        "head_dim": 24,
        "per_layer_config": {
            layer: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 64}
            for layer in (2, 3)
        },
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "gemma3n_text": {
        "intermediate_size": [96] * 10,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 4,
        "activation_sparsity_pattern": [0.0] * 10,
    },
    "gemma4_text": {"per_layer_config": {5: {"head_dim": 32}}},
    "gemma4_unified_text": {"per_layer_config": {5: {"head_dim": 32}}},
    "git": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
        }
    },
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "inkling2_loop_text": {
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "n_layers_per_attn_res_block": 1,
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "num_hidden_layers": 4},
    "kimi_linear": _KDA,
    "lara_mini": _DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "full_attn_idxs": [1, 3]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 16},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    "olmo_hybrid": _DELTA,
    "mllama_text_model": {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
    "phi4_multimodal": {
        "vision_config": {**_TOWER, "num_hidden_layers": 2, "image_size": 28, "crop_size": 28},
        "audio_config": {
            **_TOWER,
            "num_blocks": 2,
            "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64,
            "nemo_conv_channels": 64,
        },
    },
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "qwen4_exp_text": {
        **_DELTA,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 8]},
    "xlnet": {"d_head": 16},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 2, "num_blocks": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 6,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "layers_block_type": None,
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_headdim": 32,
        "n_mamba_heads": 4,
        "mamba_d_state": 16,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1},
}


def decoder_model_types() -> Iterator[str]:
    """Every causal language model of transformers.

    Those that only wrap the language model of another type in the list (gemma3 has gemma3_text), or of any
    (AutoConfig), are left to that type.
    """
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        wrapped = CONFIG_MAPPING[model_type].sub_configs.get("text_config")
        if wrapped is None or (
            wrapped is not AutoConfig and wrapped.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        ):
            yield model_type


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Raises whatever the configuration class raises where it can't be made small."""
    config_class = CONFIG_MAPPING[model_type]
    wrapped = config_class.sub_configs.get("text_config")
    if wrapped is not None:
        return config_class(text_config=_tiny(wrapped).to_dict())
    return _tiny(config_class)


def _tiny(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    fields = _shrunk(config_class().to_dict())
    for name in _NOT_ARGUMENTS:
        fields.pop(name, None)
    config = config_class(**{**fields, **_TUNED.get(config_class.model_type, {})})
    config.use_cache = True
    if hasattr(config, "is_decoder"):
        config.is_decoder = True  # encoders that can be run as decoders are
    return config


def tiny_model(config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """With random weights. Raises ValueError for one that is not tiny."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > _MAX_PARAMETERS:
        raise ValueError(f"it has {parameters:,} parameters")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def _shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    fields = _with_fewer_layers(dict(fields))
    heads = next((fields[n] for n in ("num_attention_heads", "n_head", "n_heads") if fields.get(n)), None)
    fields.pop("per_layer_config", None)
    for name in _KV_HEADS:
        if isinstance(value := fields.get(name), int):
            fields[name] = _SIZES["num_attention_heads"] if value == heads else min(value, 2)
        elif name in fields and name == "num_key_value_heads":
            fields[name] = 2
    for name, value in fields.items():
        if name.endswith("token_id") and isinstance(value, int | list):
            fields[name] = 0
        elif name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            fields[name] = _SIZES[name]
    if fields.get("qk_rope_head_dim") and "head_dim" in fields:
        fields["head_dim"] = fields["qk_rope_head_dim"]
    elif "head_dim" in fields and fields["head_dim"] is None:
        fields["head_dim"] = _SIZES["head_dim"]
    return fields


def _with_fewer_layers(fields: dict[str, Any]) -> dict[str, Any]:
    """As many as it takes for every kind of layer to appear, cut alike from every field that lists them."""
    name = next((n for n in _LAYER_COUNTS if isinstance(fields.get(n), int)), None)
    if name is None:
        return fields
    count = fields[name]
    lists = [n for n, value in fields.items() if isinstance(value, list) and len(value) == count]
    kinds = [json.dumps([fields[n][layer] for n in lists]) for layer in range(count)]
    last_new = max((layer for layer in range(count) if kinds[layer] not in kinds[:layer]), default=0)
    fields[name] = max(_MIN_LAYERS, min(last_new + 1, _MAX_LAYERS))
    for n in lists:
        fields[n] = fields[n][: fields[name]]
    return fields
