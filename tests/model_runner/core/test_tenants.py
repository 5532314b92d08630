"""Tenants and their rates."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.core.tenants import RateLimit, RateLimits, Tenant, Tenants


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"name": ""}, "a tenant needs a name"),
        ({"weight": 0}, "weight must be above 0, not 0"),
        ({"weight": math.nan}, "weight must be above 0, not nan"),
        ({"weight": math.inf}, "weight must be above 0, not inf"),
        ({"max_reserved_blocks": -1}, "max_reserved_blocks must be at least 0, not -1"),
        ({"max_queued_requests": -2}, "max_queued_requests must be at least 0, not -2"),
        ({"requests_per_second": 0.0}, "requests_per_second must be above 0, not 0"),
        ({"burst_requests": 0}, "burst_requests must be at least 1, not 0"),
    ],
)
def test_a_tenant_that_makes_no_sense_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}$"):
        Tenant(**{"name": "a", **wrong})


def test_a_burst_is_one_seconds_worth_unless_it_is_given() -> None:
    assert Tenant("a", requests_per_second=0.2).burst == 1
    assert Tenant("a", requests_per_second=7.5).burst == 8
    assert Tenant("a", requests_per_second=7.5, burst_requests=2).burst == 2
    assert Tenant("a").burst == 1


def test_who_is_not_described_gets_the_limits_of_others_under_its_own_name() -> None:
    tenants = Tenants([Tenant("a", weight=2), Tenant("default", weight=3)])
    assert (tenants["a"].weight, tenants["default"].weight) == (2, 3)
    assert tenants["who"] == Tenant("who", weight=3)
    assert Tenants(others=Tenant("o", weight=5))["who"] == Tenant("who", weight=5)
    assert Tenants()["who"] == Tenant("who")
    assert tenants.names == ["a", "default"]


def test_two_tenants_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tenants named 'a'"):
        Tenants([Tenant("a"), Tenant("a")])


def test_a_bucket_lets_a_burst_through_and_then_the_rate() -> None:
    limit = RateLimit(2.0, 3)
    assert [limit.take(10.0) for _ in range(3)] == [0, 0, 0]
    assert limit.take(10.0) == pytest.approx(0.5)
    assert limit.take(10.25) == pytest.approx(0.25)
    assert limit.take(10.5) == 0
    assert limit.take(10.5) == pytest.approx(0.5)
    assert [limit.take(1000.0) for _ in range(3)] == [0, 0, 0]  # no more than a burst after any pause
    assert limit.take(1000.0) == pytest.approx(0.5)


def test_asking_takes_nothing() -> None:
    limit = RateLimit(1.0, 1)
    assert [limit.wait(0.0), limit.wait(0.0), limit.take(0.0)] == [0, 0, 0]
    assert limit.wait(0.0) == limit.wait(0.0) == 1.0


@given(
    rate=st.floats(0.001, 1000),
    burst=st.integers(1, 20),
    start=st.floats(0, 1e9),
    pauses=st.lists(st.floats(0, 3), min_size=1, max_size=60),
)
def test_no_span_of_time_holds_more_than_a_burst_and_its_rate(
    rate: float, burst: int, start: float, pauses: list[float]
) -> None:
    limit, now, through = RateLimit(rate, burst), start, []
    for pause in pauses:
        now += pause / rate
        if limit.take(now) == 0:
            through.append(now)
    for first, since in enumerate(through):
        for count, until in enumerate(through[first:], start=1):
            assert count <= burst + (until - since) * rate * (1 + 1e-6) + 1e-3


@given(
    rate=st.floats(0.001, 1000), burst=st.integers(1, 20), start=st.floats(0, 1e9), turns=st.integers(1, 60)
)
def test_who_comes_back_when_it_was_told_to_gets_its_token(
    rate: float, burst: int, start: float, turns: int
) -> None:
    limit, now = RateLimit(rate, burst), start
    for _ in range(turns):
        wait = limit.take(now)
        if wait:
            assert wait <= (1 + 1e-6) / rate + 1e-6
            now += wait
            assert limit.take(now) == 0


def test_each_tenant_has_its_own_bucket_and_who_has_no_rate_has_none() -> None:
    limits = RateLimits(Tenants([Tenant("a", requests_per_second=1), Tenant("b", requests_per_second=1)]))
    assert [limits.take("a", 0.0), limits.take("b", 0.0)] == [0, 0]
    assert [limits.wait("a", 0.0), limits.take("a", 0.0)] == [1, 1]
    assert [limits.take("c", 0.0) for _ in range(100)] == [0] * 100
    assert limits.wait("c", 0.0) == 0
    assert len(limits) == 2


def test_buckets_are_as_many_as_tenants_of_late_whatever_names_a_gateway_sends() -> None:
    limits = RateLimits(Tenants(others=Tenant("default", requests_per_second=1)))
    for second in range(10_000):
        assert limits.take(f"tenant-{second}", float(second)) == 0
        assert limits.take(f"tenant-{second}", float(second)) > 0
        assert len(limits) <= 64
