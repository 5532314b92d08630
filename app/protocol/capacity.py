"""What clients read of capacity and of admission checks."""

from __future__ import annotations

from typing import Literal

from app.protocol.responses import Answer, ErrorBody


class CapacityGroup(Answer):
    kind: Literal["full", "sliding"]
    layers: int
    reach: int | None  # the most tokens kept; null keeps all
    kv_heads: int
    key_dim: int
    value_dim: int
    latent_dim: int
    rope_dim: int
    indexer_dim: int
    bytes_per_token: int
    state_bytes: int


class Allocated(Answer):
    served: Literal[True]
    block_size: int
    block_bytes: int
    blocks: int
    groups: int


class CapacityAtContext(Answer):
    context: int
    cached_tokens: int
    sequence_bytes: int
    max_sequences: int | None
    allocated_sequence_bytes: int
    allocated_max_sequences: int
    step_seconds: float | None
    tokens_per_second: float | None
    half_ceiling_batch: float | None


class CapacityAtBatch(Answer):
    sequences: int
    longest_context: int
    allocated_longest_context: int
    step_seconds: float | None
    tokens_per_second: float | None


class Capacity(Answer):
    object: Literal["capacity"]
    model: str
    model_type: str
    architecture: str | None
    model_context: int | None
    device: str
    device_memory_bytes: int | None
    memory_bandwidth_bytes_per_second: float | None
    tensor_parallel: int
    weights_bytes: int
    weights_expert_bytes: int
    weights_unread_bytes: int
    weights_parameters: int
    weights_counted_from: Literal["safetensors", "gguf", "config"]
    weights_dtype: str
    weights_quantisation: str | None
    weights_packing: str | None
    weights_uncounted: list[str]
    max_model_len: int
    max_num_seqs: int
    kv_dtype: str
    kv_cache_bytes: int
    kv_budget_bytes: int
    headroom_blocks: int
    growing_bytes_per_token: int
    bytes_per_token: int
    fixed_bytes_per_sequence: int
    groups: list[CapacityGroup]
    allocated: Allocated
    max_sequences: dict[str, int | None]
    contexts: list[CapacityAtContext]
    batches: list[CapacityAtBatch]
    reserved_bytes: int
    used_bytes: int
    free_bytes: int
    running_requests: int
    waiting_requests: int


class PricedGroup(Answer):
    kind: Literal["full", "sliding"]
    reach: int | None
    layers: int
    blocks: int
    bytes: int


class AdmissionCheck(Answer):
    object: Literal["admission.check"]
    decision: Literal["admitted", "queued", "rejected"]
    status: int  # of the answer that the request would get, if it ends well where it is let in
    error: ErrorBody | None
    predicted_wait_seconds: float | None
    retry_after_seconds: float | None
    prompt_tokens: list[int]
    max_tokens: int
    n: int
    projected_bytes: int
    groups: list[PricedGroup]
    kv_budget_bytes: int
    free_bytes: int
    largest_max_tokens: int
    largest_max_tokens_now: int
