from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.percentiles import percentiles


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_pass(
    values: list[float], share: float
) -> None:
    figures = percentiles(values)
    assert figures is not None
    found = {0.5: figures.p50, 0.9: figures.p90, 0.99: figures.p99}[share]
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < math.ceil(share * len(values))


def test_the_mean() -> None:
    figures = percentiles([1.0, 2.0, 6.0])
    assert figures is not None
    assert figures.mean == pytest.approx(3.0)


def test_nothing_has_no_percentiles() -> None:
    assert percentiles([]) is None
