"""Small traces, whose course can be told by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner.replay.figures import Figures, Slo, figures_of
from model_runner.replay.simulation import POLICIES, Course, Row, Setting, Simulation
from model_runner.replay.step_model import StepModel

SLO = Slo(ttft=2.0, itl=0.5)
# A step takes a second whatever is in it: times can be counted on fingers.
SECOND = Setting(
    step_model=StepModel(base=1.0, per_token=0.0, per_context_token=0.0),
    kv_budget_tokens=64,
    max_tokens=16,
    max_model_len=64,
    overflow_risk=0.01,
)
QUICK = Setting(
    step_model=StepModel(base=0.006, per_token=3.2e-5, per_context_token=4e-8),
    kv_budget_tokens=4096,
    max_tokens=None,
    max_model_len=1024,
    overflow_risk=0.01,
)


def course(rows: list[Row], setting: Setting, policy: str = "strict") -> Course:
    return Simulation(rows, setting, policy).run()


def figures(rows: list[Row], setting: Setting, policy: str = "strict") -> Figures:
    return figures_of(course(rows, setting, policy), SLO)


def chat(seed: int, requests: int, *, backlog: bool = False) -> list[Row]:
    rng = random.Random(seed)
    return [
        Row(
            0.0 if backlog else rng.uniform(0, requests / 4),
            rng.randint(1, 500),
            min(1 + int(rng.expovariate(1 / 80)), 500),
        )
        for _ in range(requests)
    ]


def test_strict_by_hand() -> None:
    """Of 4 blocks a request of 16 + 16 tokens takes 2, so two run and the third waits for the first's end."""
    rows = [Row(0.0, 16, 3), Row(0.5, 16, 5), Row(0.5, 16, 2)]
    first, second, third = course(rows, SECOND).records
    # The first runs alone from 0; the second comes in the middle of its first step.
    assert (first.admitted_at, first.first_token_at, first.ended_at) == (0.0, 1.0, 3.0)
    assert (second.admitted_at, second.first_token_at, second.ended_at) == (0.5, 2.0, 6.0)
    assert (third.admitted_at, third.first_token_at, third.ended_at) == (3.0, 4.0, 5.0)
    assert (first.tokens, second.tokens, third.tokens) == (3, 5, 2)
    assert first.predicted_wait_seconds is None
    assert third.predicted_wait_seconds is not None


def test_figures_by_hand() -> None:
    rows = [Row(0.0, 16, 3), Row(0.5, 16, 5), Row(0.5, 16, 2)]
    got = figures_of(course(rows, SECOND), Slo(ttft=2.0, itl=1.0))
    assert (got.seconds, got.steps, got.output_tokens) == (6.0, 6, 10)
    assert got.output_tokens_per_second == pytest.approx(10 / 6)
    assert got.requests_per_second == pytest.approx(3 / 6)
    assert got.goodput_requests_per_second == pytest.approx(2 / 6)  # the third's first token took 3.5 s
    assert got.ttft_seconds is not None
    assert (got.ttft_seconds.p50, got.ttft_seconds.p99) == (1.5, 3.5)
    assert got.itl_seconds is not None
    assert (got.itl_seconds.p50, got.itl_seconds.p99) == (1.0, 1.0)
    assert got.queue_seconds is not None
    assert (got.queue_seconds.p50, got.queue_seconds.p99) == (0.0, 2.5)
    # Blocks held after each step: the first's prompt and then its own second block, …
    assert got.kv_utilization_ratio == pytest.approx(sum((1, 3, 2, 3, 2, 0)) / (6 * 4))
    assert (got.preempted_requests_ratio, got.recomputed_tokens_ratio, got.rejected_ratio) == (0, 0, 0)


def test_a_gap_that_is_too_long_is_no_goodput() -> None:
    assert figures([Row(0.0, 16, 3)], SECOND).goodput_requests_per_second == 0  # a second between tokens
    assert figures([Row(0.0, 16, 1)], SECOND).goodput_requests_per_second == 1


def test_a_step_costs_its_tokens_and_the_context_that_they_read() -> None:
    step_model = StepModel(base=1.0, per_token=0.01, per_context_token=0.0001)
    setting = replace(SECOND, step_model=step_model, max_num_seqs=4, max_num_batched_tokens=10)
    (record,) = course([Row(0.0, 16, 2)], setting).records
    # 10 tokens of the prompt, the other 6 beside the context of the first, then one token after 17.
    first = 1.0 + 0.1 + 0.001
    second = 1.0 + 0.06 + 0.0016
    third = 1.0 + 0.01 + 0.0017
    assert record.first_token_at == pytest.approx(first + second)
    assert record.ended_at == pytest.approx(first + second + third)


def test_max_tokens_cuts_an_answer_short() -> None:
    (record,) = course([Row(0.0, 16, 40)], SECOND).records
    assert record.tokens == 16
    (record,) = course([Row(0.0, 16, 40)], replace(SECOND, max_tokens=None)).records
    assert record.tokens == 40


def test_what_never_fits_is_refused() -> None:
    got = figures([Row(0.0, 30, 5), Row(0.0, 16, 2)], replace(SECOND, kv_budget_tokens=32, max_tokens=None))
    assert (got.refused_requests, got.completed_requests, got.requests) == (2, 0, 2)
    assert (got.rejected_ratio, got.seconds, got.output_tokens_per_second) == (1, 0, 0)
    assert got.ttft_seconds is None


def test_who_would_wait_too_long_is_refused_and_who_does_is_dropped() -> None:
    rows = [Row(0.0, 16, 16), Row(0.1, 16, 16), *(Row(0.2, 16, 1) for _ in range(6))]
    got = figures(rows, replace(SECOND, max_queue_seconds=4.0))
    assert got.refused_requests + got.dropped_requests == 6
    assert got.completed_requests == 2
    assert figures(rows, SECOND).completed_requests == 8
    assert figures(rows, replace(SECOND, max_queue_seconds=4.0), "oracle").completed_requests == 8


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(POLICIES),
    st.sampled_from([1024, 2048, 8192]),
    st.sampled_from([None, 64, 600]),
    st.sampled_from([1.0, 30.0, float("inf")]),
    st.booleans(),
)
def test_every_row_has_one_ending(
    seed: int, policy: str, budget: int, max_tokens: int | None, patience: float, backlog: bool
) -> None:
    setting = replace(QUICK, kv_budget_tokens=budget, max_tokens=max_tokens, max_queue_seconds=patience)
    rows = chat(seed, 40, backlog=backlog)
    played = course(rows, setting, policy)
    got = figures_of(played, SLO)
    assert got.completed_requests + got.refused_requests + got.dropped_requests == len(rows)
    for record in played.records:
        assert (record.ended_at is not None) != record.refused
        if record.completed:
            most = 1024 - record.row.prompt_tokens if max_tokens is None else max_tokens
            assert record.tokens == min(record.row.output_tokens, most, 1024 - record.row.prompt_tokens)
            assert record.admitted_at is not None
            assert record.ttft_seconds is not None
            assert record.row.arrives_at <= record.admitted_at < record.row.arrives_at + record.ttft_seconds
        else:
            assert record.tokens == 0
    assert 0 <= got.kv_utilization_ratio <= 1
    for tally in played.tallies:
        assert all(level.used <= level.reserved <= setting.num_blocks for level in tally.levels)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_trace_gives_the_same_figures(policy: str) -> None:
    rows = chat(7, 60)
    assert figures(rows, QUICK, policy) == figures(rows, QUICK, policy)


def test_who_knows_the_future_is_at_least_as_fast_as_who_fears_it() -> None:
    rows = chat(3, 120, backlog=True)
    strict, oracle = (figures(rows, QUICK, policy) for policy in ("strict", "oracle"))
    assert oracle.output_tokens_per_second >= strict.output_tokens_per_second
    assert oracle.kv_utilization_ratio > strict.kv_utilization_ratio
    assert oracle.output_tokens == strict.output_tokens == sum(row.output_tokens for row in rows)


def test_greedy_computes_again_what_it_could_not_keep() -> None:
    got = figures(chat(5, 120, backlog=True), QUICK, "greedy")
    assert got.preempted_requests_ratio > 0
    assert got.recomputed_tokens_ratio > 0


def test_progress_is_told_to_the_end() -> None:
    told: list[int] = []
    Simulation(chat(1, 50), QUICK, "strict").run(told.append)
    assert told == sorted(told)
    assert told[-1] == 50


def test_a_tenants_own_figures() -> None:
    rows = [Row(0.0, 16, 1, "quiet"), Row(0.0, 16, 16, "loud"), Row(0.0, 16, 16, "loud")]
    tenants = figures(rows, SECOND).tenants
    assert tenants is not None
    assert {name: each.requests for name, each in tenants.items()} == {"loud": 2, "quiet": 1}
    assert tenants["quiet"].goodput_requests_per_second == pytest.approx(1 / 17)
    assert tenants["loud"].output_tokens == 32
    assert figures([Row(0.0, 16, 1)], SECOND).tenants is None


def test_the_cache_is_watched_over_time() -> None:
    played = course(chat(2, 60, backlog=True), QUICK, "predictive")
    levels = played.tallies[0].levels
    assert len(levels) >= 10
    assert [level.seconds for level in levels] == sorted(level.seconds for level in levels)
    assert max(level.used for level in levels) > 0.5 * QUICK.num_blocks
    assert any(level.predicted_peak > level.reserved for level in levels)
