from __future__ import annotations

from typing import Any

import pytest

from model_runner.core.block_pool import BlockLease, BlockPool, BlockTables
from model_runner.core.request import Choice, Request, RequestStatus
from model_runner.types import FinishReason, SamplingParams
from tests.model_runner.core.fake_runner import layout_with


def make_request(
    max_tokens: int = 3, n: int = 1, stops: frozenset[int] = frozenset(), **params: Any
) -> Request:
    lease = BlockLease(BlockPool(20), 20)
    return Request(
        request_id="r",
        seniority=(0, 1),
        prompt_token_ids=[1, 2, 3, 4, 5, 6],
        params=SamplingParams(max_tokens=max_tokens, n=n, **params),
        choices=[Choice(index, index) for index in range(n)],
        lease=lease,
        tables=BlockTables(layout_with([None], 4), lease),
        stop_token_ids=stops,
        max_output_tokens=max_tokens,
        banned_token_ids=tuple(stops),
    )


WAITING, RUNNING, FINISHED = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED


@pytest.mark.parametrize("path", [[RUNNING, FINISHED], [FINISHED], [RUNNING, WAITING, FINISHED]])
def test_the_ways_through(path: list[RequestStatus]) -> None:
    request = make_request()
    assert request.status is WAITING
    for status in path:
        request.change_status(status)
    assert request.status is FINISHED


@pytest.mark.parametrize(
    "path",
    [[WAITING], [RUNNING, RUNNING], [FINISHED, WAITING], [FINISHED, RUNNING], [FINISHED, FINISHED]],
)
def test_nothing_starts_twice_and_nothing_leaves_finished(path: list[RequestStatus]) -> None:
    request = make_request()
    for status in path[:-1]:
        request.change_status(status)
    with pytest.raises(AssertionError, match="->"):
        request.change_status(path[-1])


def test_a_choice_ends_once_and_gives_its_blocks_back() -> None:
    request = make_request(n=2)
    request.tables.grow(6)
    request.num_computed_tokens = 6
    assert request.is_prefilled
    request.fork()
    first, second = request.choices
    request.finish_choice(first, FinishReason.STOP)
    assert request.live() == [second]
    assert request.lease.held == 2
    with pytest.raises(AssertionError, match="already ended"):
        request.finish_choice(first, FinishReason.ABORT)
    request.finish_choice(second, FinishReason.LENGTH)
    assert (request.live_choices, request.lease.held) == (0, 0)
    assert (first.finish_reason, second.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)


def test_only_choices_that_go_on_share_the_prompt() -> None:
    request = make_request(n=2)
    request.tables.grow(6)
    request.finish_choice(request.choices[0], FinishReason.STOP)
    request.fork()
    assert request.choices[0].tables is None
    assert request.choices[1].tables is not None
    assert request.lease.pool.holders(0) == 1


@pytest.mark.parametrize(
    ("token_id", "generated", "reason"),
    [
        (9, 2, None),  # a stop token, but not before min_tokens are there
        (9, 3, FinishReason.STOP),
        (5, 4, None),
        (5, 5, FinishReason.LENGTH),
        (9, 5, FinishReason.STOP),  # both at once: the model's own ending
    ],
)
def test_how_a_choice_ends(token_id: int, generated: int, reason: FinishReason | None) -> None:
    request = make_request(max_tokens=5, stops=frozenset({9}), min_tokens=2)
    assert request.finish_reason_after(token_id, generated) is reason
