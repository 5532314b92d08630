"""The queue at the door: nobody's turn never comes."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.core.fair_queue import Waiting
from tests.model_runner.core.waiting import (
    A,
    costs,
    filled,
    head,
    names,
    queue,
    take_head,
    wait,
    weights_of_three,
)

# Priority and age


def test_a_lower_priority_number_goes_first_whatever_the_tenants_clocks() -> None:
    q = filled(
        [wait("b", name="b0", cost=1.0), wait("a", name="low", priority=1), wait("a", name="a0", cost=50.0)]
    )
    q.push(wait("a", name="urgent", priority=-1, cost=50.0))
    assert names(q.in_turn(0)) == ["urgent", "b0", "a0", "low"]


@given(
    priorities=st.lists(st.integers(-2, 2), min_size=1, max_size=12),
    tenants=st.lists(st.sampled_from("ab"), min_size=12, max_size=12),
    now=st.floats(0, 100),
)
def test_effective_classes_are_in_order_and_age_gains_one_for_every_aging_seconds(
    priorities: list[int], tenants: list[str], now: float
) -> None:
    q = filled(
        wait(tenant, priority=priority, at=float(at))
        for at, (tenant, priority) in enumerate(zip(tenants, priorities, strict=False))
    )
    shown = q.snapshot(now + 12)
    assert len(shown) == len(priorities)
    for each in shown:
        gained = math.floor(each.waited_seconds / A)
        assert each.effective_class == max(each.priority - gained, min(priorities))
    classes = [each.effective_class for each in shown]
    assert classes == sorted(classes)


def test_within_a_tenant_and_class_who_came_first_goes_first_whatever_its_priority_was() -> None:
    q = filled([wait(name="old", priority=1, at=0.0), wait(name="new", priority=0, at=5.0)])
    assert names(q.in_turn(9.9)) == ["new", "old"]
    assert names(q.in_turn(10.0)) == ["old", "new"]


def test_a_flood_of_urgent_requests_starves_nobody() -> None:
    q = filled([wait("a", name="patient", priority=3)])
    for second in range(1, 100):
        q.push(wait("a", priority=0, at=float(second)))
        taken = take_head(q, float(second))
        if taken.ask_id == "patient":
            assert second == 3 * A
            return
    pytest.fail("it starved")


# Passing


def test_a_request_is_passed_a_bounded_number_of_times() -> None:
    q = queue(max_passes=3)
    q.push(wait(name="large"))
    for serial in range(5):
        q.push(wait(name=f"small-{serial}"))
    for serial in range(3):
        assert names(q.candidates(1.0))[1] == f"small-{serial}"
        q.take(f"small-{serial}", 1.0)
    assert names(q.candidates(1.0)) == ["large"]
    assert names(q.in_turn(1.0)) == ["large", "small-3", "small-4"]
    assert not q.snapshot(1.0)[0].may_be_passed
    with pytest.raises(AssertionError):
        q.take("small-3", 1.0)


def test_a_request_that_has_aged_is_not_passed() -> None:
    q = filled([wait(name="large"), wait(name="small", at=5.0)])
    assert names(q.candidates(9.9)) == ["large", "small"]
    assert names(q.candidates(10.0)) == ["large"]


def test_with_no_passes_allowed_there_is_one_candidate() -> None:
    q = queue(max_passes=0)
    q.push(wait(name="large"))
    q.push(wait(name="small"))
    assert names(q.candidates(0)) == ["large"]


def test_passing_takes_nothing_from_whom_it_passes() -> None:
    q = filled(
        [wait("a", name="a0", cost=9.0), wait("b", name="b0", cost=4.0), wait("b", name="b1", cost=4.0)]
    )
    assert names(q.in_turn(0)) == ["a0", "b0", "b1"]
    q.take("b0", 0)
    q.take("b1", 0)
    assert (q.clock, q.clock_of("b")) == (0, 8)
    assert (head(q).ask_id, head(q).passes) == ("a0", 2)


# The bound on a wait


@given(st.data())
def test_the_stated_bound_on_what_is_let_in_before_a_request(data: st.DataObject) -> None:
    weights = data.draw(weights_of_three)
    q, now = queue(weights, max_passes=2), 0.0
    largest: dict[str, float] = defaultdict(float)

    def send() -> Waiting[None]:
        waiting = wait(
            data.draw(st.sampled_from("abc")),
            cost=data.draw(costs),
            priority=data.draw(st.sampled_from([0, 0, 1, 2])),
            at=now,
        )
        largest[waiting.tenant] = max(largest[waiting.tenant], waiting.cost)
        q.push(waiting)
        return waiting

    def advance() -> tuple[list[str], Waiting[None]]:
        """Something happens: (those ahead of whom was let in, whom)."""
        nonlocal now
        now += data.draw(st.floats(0, 4))
        for _ in range(data.draw(st.integers(0, 3))):
            send()
        choices = list(itertools.islice(q.candidates(now), 4))
        chosen = data.draw(st.integers(0, len(choices) - 1))
        return names(choices[:chosen]), q.take(choices[chosen].ask_id, now)

    for _ in range(data.draw(st.integers(0, 10))):
        send()
        advance()
    mine = send()
    while now < mine.arrived_at + mine.priority * A and mine.ask_id in q:  # until it is in the first class
        send()
        advance()
    passed, mine_before = mine.passes, 0.0
    lead = q.clock_of(mine.tenant) - q.clock
    before: dict[str, float] = defaultdict(float)
    for _ in range(60):
        if mine.ask_id not in q:
            break
        send()
        ahead, taken = advance()
        if taken is mine:
            break
        if mine.ask_id in ahead:
            passed += 1
            assert now < mine.arrived_at + A
        if taken.tenant == mine.tenant:
            mine_before += taken.cost
        elif mine.ask_id not in ahead:
            before[taken.tenant] += taken.cost
        until_mine = itertools.takewhile(lambda waiting: waiting is not mine, q.in_turn(now))
        own_first = sum(waiting.cost for waiting in until_mine if waiting.tenant == mine.tenant)
        for other, cost in before.items():
            share = weights[other] * (lead + (mine_before + own_first) / weights[mine.tenant])
            assert cost <= (share + largest[other]) * (1 + 1e-9) + 1e-6
    assert passed == mine.passes <= q.max_passes


@given(others=st.integers(1, 5), mine=st.integers(0, 5))
def test_of_equals_a_request_waits_for_one_round_of_all_for_each_of_its_own_tenants(
    others: int, mine: int
) -> None:
    """The bound in its plainest form, with a flood from every other tenant."""
    q = filled(wait(f"other-{tenant}") for tenant in range(others) for _ in range(50))
    for _ in range(7):
        take_head(q)
    for _ in range(mine):
        q.push(wait("mine"))
    q.push(wait("mine", name="last"))
    before = 0
    while take_head(q, 1000.0).ask_id != "last":
        before += 1
    assert before <= mine + others * (mine + 1)


# Settling


@given(st.data())
def test_settling_never_takes_a_clock_back_behind_the_queues(data: st.DataObject) -> None:
    q, clock = queue(data.draw(weights_of_three)), 0.0
    q.push(wait("c", cost=0.0))
    for _ in range(data.draw(st.integers(1, 40))):
        tenant = data.draw(st.sampled_from("abc"))
        if data.draw(st.booleans()):
            q.push(wait(tenant, cost=data.draw(costs), priority=data.draw(st.integers(0, 1))))
        predicted, actual, before = data.draw(costs), data.draw(costs), q.clock_of(tenant)
        q.settle(tenant, predicted, actual)
        after = q.clock_of(tenant)
        assert after >= q.clock == clock
        weight = q.tenants[tenant].weight
        expected = max(before + (actual - predicted) / weight, clock)
        assert after == pytest.approx(expected, abs=1e-6)
        if len(q) > 1:
            take_head(q)
        assert q.clock >= clock
        clock = q.clock


def test_who_ended_early_gets_its_credit_back() -> None:
    q = filled([wait("a", cost=100.0), *(wait("a", name=f"a{i}", cost=10.0) for i in range(3))])
    for serial in range(3):
        q.push(wait("b", name=f"b{serial}", cost=10.0))
    take_head(q)
    assert names(q.in_turn(0)) == ["b0", "b1", "b2", "a0", "a1", "a2"]
    q.settle("a", 100.0, 15.0)
    assert names(q.in_turn(0)) == ["b0", "b1", "a0", "b2", "a1", "a2"]


def test_more_credit_than_it_is_ahead_puts_nobody_before_those_who_stand_at_the_queues_time() -> None:
    q = filled([wait("a", cost=5.0), wait("b", name="b0"), wait("a", name="a0")])
    take_head(q)
    q.settle("a", 1e6, 0.0)
    assert names(q.in_turn(0)) == ["b0", "a0"]


def test_who_took_longer_than_predicted_pays_for_it_also_after_a_pause() -> None:
    q = filled([wait("a", name="a0", cost=5.0), wait("b", name="b0", cost=5.0)])
    q.settle("gone", 1.0, 8.0)
    q.push(wait("gone", name="back"))
    assert names(q.in_turn(0)) == ["a0", "b0", "back"]
    assert q.clock_of("gone") == 7.0


def test_nothing_is_settled_while_nobody_waits() -> None:
    q = queue()
    q.settle("a", 1.0, 100.0)
    q.push(wait("a"))
    assert q.clock_of("a") == 0


# A second time


def test_who_had_been_let_in_once_goes_first_in_the_same_order_and_is_not_charged_again() -> None:
    q = filled([wait("a", name="x", priority=-5), wait("b", name="y")])
    again = [wait("c", name="once", priority=9, cost=1e9), wait("a", name="too", cost=1e9)]
    q.push_front(again)
    assert names(q.in_turn(0)) == ["once", "too", "x", "y"]
    assert q.lengths() == {"a": 2, "b": 1, "c": 1}
    assert take_head(q).ask_id == "once"
    q.push_front([wait("c", name="sooner still")])
    assert names(q.in_turn(0)) == ["sooner still", "too", "x", "y"]
    assert q.remove("sooner still") is not None
    assert take_head(q).ask_id == "too"
    assert (q.clock_of("a"), q.clock_of("c")) == (0, 0)
    assert names(q.in_turn(0)) == ["x", "y"]


def test_those_who_come_a_second_time_expire_and_are_passed_like_the_others() -> None:
    q = filled([wait(name="x")])
    q.push_front([wait(name="once", deadline=5.0)])
    q.take("x", 0.0)
    assert head(q).passes == 1
    assert names(q.expire(5.0)) == ["once"]
    assert len(q) == 0
