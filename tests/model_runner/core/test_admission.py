"""The door: order, bounds, and how well it foresees. (Its books are held by the state machine.)"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.core.admission import AdmissionController, Admitted, Queued, Rejected
from model_runner.core.forecast import Forecast
from model_runner.core.ledger import Ask
from model_runner.core.pace import Pace
from model_runner.core.policy import Part
from model_runner.core.tenants import DEFAULT_TENANT
from model_runner.errors import Reason
from model_runner.types import StepStats

STEP_SECONDS, PREFILL_RATE = 0.1, 100.0
_ids = itertools.count()


def door(
    num_blocks: int = 10, max_num_seqs: int = 8, max_queue_requests: int = 5, max_queue_seconds: float = 1e6
) -> AdmissionController:
    controller = AdmissionController(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_queue_requests=max_queue_requests,
        max_queue_seconds=max_queue_seconds,
        pace=Pace(STEP_SECONDS, PREFILL_RATE),
    )
    assert controller.open(0) == []
    return controller


def ask(
    *blocks: int,
    sequences: int = 1,
    prompt_tokens: int = 10,
    max_tokens: int = 10,
    name: str = "",
    tenant: str = DEFAULT_TENANT,
    priority: int = 0,
) -> Ask:
    name = name or f"a{next(_ids)}"
    parts = [
        Part(f"{name}-{index}", part_blocks, sequences, prompt_tokens, max_tokens)
        for index, part_blocks in enumerate(blocks)
    ]
    return Ask(name, tuple(parts), tenant=tenant, priority=priority)


def test_room_is_admitted_no_room_is_queued_and_too_much_is_rejected() -> None:
    controller = door()
    assert controller.decide(ask(6), 0) == Admitted()
    assert isinstance(controller.decide(ask(5), 0), Queued)
    rejected = controller.decide(ask(6, 5), 0)
    assert rejected == Rejected(Reason.KV_CACHE_BUDGET_EXCEEDED, math.inf)
    assert (controller.reserved_blocks, controller.free_blocks, controller.queued_blocks) == (6, 4, 5)


def test_nothing_overtakes_the_head_of_the_queue() -> None:
    controller = door()
    first, large, small = ask(6), ask(9), ask(1)
    controller.decide(first, 0)
    assert isinstance(controller.decide(large, 0), Queued)
    assert isinstance(controller.decide(small, 0), Queued), "it would fit, but it is not its turn"
    assert controller.release([first.parts[0].part_id], 0) == [large, small]


def test_parts_come_in_together_and_leave_one_by_one() -> None:
    controller = door()
    pair, next_one = ask(4, 5), ask(4)
    controller.decide(pair, 0)
    controller.decide(next_one, 0)
    assert controller.reserved_sequences == 2
    assert controller.release([pair.parts[1].part_id], 0) == [next_one]
    assert controller.release([pair.parts[0].part_id], 0) == []
    assert controller.reservations() == {next_one.parts[0].part_id: 4}


def test_places_in_the_batch_are_a_second_resource() -> None:
    controller = door(num_blocks=100, max_num_seqs=4)
    first, second = ask(1, sequences=3), ask(1, sequences=2)
    assert controller.decide(first, 0) == Admitted()
    assert isinstance(controller.decide(second, 0), Queued)
    assert controller.release([first.parts[0].part_id], 0) == [second]


def test_more_sequences_than_places_take_them_all() -> None:
    controller = door(num_blocks=100, max_num_seqs=4)
    crowd, other = ask(1, 1, 1, sequences=2), ask(1)
    assert controller.decide(crowd, 0) == Admitted()
    assert controller.reserved_sequences == 4
    assert isinstance(controller.decide(other, 0), Queued)
    assert controller.release([crowd.parts[0].part_id], 0) == [], "four sequences are left for four places"
    assert controller.release([crowd.parts[1].part_id], 0) == [other]


def test_the_queue_is_bounded_in_requests() -> None:
    controller = door(max_queue_requests=2)
    controller.decide(ask(10), 0)
    assert [type(controller.decide(ask(1), 0)) for _ in range(3)] == [Queued, Queued, Rejected]
    rejected = controller.decide(ask(1), 0)
    assert isinstance(rejected, Rejected)
    assert rejected.reason is Reason.QUEUE_FULL
    assert rejected.predicted_wait_seconds == pytest.approx(
        1.1
    )  # 10 prompt tokens at 100/s, 10 steps of 0.1 s


def test_the_queue_is_bounded_in_predicted_wait() -> None:
    controller = door(max_queue_seconds=2.0)
    controller.decide(ask(10), 0)  # until 1.1
    assert controller.decide(ask(10), 0) == Queued(pytest.approx(1.1))  # until 2.2
    assert controller.decide(ask(10), 0) == Rejected(Reason.WAIT_TOO_LONG, pytest.approx(2.2))
    assert controller.decide(ask(10), 1.0) == Queued(pytest.approx(1.2)), (
        "time passes, and it would be in time"
    )


def test_the_late_leave_the_queue_and_the_way_is_free() -> None:
    controller = door(max_queue_seconds=2.0)
    controller.decide(ask(6, max_tokens=1), 0)
    large, small = ask(9), ask(3)
    controller.decide(large, 0)
    controller.decide(small, 1)
    assert controller.expire(1.9) == ([], [])
    assert controller.expire(2.0) == ([large], [small])
    assert controller.queued_blocks == 0


def test_leaving_the_queue_opens_the_way() -> None:
    controller = door()
    controller.decide(ask(6), 0)
    large, small = ask(9), ask(3)
    controller.decide(large, 0)
    controller.decide(small, 0)
    assert controller.cancel(large.ask_id, 0) == [small]
    assert controller.cancel(large.ask_id, 0) == []


def test_a_dead_engine_takes_all_reservations_and_the_requeued_come_first() -> None:
    controller = door(max_queue_seconds=2.0)
    first, second, third = ask(6), ask(4), ask(2)
    for each in (first, second, third):
        controller.decide(each, 0)
    controller.close()
    assert (controller.reserved_blocks, controller.reserved_sequences) == (0, 0)
    controller.requeue([first, second], 1.5)
    assert isinstance(controller.decide(ask(1), 1.5), Queued), "the engine is gone"
    assert controller.expire(2.1)[0] == [third], "what was let in once has a new deadline"
    assert controller.open(0) == [first, second]


def test_a_release_of_what_is_not_reserved_is_an_error() -> None:
    with pytest.raises(KeyError):
        door().release(["nobody"], 0)


def test_progress_shortens_the_forecast() -> None:
    controller = door()
    running = ask(10, max_tokens=100)
    controller.decide(running, 0)
    assert controller.predict_wait(ask(1), 0) == pytest.approx(10.1)
    controller.progress(running.parts[0].part_id, 60)
    assert controller.predict_wait(ask(1), 0) == pytest.approx(4.0)


def test_forecasts_look_only_at_what_must_go() -> None:
    forecast = Forecast(Pace(0.1, 100.0), now=0.0, free_blocks=2, free_sequences=2)
    forecast.running(blocks=5, sequences=1, prompt_tokens_left=0, tokens_left=10, since=0.0)
    forecast.running(blocks=1, sequences=1, prompt_tokens_left=0, tokens_left=50, since=0.0)
    assert forecast.room_at(2, 1) == 0.0
    assert forecast.room_at(7, 1) == pytest.approx(1.0)
    assert forecast.room_at(8, 1) == pytest.approx(5.0)
    assert forecast.room_at(1, 4) == pytest.approx(5.0)
    # The whole house is 8: but once all have left, there is room for anyone who may come in at all.
    assert forecast.room_at(9, 1) == pytest.approx(5.0)


def test_prompts_are_foreseen_one_after_the_other() -> None:
    forecast = Forecast(Pace(0.1, 100.0), now=0.0, free_blocks=0, free_sequences=0)
    for _ in range(2):
        forecast.running(blocks=1, sequences=1, prompt_tokens_left=300, tokens_left=10, since=0.0)
    assert forecast.room_at(1, 1) == pytest.approx(3 + 1)
    assert forecast.room_at(2, 1) == pytest.approx(6 + 1)


@given(
    asks=st.lists(
        st.tuples(st.integers(1, 10), st.integers(1, 8), st.integers(1, 50)), min_size=2, max_size=25
    )
)
def test_a_forecast_extended_is_the_forecast_made_anew(asks: list[tuple[int, int, int]]) -> None:
    """Incremental or from scratch: the same moments."""
    controller = door(max_queue_requests=100)
    for blocks, sequences, max_tokens in asks:
        new = ask(blocks, sequences=sequences, max_tokens=max_tokens)
        extended = controller.predict_wait(new, 0.0)
        controller._forecast = None
        assert controller.predict_wait(new, 0.0) == pytest.approx(extended)
        decision = controller.decide(new, 0.0)
        if isinstance(decision, Queued):
            assert decision.predicted_wait_seconds == pytest.approx(extended)


def test_a_thousand_at_once_build_one_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a burst is one walk over what runs for each, never a replay of the whole queue for each."""
    built = []
    running = Forecast.running

    def count(self: Forecast, **what: object) -> None:
        built.append(self)
        running(self, **what)  # type: ignore[arg-type]

    monkeypatch.setattr(Forecast, "running", count)
    controller = door(num_blocks=64, max_num_seqs=64, max_queue_requests=500)
    for _ in range(1000):
        controller.decide(ask(1), 0.0)
    assert len({id(forecast) for forecast in built}) == 1
    assert len(built) == 64 + 500  # those that run, once, and each that was queued


def test_pace_learns_from_plain_steps_and_prices_prefill_by_what_it_adds() -> None:
    pace = Pace(0.1, 100.0)
    for _ in range(200):
        pace.observe(step(0.05, decode=4))
    assert pace.decode_step_seconds == pytest.approx(0.05, rel=0.01)
    for _ in range(50):
        pace.observe(step(0.05 + 0.5, prefill=500, decode=4))
    assert pace.prefill_tokens_per_second == pytest.approx(1000, rel=0.02)
    assert pace.decode_step_seconds == pytest.approx(0.05, rel=0.01)
    # Those who decode advance by whole steps, the prompts that others have read in them included.
    assert pace.decode_seconds(10) == pytest.approx(10 * 0.55, rel=0.1)
    pace.observe(step(0.0))
    pace.observe(step(0.04, prefill=500, decode=4))
    assert math.isfinite(pace.prefill_tokens_per_second)
    assert pace.prefill_seconds(1000) == pytest.approx(1000 / pace.prefill_tokens_per_second)


def step(seconds: float, *, prefill: int = 0, decode: int = 0) -> StepStats:
    return StepStats(seconds, prefill, decode, 1, 0, 1, 1)


# An event: ask for so many blocks with so many sequences, release the oldest reservation, or let time pass.
events = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 12), st.integers(1, 9)),
        st.tuples(st.just("release"), st.just(0), st.just(0)),
        st.tuples(st.just("pass"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("close"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@given(events)
def test_a_judgement_is_what_the_decision_then_is_and_leaves_no_trace(
    happened: list[tuple[str, int, int]],
) -> None:
    controller, now = door(max_queue_seconds=8.0), 0.0

    def books() -> tuple[object, ...]:
        return (
            controller.reservations(),
            controller.queued_ask_ids(0),
            controller.queued_blocks,
            controller.reserved_sequences,
        )

    for what, amount, sequences in happened:
        if what == "ask":
            asked = ask(amount, sequences=sequences)
            before = books()
            judged = controller.judge(asked, now)
            assert books() == before
            assert controller.judge(asked, now) == judged
            assert controller.decide(asked, now) == judged
        elif what == "release":
            controller.release(list(controller.reservations())[:1], 0)
        elif what == "close":
            controller.close()
            controller.open(0)
        else:
            now += amount
            controller.expire(now)


def seconds(decision: object) -> float:
    assert isinstance(decision, Queued)
    return decision.predicted_wait_seconds


@pytest.mark.parametrize("other", [{"tenant": "quiet"}, {"priority": -1}])
def test_who_comes_before_others_is_foreseen_before_them(other: dict[str, Any]) -> None:
    """A flood of one tenant's requests, each as large as the cache, and one whose turn comes soon."""
    controller = door(max_queue_requests=50)
    flood = [ask(10, tenant="loud") for _ in range(12)]
    controller.decide(flood[0], 0)
    waits = [seconds(controller.decide(each, 0)) for each in flood[1:]]
    assert waits == sorted(waits)
    # Of two at one virtual time, who has stood there longer goes first; who is more urgent goes before both.
    place = 1 if "tenant" in other else 0
    mine = ask(10, **other)
    assert controller.predict_wait(mine, 0) == pytest.approx(waits[place])
    assert seconds(controller.decide(mine, 0)) == pytest.approx(waits[place])
    # The others have moved back by one.
    assert seconds(controller.decide(ask(10, tenant="loud"), 0)) > waits[-1] + 1
    assert controller.queued_ask_ids(0).index(mine.ask_id) == place


def test_a_flood_does_not_shut_the_door_on_a_quiet_tenant() -> None:
    controller = door(max_queue_requests=50, max_queue_seconds=5.0)
    decisions = [controller.decide(ask(10, tenant="loud"), 0) for _ in range(12)]
    refused = decisions[-1]
    assert isinstance(refused, Rejected)
    assert refused.reason is Reason.WAIT_TOO_LONG
    assert isinstance(controller.decide(ask(10, tenant="quiet"), 0), Queued)
