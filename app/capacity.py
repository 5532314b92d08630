"""A plan as plain data: the same keys for `plimsoll plan --format json` and for a running server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model_runner.core.capacity import Plan
from model_runner.core.kv_spec import LayerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a plan is of. None where it is not known, or is not so."""

    model: str
    architecture: str | None
    model_context: int | None  # tokens, as the configuration states
    device: str
    device_memory_bytes: int | None
    weights_parameters: int  # of the whole model
    weights_counted_from: str  # safetensors | gguf | config
    weights_dtype: str  # an element type, "stored" or "packed"
    weights_quantisation: str | None = None
    weights_packing: str | None = None
    weights_uncounted: tuple[str, ...] = ()


def capacity_fields(plan: Plan, about: About, why_not_served: str = "") -> dict[str, Any]:
    """Keys are documented in docs/plan.md. Bytes are of one device, times are seconds."""
    spec, layout = plan.spec, plan.layout
    headroom_bytes = plan.headroom_blocks * layout.block_bytes if layout is not None else 0
    return {
        "model": about.model,
        "model_type": spec.model_type,
        "architecture": about.architecture,
        "model_context": about.model_context,
        "device": about.device,
        "device_memory_bytes": about.device_memory_bytes,
        "memory_bandwidth_bytes_per_second": plan.device.bandwidth,
        "tensor_parallel": spec.tensor_parallel,
        "weights_bytes": plan.weights.total_bytes,
        "weights_expert_bytes": plan.weights.expert_bytes,
        "weights_unread_bytes": plan.weights.unread_bytes,
        "weights_parameters": about.weights_parameters,
        "weights_counted_from": about.weights_counted_from,
        "weights_dtype": about.weights_dtype,
        "weights_quantisation": about.weights_quantisation,
        "weights_packing": about.weights_packing,
        "weights_uncounted": list(about.weights_uncounted),
        "kv_dtype": spec.kv_dtype,
        "kv_cache_bytes": plan.kv_budget_bytes,
        "kv_budget_bytes": max(0, plan.kv_budget_bytes - headroom_bytes),
        "headroom_blocks": plan.headroom_blocks if layout is not None else None,
        "growing_bytes_per_token": spec.growing_bytes_per_token,
        "bytes_per_token": spec.bytes_per_token,
        "fixed_bytes_per_sequence": spec.fixed_bytes_per_sequence,
        "groups": [_group(group) for group in spec.groups],
        "allocated": _allocated(plan, why_not_served),
        "max_sequences": {str(at.context): at.max_sequences for at in plan.contexts},
        "contexts": [
            {
                "context": at.context,
                "cached_tokens": at.cached_tokens,
                "sequence_bytes": at.sequence_bytes,
                "max_sequences": at.max_sequences,
                "allocated_sequence_bytes": at.allocated_bytes,
                "allocated_max_sequences": at.max_sequences_allocated,
                "step_seconds": at.step_seconds,
                "tokens_per_second": at.tokens_per_second,
                "half_ceiling_batch": at.half_ceiling_batch,
            }
            for at in plan.contexts
        ],
        "batches": [
            {
                "sequences": at.sequences,
                "longest_context": at.longest_context,
                "allocated_longest_context": at.longest_context_allocated,
                "step_seconds": at.step_seconds,
                "tokens_per_second": at.tokens_per_second,
            }
            for at in plan.batches
        ],
    }


def _group(group: LayerGroup) -> dict[str, Any]:
    cache = group.cache
    return {
        "kind": group.kind,
        "layers": len(group.layers),
        "reach": group.reach,
        "kv_heads": cache.kv_heads,
        "key_dim": cache.key_dim,
        "value_dim": cache.value_dim,
        "latent_dim": cache.latent_dim,
        "rope_dim": cache.rope_dim,
        "indexer_dim": cache.indexer_dim,
        "bytes_per_token": group.bytes_per_token,
        "state_bytes": group.state_bytes,
    }


def _allocated(plan: Plan, why_not_served: str) -> dict[str, Any]:
    layout = plan.layout
    if layout is None:
        return {"served": False, "reason": why_not_served}
    return {
        "served": True,
        "block_size": layout.block_size,
        "block_bytes": layout.block_bytes,
        "blocks": plan.num_blocks,
        "groups": len(layout.groups),
    }
