"""What a request would cost and what would become of it, without asking for it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from model_runner.core.admission import AdmissionController, Decision
from model_runner.core.block_layout import BlockGroup, BlockLayout
from model_runner.core.ledger import Ask
from model_runner.core.refusals import largest_max_tokens
from model_runner.errors import PlimsollError


@dataclass(frozen=True, slots=True)
class GroupPrice:
    """Blocks that a request needs of like layers."""

    kind: str
    window: int | None
    layers: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Quote:
    """`decision` is what the door would answer now, and `error` what a refused client would be told.

    `decision` is None where the door is not even asked: while the engine starts, restarts or drains.
    """

    decision: Decision | None
    error: PlimsollError | None
    prices: tuple[GroupPrice, ...]
    largest_max_tokens: int  # that could ever be admitted; 0 where the prompt alone is too much
    largest_max_tokens_now: int  # that would be admitted at once; 0 where others wait already


def price_by_group(
    layout: BlockLayout, prompt_tokens: Sequence[int], max_tokens: int, n: int
) -> tuple[GroupPrice, ...]:
    """Like layers together, however many block tables they have. Blocks add up to the request's price."""
    alike: dict[tuple[str, int | None], list[BlockGroup]] = {}
    for group in layout.groups:
        alike.setdefault((group.kind, group.window), []).append(group)
    return tuple(
        GroupPrice(
            kind=kind,
            window=window,
            layers=sum(len(group.layers) for group in groups),
            blocks=sum(
                layout.group_blocks(group, tokens, max_tokens, n)
                for group in groups
                for tokens in prompt_tokens
            ),
        )
        for (kind, window), groups in alike.items()
    )


def largest_that_fit(
    layout: BlockLayout, admission: AdmissionController, ask: Ask, *, limit: int
) -> tuple[int, int]:
    """(the largest max_tokens, at most `limit`, that could ever be admitted, and that would be at once)."""
    lengths = [part.prompt_tokens for part in ask.parts]
    n = ask.parts[0].sequences
    most, left = admission.shares.most(ask.tenant), admission.shares.left(ask.tenant)
    ever = largest_max_tokens(layout, lengths, n, budget_blocks=most, limit=limit)
    if not admission.has_place_for(ask.sequences):
        return ever, 0

    def is_too_much(max_tokens: int) -> bool:
        parts = [
            replace(
                part,
                max_tokens=max_tokens,
                blocks=layout.request_blocks(part.prompt_tokens, max_tokens, part.sequences),
            )
            for part in ask.parts
        ]
        blocks = sum(part.blocks for part in parts)
        return blocks > left or not admission.policy.fits(parts, admission.free_blocks)

    return ever, bisect_right(range(1, ever + 1), False, key=is_too_much)
