"""What the door says to those it turns away: the reason, the numbers, and when to come back."""

from __future__ import annotations

from collections.abc import Sequence

from model_runner.core.admission import AdmissionController, Rejected
from model_runner.core.block_layout import BlockLayout
from model_runner.core.ledger import Ask
from model_runner.errors import (
    KVCacheBudgetExceeded,
    LoadError,
    PlimsollError,
    QueueFull,
    QueueTimeout,
    Reason,
    Shortage,
    TenantOverLimit,
    TenantQueueFull,
    WaitTooLong,
)
from model_runner.sizes import format_size as size


def price_blocks(layout: BlockLayout, prompt_tokens: Sequence[int], max_tokens: int, n: int) -> int:
    """Blocks of a whole request: one prompt length for each of its prompts, n choices for each."""
    return sum(layout.request_blocks(tokens, max_tokens, n) for tokens in prompt_tokens)


def largest_max_tokens(
    layout: BlockLayout, prompt_tokens: Sequence[int], n: int, *, budget_blocks: int, limit: int
) -> int:
    """The largest max_tokens, at most `limit`, at which the request could be admitted; 0 if none."""
    if len(prompt_tokens) == 1:
        return layout.largest_max_tokens(prompt_tokens[0], n, budget_blocks, limit)
    fits, too_many = 0, limit + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if price_blocks(layout, prompt_tokens, middle, n) <= budget_blocks:
            fits = middle
        else:
            too_many = middle
    return fits


def never_fits(
    layout: BlockLayout,
    prompt_tokens: Sequence[int],
    max_tokens: int,
    n: int,
    *,
    budget_blocks: int,
    of_tenant: bool = False,
) -> KVCacheBudgetExceeded:
    """`budget_blocks` are the server's; or, `of_tenant`, all that this tenant may reserve."""
    required = price_blocks(layout, prompt_tokens, max_tokens, n) * layout.block_bytes
    budget = budget_blocks * layout.block_bytes
    largest = largest_max_tokens(layout, prompt_tokens, n, budget_blocks=budget_blocks, limit=max_tokens)
    advice = (
        f"The largest max_tokens that would fit is {largest}."
        if largest
        else "Not even one token would fit: shorten the prompt, or ask for fewer prompts or choices."
    )
    whole = "all that this tenant may reserve" if of_tenant else "the server's whole budget"
    return KVCacheBudgetExceeded(
        f"This request needs {size(required)} of KV cache ({required} bytes) and {whole} "
        f"is {size(budget)} ({budget} bytes). {advice}",
        required_bytes=required,
        budget_bytes=budget,
        largest_max_tokens=largest,
    )


def come_back(
    rejected: Rejected, ask: Ask, admission: AdmissionController, block_bytes: int
) -> PlimsollError:
    """The error for a request that could run, but not now."""
    wait = rejected.predicted_wait_seconds
    shortage = Shortage(ask.blocks * block_bytes, admission.free_blocks * block_bytes, wait)
    need = f"This request needs {size(shortage.required_bytes)} of KV cache"
    needs = f"{need}; {size(shortage.free_bytes)} of {size(admission.num_blocks * block_bytes)} is free"
    if admission.policy.grows:
        needs += " now, before those that run have grown,"
    then = f"There should be room for it in {wait:.1f} seconds."
    if rejected.reason is Reason.TENANT_OVER_LIMIT:
        left = size(max(admission.shares.left(ask.tenant), 0) * block_bytes)
        return TenantOverLimit(
            f"{need}, and this tenant's requests leave {left} of what they may reserve together. {then}",
            retry_after_seconds=wait,
            shortage=shortage,
        )
    if rejected.reason is Reason.TENANT_QUEUE_FULL:
        queued = admission.queue_lengths().get(ask.tenant, 0)
        return TenantQueueFull(
            f"{needs}, and as many of this tenant's requests wait as may ({queued}). {then}",
            retry_after_seconds=wait,
            shortage=shortage,
        )
    if rejected.reason is Reason.QUEUE_FULL:
        return QueueFull(
            f"{needs} and the queue is full ({admission.queue_length} requests). {then}",
            retry_after_seconds=wait,
            shortage=shortage,
        )
    assert rejected.reason is Reason.WAIT_TOO_LONG
    return WaitTooLong(
        f"{needs} and {admission.queue_length} requests are ahead of it. The predicted wait of {wait:.1f} "
        f"seconds is over the limit of {admission.patience(ask):g} seconds.",
        retry_after_seconds=wait,
        shortage=shortage,
    )


def waited_too_long(waited_seconds: float, retry_after_seconds: float) -> LoadError:
    return QueueTimeout(
        f"The request waited {waited_seconds:.1f} seconds in the queue and its turn did not come. "
        f"There should be room for it in {retry_after_seconds:.1f} seconds.",
        retry_after_seconds=retry_after_seconds,
    )
