"""From a configuration to the fixed state of a recurrent layer: its elements, by what ranks divide.

A causal convolution of width k needs the k - 1 inputs before the next one. Recurrent states are sums over the
whole context and are kept in float32, as transformers and llama.cpp keep them; convolution states as the
model runs.
"""

from __future__ import annotations

from collections.abc import Callable

from model_runner.core.config_fields import ConfigFields
from model_runner.core.layer_cache import StateTensor

_State = tuple[StateTensor, ...]


def read_state(fields: ConfigFields, layer: int, kind: str) -> _State:
    """The state of one layer of the given kind. Raises ModelNotPriced where the fields tell of none."""
    by_type = _BY_MODEL_TYPE.get(fields.model_type)
    if by_type is not None:
        return by_type(fields, kind)
    if kind == "conv":
        return _convolution("convolution", fields.count("hidden_size"), fields.count("conv_L_cache"))
    if fields.has("linear_num_value_heads"):
        return _gated_delta(fields)
    if fields.has("linear_num_heads"):
        return _kimi_delta(fields)
    if fields.has("lru_width"):
        return _rg_lru(fields)
    names = next((names for names in _MAMBA2_NAMES if fields.has(*names)), None)
    if names is not None:
        return _mamba2(fields, *names)
    if fields.has("mamba_d_state"):
        return _mamba(fields, _expanded(fields), "mamba_d_state", "mamba_d_conv")
    return fields.refuse(
        "layer_types", f"layer {layer} is {kind!r}, and no field known here gives the size of its state"
    )


def _convolution(name: str, heads: int, width: int, *, per_head: int = 1, float32: bool = False) -> _State:
    """Over `heads` of `per_head` channels: ranks divide whole heads, or groups, where the channels have
    them."""
    if width < 2:
        return ()
    return (StateTensor(name, heads, per_head * (width - 1), "float32" if float32 else "model"),)


def _mamba(fields: ConfigFields, channels: int, state: str, width: str) -> _State:
    """Gu & Dao, "Mamba" (arXiv:2312.00752): each channel has `state` numbers, behind a convolution."""
    recurrent = StateTensor("state", channels, fields.count(state), "float32")
    return (recurrent, *_convolution("convolution", channels, fields.count(width)))


def _expanded(fields: ConfigFields) -> int:
    return fields.count("mamba_expand") * fields.count("hidden_size")


def _mamba2(fields: ConfigFields, heads: str, head_dim: str, groups: str, state: str, width: str) -> _State:
    """Dao & Gu, "Transformers are SSMs" (arXiv:2405.21060): heads · head_dim · state numbers; the convolution
    also passes over the B and C of each group."""
    head_count, head_size, state_size = fields.count(heads), fields.count(head_dim), fields.count(state)
    group_count, columns = fields.count(groups), fields.count(width)
    return (
        StateTensor("state", head_count, head_size * state_size, "float32"),
        *_convolution("convolution", head_count, columns, per_head=head_size),
        *_convolution("convolution of B", group_count, columns, per_head=state_size),
        *_convolution("convolution of C", group_count, columns, per_head=state_size),
    )


_MAMBA2_NAMES = (  # heads, head size, groups, state, convolution width, as the families spell them
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
    ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
)


def _gated_delta(fields: ConfigFields) -> _State:
    """Yang et al., "Gated Delta Networks" (arXiv:2412.06464): one key_dim · value_dim matrix a value head,
    behind convolutions over queries, keys and values."""
    key_heads, key_dim = fields.count("linear_num_key_heads"), fields.count("linear_key_head_dim")
    heads, value_dim = fields.count("linear_num_value_heads"), fields.count("linear_value_head_dim")
    width = fields.count("linear_conv_kernel_dim")
    return (
        StateTensor("state", heads, key_dim * value_dim, "float32"),
        *_convolution("convolution of queries", key_heads, width, per_head=key_dim),
        *_convolution("convolution of keys", key_heads, width, per_head=key_dim),
        *_convolution("convolution of values", heads, width, per_head=value_dim),
    )


def _kimi_delta(fields: ConfigFields) -> _State:
    """Kimi Linear (arXiv:2510.26692): one head_dim · head_dim matrix a head, behind three convolutions."""
    heads, head_dim = fields.count("linear_num_heads"), fields.count("linear_head_dim")
    width = fields.count("linear_conv_kernel_dim")
    return (
        StateTensor("state", heads, head_dim * head_dim, "float32"),
        *(
            tensor
            for name in ("queries", "keys", "values")
            for tensor in _convolution(f"convolution of {name}", heads, width, per_head=head_dim)
        ),
    )


def _rg_lru(fields: ConfigFields) -> _State:
    """De et al., "Griffin" (arXiv:2402.19427): one number a channel, behind a convolution."""
    width = fields.count("lru_width")
    recurrent = StateTensor("state", width, 1, "float32")
    return (recurrent, *_convolution("convolution", width, fields.count("conv1d_width")))


def _lightning(fields: ConfigFields) -> _State:
    """MiniMax-01 (arXiv:2501.08313): one head_dim · head_dim matrix a head, kept as the model runs."""
    heads = fields.count("num_attention_heads")
    head_dim = fields.get("head_dim") or fields.count("hidden_size") // heads
    return (StateTensor("state", heads, head_dim * head_dim, "model"),)


def _rwkv(fields: ConfigFields) -> _State:
    """Peng et al., "RWKV" (arXiv:2305.13048): the last input of both halves of a block, and numerator,
    denominator and maximum of the attention."""
    hidden = fields.count("hidden_size")
    attention = fields.first_count("attention_hidden_size", "hidden_size")
    return (StateTensor("last inputs", hidden, 2, "model"), StateTensor("state", attention, 3, "float32"))


def _xlstm(fields: ConfigFields) -> _State:
    """Beck et al., "xLSTM" (arXiv:2405.04517): the mLSTM's matrix, its normaliser and its stabiliser;
    transformers keeps them as the model runs."""
    keys, values = fields.count("qk_head_dim"), fields.count("v_head_dim")
    return (StateTensor("state", fields.count("num_heads"), keys * values + keys + 1, "model"),)


def _convolved_attention(fields: ConfigFields) -> _State:
    """Zaya's: two convolutions over queries and keys, one after the other, and half a value of the last
    token."""
    heads, kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    head_dim = fields.count("head_dim")
    width = fields.count("cca_time0") + fields.count("cca_time1") - 1
    return (
        *_convolution("convolution of queries", heads, width, per_head=head_dim),
        *_convolution("convolution of keys", kv_heads, width, per_head=head_dim),
        StateTensor("last value", kv_heads, head_dim // 2, "model"),
    )


def _short_convolutions(fields: ConfigFields, kind: str) -> _State:
    """Inkling's: over keys, over values, and over what attention and the feed-forward give; kept in
    float32."""
    own = "swa_" if kind == "hybrid_sliding" else ""
    keys = fields.count(f"{own}num_key_value_heads") * fields.count(f"{own}head_dim")
    width, hidden = fields.count("conv_kernel_size"), fields.count("hidden_size")
    channels = {"keys": keys, "values": keys, "attention": hidden, "the feed-forward": hidden}
    return tuple(
        tensor
        for name, count in channels.items()
        for tensor in _convolution(f"convolution of {name}", count, width, float32=True)
    )


_BY_MODEL_TYPE: dict[str, Callable[[ConfigFields, str], _State]] = {
    **dict.fromkeys(
        ("falcon_mamba", "mamba"),
        lambda f, _: _mamba(f, f.count("intermediate_size"), "state_size", "conv_kernel"),
    ),
    **dict.fromkeys(("inkling_text", "inkling2_text", "inkling2_loop_text"), _short_convolutions),
    "minimax": lambda f, _: _lightning(f),
    "rwkv": lambda f, _: _rwkv(f),
    "xlstm": lambda f, _: _xlstm(f),
    "zamba": lambda f, _: _mamba(f, _expanded(f), "mamba_d_state", "mamba_d_conv"),
    "zaya": lambda f, _: _convolved_attention(f),
}
