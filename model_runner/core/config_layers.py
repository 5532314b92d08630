"""From a configuration to what each of its layers keeps. Attention is read here; states in config_states.

The fields are `transformers`' own, whose configuration classes have given models of a hundred families the
same names for the same things: `layer_types` says what each layer is, `kv_sharing_modes` which of them read
another's cache, `per_layer_config` where layers differ. Nothing is guessed: a kind of layer that is not known
here, or a field that is not a number, is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import gcd
from typing import Any

from model_runner.core.config_fields import ConfigFields
from model_runner.core.config_states import read_state
from model_runner.core.layer_cache import LayerCache, LayerKind, StateTensor

_SLIDING = frozenset({"sliding_attention", "hybrid_sliding", "local"})
_FULL = frozenset({"full_attention", "indexed_attention", "hybrid", "global", "attention"})
_RECURRENT = frozenset({"linear_attention", "conv", "mamba", "recurrent"})
_WITH_STATE = frozenset({"hybrid", "hybrid_sliding"})
_COMPRESSED = frozenset({"heavily_compressed_attention", "compressed_sparse_attention"})
# Fields of models that mix kinds of layers. transformers' classes turn them into layer_types (resolved
# configurations have those); read without them, such a model would be priced as if it were plain.
_NEEDS_LAYER_TYPES = (
    *(
        "state_size",
        "mamba_d_state",
        "mamba_num_heads",
        "ssm_state_size",
        "conv_L_cache",
        "linear_num_value_heads",
        "linear_num_heads",
    ),
    *(
        "lru_width",
        "block_types",
        "hybrid_override_pattern",
        "attn_layer_period",
        "compress_rates",
        "hybrid_layer_ids",
    ),
)
_NOTHING = frozenset({"moe", "mlp", "dummy", "cross_attention"})  # layers that keep nothing of a text


# What transformers can run as a causal language model and is none, or keeps something else.
_NOT_A_DECODER = {
    "blt": (
        "patching_mode",
        "it keeps an entry for each patch of bytes, and the text decides how many those are",
    ),
    "reformer": ("attn_layers", "its attention hashes tokens into buckets, and keeps those"),
    "xlm": ("causal", "it is an encoder"),
    "xlnet": ("mem_len", "it keeps hidden states, not keys and values"),
}
# Their classes inherit the field is_decoder, which is false unless it is set, and run as decoders all the
# same: GPTNeoXModel never reads it, TrOCRForCausalLM sets it.
_ALWAYS_DECODERS = frozenset({"gpt_neox", "gpt_neox_japanese", "trocr"})


def read_layers(config: Mapping[str, Any]) -> list[tuple[int, tuple[LayerCache, ...]]]:
    """(layer, what it keeps: nothing, one cache, or attention's and a state), in the order in which they run.

    A layer that is run several times for each token comes several times. Raises ModelNotPriced, naming the
    model type and the field.
    """
    fields = ConfigFields(config)
    if fields.get("is_encoder_decoder"):
        fields.refuse("is_encoder_decoder", "an encoder-decoder keeps its encoder's keys and values too")
    if fields.get("is_decoder") is False and fields.model_type not in _ALWAYS_DECODERS:
        fields.refuse("is_decoder", "it is an encoder, which keeps no cache")
    if fields.get("use_bidirectional_attention") in (True, "all"):  # "vision" is causal in text
        fields.refuse("use_bidirectional_attention", "its attention is not causal, and keeps no cache")
    if fields.model_type in _NOT_A_DECODER:
        fields.refuse(*_NOT_A_DECODER[fields.model_type])
    sharing = fields.get("kv_sharing_modes")
    if fields.get("num_kv_shared_layers") and not sharing:
        fields.refuse("num_kv_shared_layers", "which layers share is not said without kv_sharing_modes")
    kinds = _layer_types(fields)
    # Mllama's: they read pictures only and are passed over where there are none. The price is that of text.
    for layer in fields.get("cross_attention_layers") or ():
        kinds[layer] = "cross_attention"
    layers = []
    for layer in _order(fields, len(kinds)):
        shared = bool(sharing) and sharing[layer] == "reuse"
        layers.append(
            (layer, (LayerCache("shared"),) if shared else _read_layer(fields, layer, kinds[layer]))
        )
    return layers


def query_heads(config: Mapping[str, Any], layers: Collection[int]) -> dict[str, int]:
    """The fields that give the query heads of these layers, which tensor-parallel ranks must divide; where
    layers differ, the greatest common divisor, which must be divided to divide them all."""
    fields = ConfigFields(config)
    found: dict[str, int] = {}
    for name in ("num_attention_heads", "swa_num_attention_heads"):
        values = [fields.get(name, layer) for layer in layers]
        heads = [value for value in values if isinstance(value, int) and value > 0]
        if heads:
            found[name] = gcd(*heads)
    return found


def has_position_biases(config: Mapping[str, Any]) -> bool:
    """Whether attention adds a bias that grows with the distance (ALiBi): always in Bloom; Falcon and MPT
    say."""
    fields = ConfigFields(config)
    nested = fields.get("attn_config")
    in_nested = isinstance(nested, Mapping) and bool(nested.get("alibi"))
    return fields.model_type == "bloom" or bool(fields.get("alibi")) or in_nested


def _order(fields: ConfigFields, count: int) -> list[int]:
    """The layers in the order in which they run. Looped models run some several times (Dory, Inkling 2)."""
    order = list(range(count))
    if fields.has("n_recurrent_loops"):
        first = fields.count("n_input_layers")
        last, loops = first + fields.count("n_recurrent_layers"), fields.count("n_recurrent_loops")
    elif fields.has("loop_num_passes"):
        first, last = fields.count("loop_layer_index_start"), fields.count("loop_layer_index_end")
        loops = fields.count("loop_num_passes")
    else:
        return order
    return order[:first] + order[first:last] * loops + order[last:]


def _layer_types(fields: ConfigFields) -> list[str]:
    layer_types = (
        fields.get("layer_types") or fields.get("layers_block_type") or fields.get("attention_layers")
    )
    if layer_types is not None:
        if len(layer_types) != fields.count("num_hidden_layers"):
            fields.refuse(
                "layer_types",
                f"it lists {len(layer_types)}, and there are {fields.get('num_hidden_layers')} layers",
            )
        return list(layer_types)
    for field in _NEEDS_LAYER_TYPES:
        if fields.get(field):
            fields.refuse(field, "which layers it is about is not said without layer_types")
    if fields.model_type in ("rwkv", "xlstm"):
        return ["linear_attention"] * fields.count("num_hidden_layers")
    # transformers' own rule for the families without layer_types: a window, or a chunk, is every layer's.
    if fields.get("sliding_window") and fields.get("use_sliding_window") is not False:
        if fields.get("max_window_layers") is not None:
            fields.refuse("max_window_layers", "which layers slide is not said without layer_types")
        kind = "sliding_attention"
    else:
        kind = "chunked_attention" if fields.get("attention_chunk_size") else "full_attention"
    return [kind] * fields.count("num_hidden_layers")


def _read_layer(fields: ConfigFields, layer: int, kind: str) -> tuple[LayerCache, ...]:
    if kind in _NOTHING:
        return ()
    if kind in _RECURRENT:
        return (LayerCache("recurrent", state=read_state(fields, layer, kind)),)
    if kind in _COMPRESSED:
        return _compressed(fields, layer, kind)
    if kind == "chunked_attention":
        attention = _attention(fields, layer, kind, fields.count("attention_chunk_size", layer))
    elif kind in _SLIDING:
        reach = fields.first_count("sliding_window", "window_size", layer=layer)
        attention = _attention(fields, layer, kind, reach)
    elif kind in _FULL:
        attention = _attention(fields, layer, kind, None)
    else:
        fields.refuse("layer_types", f"layer {layer} is {kind!r}, which is not a kind of layer known here")
    if kind in _WITH_STATE:
        return attention, LayerCache("recurrent", state=read_state(fields, layer, kind))
    return (attention,)


def _attention(fields: ConfigFields, layer: int, kind: str, reach: int | None) -> LayerCache:
    indexer_dim = 0
    if kind == "indexed_attention":
        indexer_dim = fields.first_count("index_head_dim", "indexer_head_dim", layer=layer)
    if indexer_dim and (fields.get("indexer_types") or {layer: "full"})[layer] == "shared":
        indexer_dim = 0  # it follows another layer's choice of tokens
    if fields.get("kv_lora_rank", layer):
        # DeepSeek-V2 (arXiv:2405.04434), section 2.1: a latent and one rotated key for all heads.
        return LayerCache(
            "latent",
            latent_dim=fields.count("kv_lora_rank", layer),
            rope_dim=fields.count("qk_rope_head_dim", layer),
            indexer_dim=indexer_dim,
            reach=reach,
        )
    kv_heads, key_dim, value_dim = _heads(fields, layer, slides=kind in _SLIDING)
    name: LayerKind = "full" if reach is None else "chunked" if kind == "chunked_attention" else "sliding"
    return LayerCache(
        name,
        kv_heads,
        key_dim,
        value_dim,
        indexer_dim=indexer_dim,
        reach=reach,
        own_tokens=fields.get("prompt_length") or 0,  # CPM-Ant's
    )


def _heads(fields: ConfigFields, layer: int, *, slides: bool) -> tuple[int, int, int]:
    """(kv_heads, key_dim, value_dim) of one layer."""
    own = ("swa_", "") if slides else ("",)  # sliding layers may have their own shape
    heads = fields.first_count(*(f"{prefix}num_attention_heads" for prefix in own), layer=layer)
    kv_heads = _kv_heads(fields, layer, own, heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"{heads} query heads are not a multiple of {kv_heads}")
    names = [f"{prefix}head_dim" for prefix in own]
    if any(fields.get(name, layer) is not None for name in names):
        key_dim = fields.first_count(*names, layer=layer)
    elif fields.get("dim_head") is not None:
        key_dim = fields.count("dim_head")
    else:
        hidden = fields.count("hidden_size", layer)
        if hidden % heads:
            fields.refuse(
                "head_dim", f"it is not set, and {hidden} hidden units are no multiple of {heads} heads"
            )
        key_dim = hidden // heads
    values = [f"{prefix}v_head_dim" for prefix in own]
    has_own_values = any(fields.get(name, layer) is not None for name in values)
    return kv_heads, key_dim, fields.first_count(*values, layer=layer) if has_own_values else key_dim


def _kv_heads(fields: ConfigFields, layer: int, own: tuple[str, ...], heads: int) -> int:
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1  # Falcon, GPT-BigCode
    nested = fields.get("attn_config")  # DBRX
    if isinstance(nested, Mapping) and nested.get("kv_n_heads"):
        return int(nested["kv_n_heads"])
    if fields.model_type == "falcon":
        return fields.count("num_kv_heads") if fields.get("new_decoder_architecture") else heads
    names = [f"{prefix}num_key_value_heads" for prefix in own]
    if all(fields.get(name, layer) is None for name in names):
        return heads
    kv_heads = fields.first_count(*names, layer=layer)
    if fields.model_type == "mimo_v2_flash" and len(own) > 1:
        return 2 * kv_heads  # transformers' MiMoV2FlashAttention: sliding layers have twice as many
    return kv_heads


def _compressed(fields: ConfigFields, layer: int, kind: str) -> tuple[LayerCache, ...]:
    """DeepSeek-V4's: a window whose values are its keys, entries that each stand for many tokens, and the
    tokens that wait for the next entry (transformers' DeepseekV4HCACache and DeepseekV4CSACache).

    What waits is fixed here at its most: `rate` tokens' inputs and gates. Sparse layers compress two
    overlapping series, remember the last window of one, and do all of it a second time for the indexer.
    """
    rate = int(fields.get("compress_rates")[kind])
    head_dim = fields.count("head_dim", layer)
    window = LayerCache("sliding", 1, head_dim, 0, reach=fields.count("sliding_window", layer))
    sparse = kind == "compressed_sparse_attention"
    widths = (head_dim, fields.count("index_head_dim")) if sparse else (head_dim,)
    waiting = sum(2 * width * (rate * 2 + rate if sparse else rate) for width in widths)
    return (
        window,
        LayerCache("latent", latent_dim=head_dim, indexer_dim=sum(widths[1:]), stride=rate),
        LayerCache("recurrent", state=(StateTensor("tokens to be compressed", 1, waiting, "model"),)),
    )
