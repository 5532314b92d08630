from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.replay.fit import Measured, fit
from model_runner.replay.step_model import StepModel


def measured(model: StepModel, seed: int = 0, noise: float = 0.0) -> list[Measured]:
    rng = random.Random(seed)
    rows = []
    for _ in range(40):
        steps = rng.randint(1, 30)
        tokens = sum(rng.choice([1, 8, 64, 512]) for _ in range(steps))
        context = sum(rng.randint(1, 60_000) for _ in range(steps))
        seconds = model.base * steps + model.per_token * tokens + model.per_context_token * context
        rows.append(Measured(steps, tokens, context, seconds * rng.uniform(1 - noise, 1 + noise)))
    return rows


@given(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-3), st.floats(1e-9, 1e-6), st.integers(0, 1000))
def test_what_was_put_in_comes_out(base: float, per_token: float, per_context: float, seed: int) -> None:
    fitted = fit(measured(StepModel(base, per_token, per_context), seed))
    assert fitted.model.base == pytest.approx(base, rel=1e-4)
    assert fitted.model.per_token == pytest.approx(per_token, rel=1e-4)
    assert fitted.model.per_context_token == pytest.approx(per_context, rel=1e-4)
    assert max(fitted.errors) < 1e-4


def test_noise_is_evened_out_and_told() -> None:
    fitted = fit(measured(StepModel(0.006, 3.2e-5, 4e-8), noise=0.03))
    assert fitted.model.base == pytest.approx(0.006, rel=0.15)
    assert fitted.model.per_token == pytest.approx(3.2e-5, rel=0.15)
    assert fitted.model.per_context_token == pytest.approx(4e-8, rel=0.3)
    assert 0.003 < fitted.median_error < 0.03


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 999), st.integers(1, 9999), st.floats(0.001, 9)),
        min_size=4,
        max_size=20,
    )
)
def test_no_cost_is_below_zero_whatever_was_measured(rows: list[tuple[int, int, int, float]]) -> None:
    try:
        model = fit([Measured(*row) for row in rows]).model
    except ValueError:
        return  # too much alike
    assert min(model.base, model.per_token, model.per_context_token) >= 0


def test_a_cost_that_would_be_below_zero_is_none() -> None:
    # Steps get faster with context, which they do not: it costs nothing.
    rows = [
        Measured(1, tokens, context, 0.01 + 1e-4 * tokens - 1e-9 * context)
        for tokens, context in ((1, 10), (1, 50_000), (100, 1000), (100, 90_000), (500, 500), (500, 99_000))
    ]
    fitted = fit(rows)
    assert fitted.model.per_context_token == 0
    assert fitted.model.base == pytest.approx(0.01, rel=0.05)


def test_what_does_not_tell_the_costs_apart_is_refused() -> None:
    with pytest.raises(ValueError, match="at least three"):
        fit([Measured(1, 2, 3, 0.1), Measured(1, 3, 4, 0.1)])
    with pytest.raises(ValueError, match="too much alike"):
        fit([Measured(index, index, 100 * index, 0.01 * index) for index in range(1, 9)])
    with pytest.raises(ValueError, match="of some time"):
        fit([Measured(1, 2, 3, 0.0)] * 5)
