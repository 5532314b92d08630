"""The queue at the door: whose turn it is, and what a share is."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model_runner.core.waiting import costs, filled, names, queue, take_head, wait, weights_of_three

# One tenant


@given(st.data())
def test_one_tenant_is_first_come_first_served_whatever_leaves_from_anywhere(data: st.DataObject) -> None:
    q, expected, now = queue(), [], 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.floats(0, 5))
        match data.draw(st.sampled_from(["push", "push", "take", "remove", "expire"])):
            case "push":
                late = now + data.draw(st.floats(0.1, 30))
                waiting = wait(cost=data.draw(costs), at=now, deadline=late)
                q.push(waiting)
                expected.append(waiting)
            case "take" if expected:
                assert take_head(q, now) is expected.pop(0)
            case "remove" if expected:
                gone = expected.pop(data.draw(st.integers(0, len(expected) - 1)))
                assert q.remove(gone.ask_id) is gone
            case "expire":
                late_ones = q.expire(now)
                assert {id(each) for each in late_ones} == {id(e) for e in expected if e.deadline <= now}
                assert late_ones == sorted(late_ones, key=lambda each: each.deadline)
                expected = [each for each in expected if each.deadline > now]
        assert list(q.in_turn(now)) == expected
        assert len(q) == q.length_of("a") == len(expected)


def test_an_empty_queue_has_no_candidate_nobody_late_and_nothing_to_remove() -> None:
    q = queue()
    assert (list(q.candidates(0)), q.expire(1e9), q.remove("x"), len(q), q.snapshot(0)) == (
        [],
        [],
        None,
        0,
        [],
    )
    with pytest.raises(KeyError):
        q.take("x", 0)


def test_a_deadline_is_past_when_it_has_come() -> None:
    q = filled([wait(name="late", deadline=5.0), wait(name="later", deadline=6.0)])
    assert q.expire(4.99) == []
    assert names(q.expire(5.0)) == ["late"]
    assert names(q.expire(100.0)) == ["later"]


# Across tenants


@given(weights_of_three, st.data())
def test_who_always_wait_are_let_in_for_costs_in_proportion_to_their_weights(
    weights: dict[str, float], data: st.DataObject
) -> None:
    """The bound of start-time fair queueing: shares differ by a largest request of each at most."""
    q, served, largest = queue(weights), defaultdict(float), defaultdict(float)

    def send(tenant: str) -> None:
        cost = data.draw(costs)
        largest[tenant] = max(largest[tenant], cost)
        q.push(wait(tenant, cost=cost))

    for tenant in itertools.chain(*itertools.repeat("abc", 2)):
        send(tenant)
    for _ in range(data.draw(st.integers(1, 60))):
        taken = take_head(q)
        served[taken.tenant] += taken.cost
        send(taken.tenant)
        for one, other in itertools.combinations("abc", 2):
            apart = abs(served[one] / weights[one] - served[other] / weights[other])
            bound = largest[one] / weights[one] + largest[other] / weights[other]
            assert apart <= bound * (1 + 1e-9) + 1e-6


@given(weights_of_three, st.lists(costs, min_size=1, max_size=30), st.lists(costs, min_size=40, max_size=40))
def test_a_tenant_that_comes_back_gets_its_share_from_then_on_and_no_more(
    weights: dict[str, float], before: list[float], after: list[float]
) -> None:
    q = filled((wait("b", cost=cost) for cost in before), weights)
    q.push(wait("a", cost=after[0]))
    take_head(q)
    while q.length_of("a"):  # "a" has its turn, goes away, and lets "b" be served for any time
        take_head(q)
    for cost in after:
        q.push(wait("b", cost=cost))
    for _ in range(len(before) // 2):
        take_head(q)
    assert q.length_of("b")
    for cost in after:
        q.push(wait("a", cost=cost))
    served = {"a": 0.0, "b": 0.0}
    while q.length_of("a") and q.length_of("b"):
        taken = take_head(q)
        served[taken.tenant] += taken.cost
        bound = max(before + after) * (1 / weights["a"] + 1 / weights["b"])
        assert served["a"] / weights["a"] - served["b"] / weights["b"] <= bound * (1 + 1e-9) + 1e-6


def test_a_flood_does_not_delay_a_quiet_tenants_next_request() -> None:
    q = filled(wait("loud", cost=5.0) for _ in range(1000))
    for now in range(20):
        take_head(q, now)
    q.push(wait("quiet", name="here I am", cost=5.0, at=20))
    assert take_head(q, 20).ask_id == "here I am"
    # Even when the flood is so old that it would gain classes on every fresh request.
    for now in range(21, 200, 5):
        q.push(wait("quiet", name=f"again at {now}", cost=5.0, at=now))
        assert f"again at {now}" in {take_head(q, now).ask_id, take_head(q, now).ask_id}


def test_who_comes_back_to_the_queues_time_stands_behind_those_who_stand_there() -> None:
    q = filled([wait("a", cost=10.0), *(wait("b", cost=5.0) for _ in range(9))])
    while q.clock < 20:
        take_head(q)
    assert q.clock_of("b") == 25
    q.push(wait("c", name="sooner"))
    q.push(wait("a", name="later"))
    assert q.clock_of("a") == q.clock_of("c") == 20
    assert names(q.in_turn(0))[:2] == ["sooner", "later"]


def test_who_had_the_server_to_itself_owes_nothing_once_nobody_waits() -> None:
    q = queue()
    for _ in range(100):
        q.push(wait("a", cost=1e6))
        take_head(q)
    assert (q.clock, q.clock_of("a"), q.clock_of("b")) == (0, 0, 0)
    q.push(wait("a", name="first"))
    q.push(wait("b", name="second"))
    assert names(q.in_turn(0)) == ["first", "second"]


def test_debt_is_forgotten_when_the_others_have_caught_up() -> None:
    q = filled([wait("a", cost=100.0), *(wait("b", cost=10.0) for _ in range(30))])
    while q.length_of("a"):
        take_head(q)
    for _ in range(5):
        take_head(q)
    q.push(wait("a", cost=1.0))
    assert q.clock_of("a") == 100 > q.clock
    q.remove(next(each.ask_id for each in q.in_turn(0) if each.tenant == "a"))
    assert q.clock_of("a") == 100  # going away doesn't clear it
    for _ in range(10):
        take_head(q)
    q.push(wait("a", name="back", cost=1.0))
    assert q.clock_of("a") == q.clock
    assert "back" in {take_head(q).ask_id, take_head(q).ask_id}


@given(st.lists(st.tuples(st.sampled_from("abc"), costs), max_size=40), weights_of_three)
def test_the_order_shown_is_the_order_in_which_they_are_let_in(
    asked: list[tuple[str, float]], weights: dict[str, float]
) -> None:
    q = filled((wait(tenant, cost=cost) for tenant, cost in asked), weights)
    foreseen = names(q.in_turn(0))
    assert names(q.candidates(0)) == foreseen == [each.ask_id for each in q.snapshot(0)]
    assert names(take_head(q) for _ in asked) == foreseen


def test_lengths_and_the_snapshot_show_the_queue_as_it_stands() -> None:
    q = filled([wait("a", name="x", cost=9.0), wait("a", name="y", at=1.0), wait("b", name="z", priority=2)])
    assert q.lengths() == {"a": 2, "b": 1}
    assert ("x" in q, "w" in q, q.length_of("c")) == (True, False, 0)
    shown = q.snapshot(12.0)
    assert [(each.ask_id, each.effective_class, each.waited_seconds) for each in shown] == [
        ("x", 0, 12.0),
        ("y", 0, 11.0),
        ("z", 1, 12.0),
    ]
    q.remove("x")
    assert [each.ask_id for each in shown] == ["x", "y", "z"]  # a snapshot stays as it was


def test_names_without_end_leave_nothing_behind() -> None:
    q = filled([wait("stays", cost=0.001)])
    for serial in range(5000):
        q.push(wait(f"tenant-{serial}", cost=float(serial % 7 + 1)))
        q.settle(f"gone-{serial}", 0.0, 1e-6)
        q.take(next(each.ask_id for each in q.in_turn(0) if each.tenant != "stays"), 0)
        if serial % 5 == 0:
            q.remove(next(iter(q.in_turn(0))).ask_id)
            q.push(wait("stays", cost=0.001))
        assert len(q._lines) < 300


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 9)), max_size=12),
    st.integers(0, 4),
    st.sampled_from("abcd"),
    st.integers(-1, 3),
)
def test_the_turn_of_the_next_is_the_one_it_then_has(
    coming: list[tuple[str, int, int]], taken: int, tenant: str, priority: int
) -> None:
    q = filled((wait(of, priority=p, cost=cost) for of, p, cost in coming), {"a": 1, "b": 2, "c": 4, "d": 8})
    for _ in range(min(taken, len(q))):
        take_head(q)
    turns = [turn for turn, _ in q.turns(0)]
    assert turns == sorted(turns)
    foreseen = q.turn_of_next(tenant, priority)
    next_one = wait(tenant, priority=priority)
    q.push(next_one)
    turn = next(turn for turn, waiting in q.turns(0) if waiting is next_one)
    assert turn[0] == foreseen[0]
    # Others may go on to a less urgent class with the queue's clock, but never to an earlier time.
    assert turn[1] == foreseen[1] or (turn[1] > foreseen[1] and len(set(q._priorities)) > 1)
