"""How long answers are: what is learned, how soon, and how carefully it is believed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.core.lengths import STEP, LengthModel, Lengths

LIMIT = 2000


def model() -> LengthModel:
    return Lengths(LIMIT).of_all


def watch(model: LengthModel, length: int, *, ends: bool = True) -> None:
    model.drawn(length, length)
    if ends:
        model.ended(length)


def watch_about(model: LengthModel, length: int, times: int, *, ends: bool = True) -> None:
    """Answers of half to one and a half times the length."""
    dice = random.Random(length)
    for _ in range(times):
        watch(model, dice.randint(length // 2, length * 3 // 2), ends=ends)


def test_nothing_seen_is_strict() -> None:
    unknown = model()
    assert unknown.survival(0, LIMIT) == 1.0
    assert unknown.log_survival()[0] == 0.0


def test_what_was_seen_is_what_is_foreseen() -> None:
    dice = random.Random(1)
    known = model()
    lengths = [max(1, round(dice.expovariate(1 / 100))) for _ in range(3000)]
    for length in lengths:
        watch(known, length)
    for generated, more in [(0, 50), (0, 200), (100, 100), (300, 40)]:
        alive = [length for length in lengths[-1000:] if length > generated]
        really = sum(length > generated + more for length in alive) / len(alive)
        assert known.survival(generated, more) == pytest.approx(really, abs=0.08)
    assert known.mean_left(0, LIMIT) == pytest.approx(100, rel=0.15)
    assert known.mean_left(150, LIMIT) == pytest.approx(100, rel=0.25)
    assert known.mean_left(0, 10) <= 10


def test_those_that_still_run_count_so_short_ones_that_end_first_mislead_nobody() -> None:
    both, only_ended = model(), model()
    watch_about(both, 20, 100)
    watch_about(only_ended, 20, 100)
    watch_about(both, 400, 100, ends=False)
    assert only_ended.survival(0, 100) < 0.1
    assert both.survival(0, 100) == pytest.approx(0.5, abs=0.1)


def test_what_max_tokens_cut_off_is_no_ending() -> None:
    cut = model()
    for _ in range(200):
        watch(cut, 64, ends=False)
    assert cut.survival(0, 64) == 1.0


def test_a_change_of_habits_is_learned() -> None:
    changing = model()
    watch_about(changing, 30, 3000)
    assert changing.survival(0, 60) < 0.02
    watch_about(changing, 300, 2000)
    assert changing.survival(0, 60) > 0.6


def test_classes_of_prompts_differ_and_a_new_one_believes_all() -> None:
    lengths = Lengths(LIMIT)
    watch_about(lengths.of(100), 20, 100)
    watch_about(lengths.of(1500), 400, 100)
    assert lengths.of(100).survival(0, 100) < 0.1
    assert lengths.of(1500).survival(0, 100) > 0.9
    fresh = lengths.of(40_000)
    assert fresh.survival(0, 100) == pytest.approx(lengths.of_all.survival(0, 100), abs=0.05)


def test_a_tenants_answers_are_its_own_and_teach_all() -> None:
    lengths = Lengths(LIMIT)
    watch_about(lengths.of(100, "terse"), 20, 200)
    watch_about(lengths.of(100, "chatty"), 300, 200)
    assert lengths.of(100, "terse").mean_left(0, LIMIT) < 40
    assert lengths.of(100, "chatty").mean_left(0, LIMIT) > 200
    assert 60 < lengths.of(100).mean_left(0, LIMIT) < 250


def test_tenants_without_end_take_bounded_memory() -> None:
    lengths = Lengths(64)
    for number in range(3000):
        lengths.of(10, f"tenant-{number}")
    assert len(lengths._of_tenants) <= 512


@given(
    seen=st.lists(st.tuples(st.integers(1, LIMIT), st.booleans()), max_size=40),
    generated=st.integers(0, LIMIT),
    most=st.integers(1, LIMIT),
)
def test_curves_fall_and_means_are_in_bounds(seen: list[tuple[int, bool]], generated: int, most: int) -> None:
    learned = model()
    for length, ends in seen:
        watch(learned, length, ends=ends)
    curve = learned.log_survival()
    assert len(curve) * STEP > LIMIT
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(curve))
    assert 1.0 <= learned.mean_left(generated, most) <= most
    quarters = learned.quantiles_left(generated, most, 4)
    assert quarters == sorted(quarters)
    assert all(1.0 <= moment <= most for moment in quarters)
