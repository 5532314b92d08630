"""What there is room for: the foreseen peak, and the distance that is kept from the line."""

from __future__ import annotations

import random
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.core.lengths import Lengths
from model_runner.core.outlook import Outlook, Running
from model_runner.core.policy import OverflowRisk, Part, Predictive, Strict
from tests.model_runner.core.fake_runner import layout_with

LIMIT = 1000
LAYOUT = layout_with([None], 4)


def part(name: str, prompt: int = 40, max_tokens: int = 400, n: int = 1) -> Part:
    return Part(name, LAYOUT.request_blocks(prompt, max_tokens, n), n, prompt, max_tokens)


def predictive(num_blocks: int, lengths: Lengths | None = None, risk: float = 0.004) -> Predictive:
    return Predictive(LAYOUT, lengths or Lengths(LIMIT), num_blocks=num_blocks, overflow_risk=risk)


def learned(length: int, *, times: int = 300, prompt: int = 40) -> Lengths:
    """Answers of three quarters to five quarters of the length."""
    lengths, dice = Lengths(LIMIT), random.Random(length)
    for _ in range(times):
        made = dice.randint(length * 3 // 4, length * 5 // 4)
        lengths.of(prompt).drawn(made, made)
        lengths.of(prompt).ended(made)
    return lengths


def fill(policy: Predictive | Strict, num_blocks: int) -> int:
    """How many equal requests are let in one after the other."""
    taken = 0
    for number in range(1000):
        one = part(str(number))
        if not policy.fits([one], num_blocks - taken * one.blocks):
            return number
        policy.came_in(one)
        taken += not policy.grows
    raise AssertionError("no end")


def test_before_anything_is_known_it_is_strict() -> None:
    assert fill(predictive(1100), 1100) == fill(Strict(), 1100) == 10


def test_answers_that_end_early_make_room() -> None:
    # Together they hold 10 blocks for the prompt and 15 for 60 tokens, where strict admission sets 110 aside.
    known = fill(predictive(1100, learned(60, times=1000)), 1100)
    assert 40 < known <= 1100 // 21


def test_max_tokens_bounds_what_is_foreseen() -> None:
    tight = predictive(220, learned(700))
    tight.came_in(part("a", max_tokens=400))
    assert tight.fits([part("b", max_tokens=400)], 0)
    assert not tight.fits([part("b", max_tokens=440)], 0)


def test_those_about_to_end_make_way_for_those_that_grow() -> None:
    """Answers are of 150 to 250 tokens, and one is at 239: it will be gone before another has grown."""
    lengths = learned(200, times=2000)
    old, new = part("old"), part("new")
    policy = predictive(100, lengths)
    policy.came_in(old)
    assert not policy.fits([new], 0)
    for tokens in range(1, 240):
        policy.progressed("old", tokens)
    assert policy.fits([new], 0)


def test_alone_anything_fits() -> None:
    assert predictive(10).fits([part("a")], 10)


def test_who_leaves_is_forgotten() -> None:
    policy = predictive(1100)
    for number in range(10):
        policy.came_in(part(str(number)))
    assert policy.predicted_peak_blocks == pytest.approx(1100)
    for number in range(10):
        policy.ending(str(number))
        policy.left(str(number))
    assert policy.predicted_peak_blocks == 0.0


def test_the_distance_balances_at_the_stated_share() -> None:
    """A line that is crossed the less, the farther off one stays."""
    dice = random.Random(3)
    risk = OverflowRisk(0.02)
    preempted = 0
    for request in range(60_000):
        if dice.random() < 0.2 * 2.0 ** (-risk.deviations(100) * 2):
            risk.preempted(100)
            preempted += request >= 10_000
        risk.ended(100)
    assert preempted / 50_000 == pytest.approx(0.02, rel=0.15)


def test_the_distance_has_bounds() -> None:
    reckless, scared = OverflowRisk(0.5), OverflowRisk(0.0001)
    for _ in range(10_000):
        reckless.ended(1)
        scared.preempted(1)
    assert 0 < reckless.deviations(1) < 1
    assert scared.deviations(1) <= 6.0


def test_the_fewer_run_the_farther_from_the_line() -> None:
    """Among a few, nobody ends soon: what crosses the line then leads to a preemption more often."""
    risk = OverflowRisk(0.0025)
    distances = [risk.deviations(running) for running in range(1, 60)]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] == pytest.approx(NormalDist().inv_cdf(1 - 0.0025))
    before = risk.deviations(5)
    risk.preempted(5)
    assert risk.deviations(5) > before


def test_a_bound_that_was_reached_is_left_at_once() -> None:
    """What lies past the bound was never kept, and need not be unlearned."""
    risk = OverflowRisk(0.0025)
    for _ in range(20_000):
        risk.ended(100)
    least = risk.deviations(100)
    risk.preempted(100)
    assert risk.deviations(100) == pytest.approx(least + 0.25, abs=0.001)


@given(
    rows=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 80), st.integers(1, 3)), max_size=6),
    seen=st.lists(st.integers(1, 150), max_size=30),
    z=st.floats(0, 3),
)
def test_the_peak_lies_between_what_is_held_and_what_might_be(
    rows: list[tuple[int, int, int]], seen: list[int], z: float
) -> None:
    lengths = Lengths(LIMIT)
    for length in seen:
        lengths.of_all.drawn(length, length)
        lengths.of_all.ended(length)
    running = [Running(prompt, made, made + 60, n, lengths.of(prompt)) for prompt, made, n in rows]
    outlook = Outlook(LAYOUT, LIMIT)
    outlook.make({str(number): one for number, one in enumerate(running)})
    now = sum(LAYOUT.request_blocks(one.prompt_tokens, one.generated + 1, one.n) for one in running)
    most = sum(LAYOUT.request_blocks(one.prompt_tokens, one.max_tokens, one.n) for one in running)
    peak = outlook.peak(z)
    assert now <= peak + 1e-6
    if z == 0:
        assert peak <= most + 1e-6
    assert Outlook(LAYOUT, LIMIT).peak(z, running) == pytest.approx(peak)
    for number in range(len(running)):
        outlook.remove(str(number))
    assert outlook.peak(z) == pytest.approx(0.0, abs=1e-6)


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 300), st.integers(0, 80), st.integers(1, 200)), min_size=1, max_size=6
    )
)
def test_no_peak_hides_between_the_moments_looked_at(rows: list[tuple[int, int, int]]) -> None:
    """Where everyone is taken to run to the limit, the peak is what it would be, or more."""
    lengths = Lengths(LIMIT)
    running = [Running(prompt, made, made + left, 1, lengths.of(prompt)) for prompt, made, left in rows]
    really = max(
        sum(
            LAYOUT.request_blocks(one.prompt_tokens, one.generated + ahead + 1)
            for one in running
            if one.generated + ahead < one.max_tokens
        )
        for ahead in range(200)
    )
    assert Outlook(LAYOUT, LIMIT).peak(0.0, running) >= really - 1e-6
