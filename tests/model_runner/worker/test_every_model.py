"""The price list against transformers' own caches, for every decoder that transformers ships and can build
tiny.

Each model runs 40 tokens through its own cache, past every window. The bytes of that cache's tensors must be
what the price list says the model needs, or differ by a rule below: something that transformers keeps beside
the need, or does not keep, whatever the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from model_runner.core.kv_spec import KVCacheSpec, LayerGroup
from model_runner.errors import ModelNotPriced
from model_runner.worker.model_config import resolved
from tests.model_runner.worker.tiny_models import decoder_model_types, tiny_config, tiny_model

TOKENS, STEPS = 40, 8

WINDOW = "a sliding layer keeps window - 1 tokens: the query's own need not be kept"
COLUMNS = "a convolution keeps as many columns as it is wide, one more than it needs"
UNDECLARED = "a layer that is not declared as sliding keeps every token"
INDEXER = "an indexer's keys are kept in the type that it computes in, float32"
WAITING = "tokens that wait to be compressed are kept as they come; the price is of the most there can be"
NO_CACHE = "the model keeps no cache, and computes everything again for each token"

# Not run: too large whatever is shrunk, or not a model of text alone.
NOT_BUILT = {
    "blt": "what it keeps follows from the text, and it is refused",
    "gemma4_assistant": "it drafts for another model, and reads that one's cache",
    "gemma4_unified_assistant": "it drafts for another model, and reads that one's cache",
}
AT_ONCE = ("cpmant",)  # puts its own prompt before whatever it is given, and can't be given one more token
NOT_DECODERS = ("reformer", "xlm", "xlnet")


@dataclass
class Comparison:
    """What transformers is expected to keep, by the price list and the rules that apply."""

    expected_bytes: int = 0
    rules: set[str] = field(default_factory=set)


def run(model: nn.Module, config: Any) -> Any:
    """TOKENS tokens through the model's own cache, the last STEPS one by one; None where it has none."""
    tokens = torch.arange(TOKENS)[None] % 200 + 1
    steps = 0 if config.model_type in AT_ONCE else STEPS
    prompt, rest = tokens.split([TOKENS - steps, steps], dim=1)
    given: dict[str, Any] = {}
    if config.model_type == "recurrent_gemma":  # it fills a cache without giving it back
        given["cache"] = DynamicCache(config=config)
    with torch.inference_mode():
        for part in (prompt, *(rest.split(1, dim=1) if steps else ())):
            output = model(input_ids=part, use_cache=True, **given)
            name = next((name for name in _OUTPUTS if getattr(output, name, None) is not None), None)
            given = given if name is None else {name: getattr(output, name)}
            if not given:
                return None
    if config.model_type == "recurrent_gemma":
        return [given["cache"], [vars(m)[n] for m in model.modules() for n in _STATES if n in vars(m)]]
    return next(iter(given.values()))


_OUTPUTS = ("cache", "past_key_values", "state", "cache_params")
_STATES = ("conv1d_state", "recurrent_states")


def tensors(holder: Any) -> Iterator[Tensor]:
    if isinstance(holder, Tensor):
        yield holder
    elif isinstance(holder, list | tuple):
        for item in holder:
            yield from tensors(item)
    elif isinstance(holder, dict):
        yield from tensors(list(holder.values()))
    elif type(holder).__module__.startswith("transformers") and not hasattr(holder, "model_type"):
        yield from tensors(vars(holder))


def held_bytes(cache: Any) -> int:
    """Of all its tensors of numbers, not of counters; two that share their memory count once."""
    held = [t for t in tensors(cache) if t.is_floating_point()]
    storages = {t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in held}
    return sum(storages.values())


def cache_layers(cache: Any) -> list[Any]:
    cache = cache[0] if isinstance(cache, list) and isinstance(cache[0], DynamicCache) else cache
    cache = getattr(cache, "self_attention_cache", cache)
    return list(getattr(cache, "layers", []))


def compare(spec: KVCacheSpec, cache: Any) -> Comparison:
    comparison = Comparison()
    layers = cache_layers(cache)
    for group in spec.groups:
        for layer in group.layers:
            kept = layers[layer] if layer < len(layers) else None
            comparison.expected_bytes += (
                expected_entries(group, kept, comparison) * group.bytes_per_entry // len(group.layers)
            )
            comparison.expected_bytes += expected_state(group, kept, comparison)
    for layer in layers:
        keys = getattr(layer, "indexer_keys", None)
        if keys is not None and keys.dtype != torch.bfloat16:
            assert keys.dtype == torch.float32
            comparison.expected_bytes += keys.numel() * 2
            comparison.rules.add(INDEXER)
    return comparison


def expected_entries(group: LayerGroup, kept: Any, comparison: Comparison) -> int:
    if group.reach is None:
        return (TOKENS + group.cache.own_tokens) // group.cache.stride
    if isinstance(kept, DynamicSlidingWindowLayer):
        comparison.rules.add(WINDOW)
        return min(TOKENS, group.reach - 1)
    comparison.rules.add(UNDECLARED)
    return TOKENS


def expected_state(group: LayerGroup, kept: Any, comparison: Comparison) -> int:
    """Bytes of one layer's state."""
    waiting = getattr(kept, "buffer_kv", None)
    if waiting is not None and group.cache.state:
        comparison.rules.add(WAITING)
        names = ("buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate")
        held = held_bytes([getattr(kept, name, {}) for name in names])
        assert held <= group.state_bytes // len(group.layers)
        return held
    total = group.state_bytes // len(group.layers)
    convolutions = [t for t in group.cache.state if t.name.startswith("convolution")]
    kept_columns = [t for t in getattr(kept, "conv_states", {}).values() if t is not None]
    priced = sum(t.heads * t.elements_per_head for t in convolutions)
    columns = {t.shape[-1] for t in kept_columns}
    if len(columns) == 1 and priced:
        (width,) = columns
        if priced * width == sum(t.numel() for t in kept_columns) * (width - 1):
            comparison.rules.add(COLUMNS)
            total += held_bytes(kept_columns) // width
    return total


@pytest.fixture(scope="module")
def table() -> Iterator[Counter[str]]:
    """Counts what became of each model, and prints it at the end (pytest -s)."""
    outcomes: Counter[str] = Counter()
    yield outcomes
    print(f"\n{sum(outcomes.values())} models of transformers:", *sorted(outcomes.items()), sep="\n  ")


MODEL_TYPES = [
    t for t in decoder_model_types() if t not in NOT_BUILT and not CONFIG_MAPPING[t]().is_encoder_decoder
]


@pytest.mark.filterwarnings("ignore")  # transformers' own, about models that nobody trains any more
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_price_is_what_transformers_keeps(model_type: str, table: Counter[str]) -> None:
    config = tiny_config(model_type)
    if model_type in NOT_DECODERS:
        with pytest.raises(ModelNotPriced, match=model_type):
            KVCacheSpec.from_config(resolved(config))
        table["not priced: not a decoder of keys and values"] += 1
        return
    spec = KVCacheSpec.from_config(resolved(config))
    cache = run(tiny_model(config, torch.bfloat16), config)
    if cache is None:
        table[f"explained: {NO_CACHE}"] += 1
        return
    comparison = compare(spec, cache)
    assert held_bytes(cache) == comparison.expected_bytes
    if not comparison.rules:
        assert spec.sequence_bytes(TOKENS) == comparison.expected_bytes
    table["explained: " + "; ".join(sorted(comparison.rules)) if comparison.rules else "exact"] += 1


def test_what_depends_on_the_text_is_refused() -> None:
    with pytest.raises(ModelNotPriced, match="'blt' can't be priced by its patching_mode"):
        KVCacheSpec.from_config(resolved(CONFIG_MAPPING["blt"]()))


ENCODERS_UNLESS_TOLD = [
    t
    for t in MODEL_TYPES
    if getattr(CONFIG_MAPPING[t](), "is_decoder", None) is False and t not in NOT_DECODERS
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ENCODERS_UNLESS_TOLD)
def test_what_is_no_decoder_is_refused_and_only_that(model_type: str) -> None:
    """The field is false by default in families that read it, and keep no cache then, and in some that
    don't."""
    config = tiny_config(model_type)
    config.is_decoder = False
    if run(tiny_model(config, torch.bfloat16), config) is None:
        with pytest.raises(ModelNotPriced, match="is_decoder"):
            KVCacheSpec.from_config(resolved(config))
    else:
        assert KVCacheSpec.from_config(resolved(config)).growing_bytes_per_token > 0
