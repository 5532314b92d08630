"""How many blocks there will be, and how long a request may be: the wishes against the memory there is."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from model_runner.config import EngineConfig
from model_runner.core.block_layout import BlockLayout
from model_runner.errors import DoesNotFit
from model_runner.sizes import format_size as size


@dataclass(frozen=True, slots=True)
class Plan:
    """The KV cache's size. `num_blocks` is what requests may reserve; the headroom comes on top."""

    max_model_len: int  # tokens
    num_blocks: int
    headroom_blocks: int

    @property
    def blocks_total(self) -> int:
        return self.num_blocks + self.headroom_blocks


def cpu_kv_bytes(config: EngineConfig, available_bytes: int, weights_bytes: int) -> int:
    """What the KV cache may take on a CPU when no size was given: a share of what the weights leave.

    Raises DoesNotFit when the weights alone are more than there is.
    """
    if weights_bytes >= available_bytes:
        raise DoesNotFit(
            f"The model's weights take {size(weights_bytes)}, and only {size(available_bytes)} of memory are "
            "available. Use a smaller model, a smaller --dtype (bfloat16 is half of float32), or more memory."
        )
    return int((available_bytes - weights_bytes) * config.cpu_memory_utilization)


def plan(config: EngineConfig, layout: BlockLayout, kv_bytes: int, context: int | None) -> Plan:
    """Cut `kv_bytes` into blocks, and settle the longest request.

    `context` is the model's own, in tokens, when it declares one. Raises DoesNotFit when one request of
    max_model_len doesn't fit, unless the length was left to choose (`max_model_len_auto`).
    """
    wished = config.max_model_len or context
    if wished is None:
        raise DoesNotFit("The model's config gives no context length: set --max-model-len.")
    if context is not None and wished > context:
        raise DoesNotFit(
            f"--max-model-len {wished} is more than the model's own context of {context} tokens."
        )
    headroom = layout.headroom_blocks(config.max_num_batched_tokens)
    num_blocks = kv_bytes // layout.block_bytes - headroom
    needed = _longest_blocks(layout, wished)
    if needed <= num_blocks:
        return Plan(wished, num_blocks, headroom)
    fits = largest_model_len(layout, num_blocks, wished)
    if config.max_model_len_auto and fits > 0:
        return Plan(fits, num_blocks, headroom)
    shorter = f", or --max-model-len {fits} or less (`auto` chooses it)" if fits else ""
    raise DoesNotFit(
        f"One request of {wished} tokens needs {size(needed * layout.block_bytes)} of KV cache, but only "
        f"{size(max(0, num_blocks) * layout.block_bytes)} are left for requests (of {size(kv_bytes)}, less "
        f"{size(headroom * layout.block_bytes)} kept for prefills in flight). "
        f"Give --kv-cache-memory {_option((needed + headroom) * layout.block_bytes)} or more{shorter}."
    )


def largest_model_len(layout: BlockLayout, num_blocks: int, limit: int) -> int:
    """The longest request that fits, prompt and output together, in tokens; 0 when none does."""
    return bisect_right(range(1, limit + 1), num_blocks, key=lambda tokens: _longest_blocks(layout, tokens))


def _longest_blocks(layout: BlockLayout, max_model_len: int) -> int:
    """What the door asks for a request of the whole context: its last token is never written."""
    return layout.sequence_blocks(max(max_model_len - 1, 1))


def _option(size: int) -> str:
    """Bytes as people write sizes, rounded up: "512MiB"."""
    return f"{-(-size // (1 << 20))}MiB"
