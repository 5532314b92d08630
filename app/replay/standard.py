"""The replay by which figures are compared: backlogs first, then arrivals in proportion to what the oracle
sustained on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from app.replay.jobs import Job, Outcome
from app.replay.presets import PRESETS
from app.replay.traces import Trace
from model_runner.replay.figures import Slo
from model_runner.replay.simulation import Setting

ROWS = 2000
MAX_MODEL_LEN = 8192
BUDGETS = (12_000, 24_000, 96_000)  # tokens
TIMED_BUDGET = 24_000
MAX_TOKENS = (1000, None)
LOADS = (0.5, 1.0, 2.0, 4.0)  # of what the oracle sustains
# Of the two seconds to the first token, what is left when the prompt's own prefill has its share.
MAX_QUEUE_SECONDS = 1.5
_TIMED = Slo(ttft=2.0, itl=0.5)
_BACKLOG = Slo(ttft=60.0, itl=0.5)
WITHOUT_DEADLINES = " without deadlines"

RunAll = Callable[[Sequence[Job], str], list[Outcome]]


def run_standard(
    trace: Trace, run_all: RunAll, *, overflow_risk: float, max_queue_seconds: float | None, full: bool
) -> list[Outcome]:
    """`run_all` takes jobs, and what they are to be called."""
    patience = MAX_QUEUE_SECONDS if max_queue_seconds is None else max_queue_seconds
    cases = list(product(BUDGETS, MAX_TOKENS))
    backlog = [job for case in cases for job in _backlog(trace, *case, overflow_risk)]
    outcomes = run_all(backlog, "backlogs")
    sustained = {
        (
            outcome.job.setting.kv_budget_tokens,
            outcome.job.setting.max_tokens,
        ): outcome.figures.requests_per_second
        for outcome in outcomes
        if outcome.job.policy == "oracle"
    }
    timed = [
        job
        for case in cases
        if full or case[0] == TIMED_BUDGET
        for load in LOADS
        for job in _timed(trace, *case, overflow_risk, patience, load, sustained[case])
    ]
    return outcomes + run_all(timed, "timed arrivals")


def _setting(budget: int, max_tokens: int | None, risk: float, patience: float = float("inf")) -> Setting:
    return Setting(
        step_model=PRESETS["standard"].model,
        kv_budget_tokens=budget,
        max_tokens=max_tokens,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=256,
        max_num_batched_tokens=1024,
        block_size=16,
        max_queue_seconds=patience,
        overflow_risk=risk,
    )


def _backlog(trace: Trace, budget: int, max_tokens: int | None, risk: float) -> list[Job]:
    rows, setting = trace.at_once(), _setting(budget, max_tokens, risk)
    return [
        Job(
            name=policy,
            policy=policy,
            rows=rows,
            setting=setting,
            slo=_BACKLOG,
            arrivals="backlog",
            rate_scale=1.0,
        )
        for policy in ("oracle", "predictive", "strict", "greedy")
    ]


def _timed(
    trace: Trace,
    budget: int,
    max_tokens: int | None,
    risk: float,
    patience: float,
    load: float,
    sustained: float,
) -> list[Job]:
    in_trace = len(trace.rows) / trace.span_seconds if trace.span_seconds else 0.0
    scale = load * sustained / in_trace if in_trace else 1.0
    rows = trace.scaled(scale)
    never, bounded = _setting(budget, max_tokens, risk), _setting(budget, max_tokens, risk, patience)
    return [
        Job(
            name=policy + (WITHOUT_DEADLINES if unbounded and policy in ("predictive", "strict") else ""),
            policy=policy,
            rows=rows,
            setting=never if unbounded else bounded,
            slo=_TIMED,
            arrivals="trace",
            rate_scale=scale,
            load=load,
        )
        for policy, unbounded in (
            ("oracle", True),
            ("predictive", False),
            ("predictive", True),
            ("strict", False),
            ("strict", True),
            ("greedy", True),
        )
    ]
