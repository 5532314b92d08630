from __future__ import annotations

import random
from dataclasses import replace

import pytest

from model_runner.replay.figures import Slo, figures_of
from model_runner.replay.routing import ROUTINGS
from model_runner.replay.simulation import Course, Row, Setting, Simulation
from model_runner.replay.step_model import StepModel

SLO = Slo(ttft=2.0, itl=0.5)
SETTING = Setting(
    step_model=StepModel(base=0.006, per_token=3.2e-5, per_context_token=4e-8),
    kv_budget_tokens=4096,
    max_tokens=None,
    max_model_len=1024,
    overflow_risk=0.01,
)


def run(
    rows: list[Row],
    routing: str,
    replicas: int = 2,
    policy: str = "predictive",
    max_tokens: int | None = None,
) -> Course:
    setting = replace(SETTING, max_tokens=max_tokens)
    return Simulation(rows, setting, policy, replicas=replicas, routing=routing).run()


def chosen(rows: list[Row], routing: str, replicas: int = 2, max_tokens: int | None = None) -> list[int]:
    return [record.replica for record in run(rows, routing, replicas, max_tokens=max_tokens).records]


def test_round_robin_takes_turns() -> None:
    assert chosen([Row(index / 10, 50, 5) for index in range(6)], "round-robin", 3) == [0, 1, 2, 0, 1, 2]


def test_the_least_loaded_is_the_one_with_the_fewest_requests() -> None:
    # The first is still busy when the next come, and done when the last comes.
    rows = [Row(0.0, 50, 100), Row(0.01, 50, 10), Row(0.02, 50, 10), Row(0.03, 50, 10), Row(9.0, 50, 1)]
    assert chosen(rows, "least-loaded") == [0, 1, 0, 1, 0]


def test_cache_aware_counts_room_and_not_requests() -> None:
    # One long request takes more of the cache than two short ones.
    rows = [Row(0.0, 900, 100), Row(0.01, 20, 50), Row(0.02, 20, 50), Row(0.03, 20, 50)]
    assert chosen(rows, "cache-aware", max_tokens=100) == [0, 1, 1, 1]


def test_cache_aware_goes_where_the_prompt_is_known_while_there_is_room() -> None:
    first = Row(0.0, 200, 5, prefix_ids=(1, 2, 3))
    other = Row(0.01, 10, 5, prefix_ids=(9,))
    again = Row(0.02, 210, 5, prefix_ids=(1, 2, 4))
    assert chosen([first, other, again], "cache-aware", max_tokens=100) == [0, 1, 0]
    unlike = replace(again, prefix_ids=(5, 2))
    assert chosen([first, other, unlike], "cache-aware", max_tokens=100) == [0, 1, 1]


def test_how_much_of_the_prompts_was_known() -> None:
    rows = [Row(float(index), 100, 2, prefix_ids=(1, 2, index + 10)) for index in range(4)]
    aware, turns = run(rows, "cache-aware"), run(rows, "round-robin")
    assert figures_of(aware, SLO).known_prefix_ratio == pytest.approx(3 * 2 / 12)
    assert figures_of(turns, SLO).known_prefix_ratio == pytest.approx(2 * 2 / 12)


@pytest.mark.parametrize("policy", ["strict", "predictive", "greedy", "oracle"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_replica_ends_all_that_it_was_sent(policy: str, routing: str) -> None:
    rng = random.Random(5)
    rows = [Row(rng.uniform(0, 4), rng.randint(1, 400), rng.randint(1, 200)) for _ in range(80)]
    course = run(rows, routing, 3, policy)
    figures = figures_of(course, SLO)
    assert figures.completed_requests == 80
    assert {record.replica for record in course.records} == {0, 1, 2}
    assert 0 < figures.kv_utilization_ratio < 1
    assert figures_of(run(rows, routing, 3, policy), SLO) == figures


def test_two_replicas_are_faster_than_one() -> None:
    rng = random.Random(6)
    rows = [Row(0.0, rng.randint(1, 400), rng.randint(1, 200)) for _ in range(240)]
    one, two = (figures_of(run(rows, "least-loaded", number), SLO) for number in (1, 2))
    assert two.output_tokens_per_second > 1.5 * one.output_tokens_per_second
    assert two.output_tokens == one.output_tokens
