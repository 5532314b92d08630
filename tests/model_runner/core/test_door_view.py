"""What can be seen of the door."""

from __future__ import annotations

from typing import Any

import pytest

from model_runner.core.admission import AdmissionController
from model_runner.core.dispatcher import Dispatcher
from model_runner.core.door_view import QueueRow, door_levels, queue_rows
from model_runner.core.lengths import Lengths
from model_runner.core.live_request import LiveRequest, Submission
from model_runner.core.obstacles import Obstacle
from model_runner.core.pace import Pace
from model_runner.core.policy import Predictive
from model_runner.core.tenants import Tenant, Tenants
from model_runner.errors import (
    KVCacheBudgetExceeded,
    PlimsollError,
    QueueFull,
    TenantOverLimit,
    TenantQueueFull,
    WaitTooLong,
)
from model_runner.messages import StepDone, ToEngine
from model_runner.types import ChoiceOutput, FinishReason, SamplingParams, StepStats
from tests.model_runner.core.fake_runner import layout_with
from tests.model_runner.core.test_quotes import Ignoring

LAYOUT = layout_with([None], 1)
LONGEST = 100


class House:
    """Blocks of one token each."""

    def __init__(self, num_blocks: int = 20, max_num_seqs: int = 4, *, predictive: bool = False) -> None:
        lengths = Lengths(LONGEST)
        self.sent: list[ToEngine] = []
        admission = AdmissionController(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_queue_requests=50,
            max_queue_seconds=60.0,
            pace=Pace(0.1, 100.0),
            policy=Predictive(LAYOUT, lengths, num_blocks=num_blocks, overflow_risk=0.01)
            if predictive
            else None,
            tenants=Tenants([Tenant("small", max_reserved_blocks=8, max_queued_requests=1)]),
            max_passes=8,
        )
        self.dispatcher = Dispatcher(LAYOUT, admission, Ignoring(), self.sent.append)
        self.dispatcher.engine_ready(1, 0.0)

    def submit(self, tokens: int, now: float = 0.0, *, n: int = 1, **more: Any) -> LiveRequest:
        """Its lifetime is `tokens` blocks for each of the n; one of them is the prompt's."""
        params = SamplingParams(max_tokens=tokens, n=n)
        return self.dispatcher.submit(Submission(f"r{tokens}", [[7]], params, False, **more), Ignoring(), now)

    def rows(self, now: float = 0.0, most: int = 100) -> list[QueueRow]:
        return queue_rows(self.dispatcher, now, most=most)

    def end(self, request: LiveRequest, now: float) -> None:
        part_id = request.ask.parts[0].part_id
        output = ChoiceOutput(part_id, 0, [5], None, FinishReason.STOP)
        self.dispatcher.step_done(StepDone(1, [output], [part_id], StepStats(0.1, 0, 1, 0, 0, 0, 1)), now)


def test_why_each_waits_and_when_it_is_expected_in() -> None:
    house = House()
    house.submit(15)  # 1.5 s, and 10 ms of prefill
    big = house.submit(12, now=0.25, tenant="a", priority=1)
    house.submit(20, now=0.5, tenant="b", timeout_seconds=10)
    first, second = house.rows(now=1.0)
    assert (first.place, first.request_id, first.tenant, first.priority) == (1, "r20", "b", 0)
    assert (first.waited_seconds, first.deadline_in_seconds) == (0.5, 9.5)
    assert first.projected_bytes == 20 * LAYOUT.block_bytes
    assert (first.waits_for, second.waits_for) == (Obstacle.ROOM, Obstacle.ROOM)
    assert first.expected_in_seconds == pytest.approx(1.51), "all the tokens that may still come"
    assert second.expected_in_seconds == pytest.approx(1.51 + 2.01), "when the first will have ended"
    assert (second.place, second.request_id, second.waited_seconds) == (2, "r12", 0.75)
    assert second.deadline_in_seconds == pytest.approx(59.25)
    assert house.rows(now=1.0, most=1) == [first]
    assert big.predicted_wait_seconds == pytest.approx(1.51)


def test_no_place_in_the_batch_is_another_reason() -> None:
    house = House(num_blocks=100)
    running = house.submit(2, n=3)
    house.submit(3, n=2)
    (row,) = house.rows()
    assert row.waits_for is Obstacle.PLACES
    house.end(running, 1.0)
    assert house.rows() == []


def test_those_behind_one_that_is_not_passed_any_more_wait_for_it() -> None:
    house = House()
    house.submit(15)
    house.submit(18)
    house.submit(9)
    assert [row.waits_for for row in house.rows(1.0)] == [Obstacle.ROOM, Obstacle.ROOM]
    assert [row.waits_for for row in house.rows(59.0)] == [Obstacle.ROOM, Obstacle.OTHERS]


def test_without_an_engine_all_wait_for_it() -> None:
    house = House()
    house.submit(15)
    house.submit(18)
    house.dispatcher.engine_died(1.0)
    assert [row.waits_for for row in house.rows(1.0)] == [Obstacle.ENGINE, Obstacle.ENGINE]
    assert house.rows(1.0)[0].waited_seconds == 1.0, "since it came, not since it went back to the queue"


def test_a_foreseen_peak_is_a_reason_while_much_is_free() -> None:
    house = House(predictive=True)
    house.submit(15)
    house.submit(18)
    (row,) = house.rows()
    assert row.waits_for is Obstacle.ROOM
    levels = door_levels(house.dispatcher, 0.0)
    assert levels.policy == "predictive"
    assert 0 < levels.predicted_peak_bytes <= 20 * LAYOUT.block_bytes
    assert levels.overflow_risk == 0.01
    assert levels.margin_deviations == house.dispatcher.admission.policy.margin_deviations
    assert house.dispatcher.admission.reserved_blocks == 0


def test_strict_takes_no_risk_and_foresees_what_it_has_reserved() -> None:
    house = House()
    house.submit(7, now=1.0)
    house.submit(8, now=2.0, tenant="b")
    house.submit(18, now=2.0, tenant="b")
    levels = door_levels(house.dispatcher, 4.0)
    assert (levels.policy, levels.overflow_risk, levels.margin_deviations) == ("strict", None, None)
    assert levels.predicted_peak_bytes == 15 * LAYOUT.block_bytes
    assert levels.queue_lengths == {"b": 1}
    block = LAYOUT.block_bytes
    assert levels.byte_seconds == {"default": 3 * 7 * block, "b": 2 * 8 * block}


def refused(house: House, tokens: int, **more: Any) -> PlimsollError:
    with pytest.raises(PlimsollError) as caught:
        house.submit(tokens, **more)
    return caught.value


def test_a_tenants_limits_are_told_as_such() -> None:
    house = House()
    never = refused(house, 9, tenant="small")
    assert isinstance(never, KVCacheBudgetExceeded)
    assert "all that this tenant may reserve is" in never.message
    assert (never.budget_bytes, never.largest_max_tokens) == (8 * LAYOUT.block_bytes, 8)
    assert "the server's whole budget is" in refused(house, 21).message
    house.submit(17)
    house.submit(4, tenant="small")
    over = refused(house, 5, tenant="small")
    assert isinstance(over, TenantOverLimit)
    assert "this tenant's requests leave" in over.message
    assert over.shortage is not None
    assert over.shortage.required_bytes == 5 * LAYOUT.block_bytes
    assert over.retry_after_seconds > 0
    full = refused(house, 3, tenant="small")
    assert isinstance(full, TenantQueueFull)
    assert "as many of this tenant's requests wait as may (1)" in full.message
    hasty = refused(house, 4, timeout_seconds=0.5)
    assert isinstance(hasty, WaitTooLong)
    assert "over the limit of 0.5 seconds" in hasty.message
    assert "is free and 1 requests are ahead" in hasty.message


def test_what_is_free_may_be_foreseen_to_be_needed() -> None:
    house = House(predictive=True)
    house.dispatcher.admission.max_queue_requests = 0
    house.submit(15)
    full = refused(house, 18)
    assert isinstance(full, QueueFull)
    assert "is free now, before those that run have grown, and the queue is full" in full.message
