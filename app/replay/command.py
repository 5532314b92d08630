"""`plimsoll replay`: read the trace, play it through each policy, print or draw what came of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from app.replay import standard
from app.replay.jobs import Job, Outcome, run_all
from app.replay.options import ReplayOptions, load_options
from app.replay.plot import draw
from app.replay.presets import PRESETS, StepModelChoice
from app.replay.report import Report, as_json, as_table
from app.replay.traces import Trace, read_trace, with_tenants
from model_runner.replay.figures import Slo
from model_runner.replay.simulation import Setting


def replay(argv: Sequence[str]) -> int:
    """Returns the exit code. Raises UsageError for what was asked wrongly, a line of the trace included."""
    options = load_options(argv)
    report = _replay_standard(options) if options.standard else _replay(options)
    table = as_table(report)
    print(as_json(report) if options.format == "json" else table)
    if options.plot:
        drawn = _drawn(report)
        draw(drawn, options.plot, title=f"{report.trace.name}: the cache over time", text=table)
        print(f"drawn: {options.plot}", file=sys.stderr)
    return 0


def _replay(options: ReplayOptions) -> Report:
    trace = read_trace(
        options.trace,
        max_model_len=options.max_model_len,
        limit=options.limit,
        tenant_column=options.tenant_column,
    )
    if options.tenants.isdecimal():
        trace = with_tenants(trace, int(options.tenants), options.seed)
    outcomes = run_all(_jobs(options, trace), options.workers, "replay")
    return Report(trace, options.step_model, options.seed, outcomes)


def _replay_standard(options: ReplayOptions) -> Report:
    limit = options.limit or standard.ROWS
    trace = read_trace(options.trace, max_model_len=standard.MAX_MODEL_LEN, limit=limit, tenant_column=None)
    outcomes = standard.run_standard(
        trace,
        partial(_run_all, options.workers),
        overflow_risk=options.overflow_risk,
        max_queue_seconds=options.max_queue_seconds,
        full=options.full,
    )
    return Report(trace, StepModelChoice("standard", PRESETS["standard"]), options.seed, outcomes)


def _run_all(workers: int, jobs: Sequence[Job], what: str) -> list[Outcome]:
    return run_all(jobs, workers, what)


def _jobs(options: ReplayOptions, trace: Trace) -> list[Job]:
    backlog = options.arrivals == "backlog"
    patience = options.max_queue_seconds
    setting = Setting(
        step_model=options.step_model.preset.model,
        kv_budget_tokens=options.budget_tokens,
        max_tokens=options.max_tokens,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
        max_queue_seconds=float("inf") if patience is None else patience,
        overflow_risk=options.overflow_risk,
        target_itl_seconds=options.target_itl_ms / 1000 or None,
    )
    return [
        Job(
            name=policy,
            policy=policy,
            rows=trace.at_once() if backlog else trace.scaled(options.rate_scale),
            setting=setting,
            slo=Slo(ttft=options.slo_ttft or (60.0 if backlog else 2.0), itl=options.slo_itl),
            arrivals=options.arrivals,
            rate_scale=options.rate_scale,
            replicas=options.replicas,
            routing=options.routing,
        )
        for policy in dict.fromkeys(options.policy)
    ]


def _drawn(report: Report) -> list[Outcome]:
    """All; of the standard replay, the backlog that is in the middle."""
    if len(report.sections) == 1:
        return list(report.outcomes)
    return next(
        section
        for section in report.sections
        if section[0].job.setting.kv_budget_tokens == standard.TIMED_BUDGET
    )
