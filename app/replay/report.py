"""A replay's figures as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec

from app.replay.jobs import Job, Outcome
from app.replay.presets import StepModelChoice
from app.replay.traces import Trace
from app.table import columns
from model_runner.percentiles import Percentiles


@dataclass(frozen=True, slots=True)
class Report:
    trace: Trace
    step_model: StepModelChoice
    seed: int
    outcomes: Sequence[Outcome]

    @property
    def sections(self) -> list[list[Outcome]]:
        """Those that differ in nothing but the policy, together."""
        return [list(same) for _, same in groupby(self.outcomes, key=lambda each: _conditions(each.job))]


def as_json(report: Report) -> str:
    """Keys are documented in docs/replay.md. Times are seconds."""
    made = {
        "trace": report.trace.name,
        "rows": len(report.trace.rows),
        "rows_too_long": report.trace.too_long,
        "rows_without_tokens": report.trace.without_tokens,
        "seed": report.seed,
        "step_model": {"name": report.step_model.name, **msgspec.to_builtins(report.step_model.preset)},
        "policies": [row for section in report.sections for row in _rows(section)],
    }
    return msgspec.json.format(msgspec.json.encode(made), indent=2).decode()


def _rows(section: Sequence[Outcome]) -> list[dict[str, Any]]:
    oracle = _oracle(section)
    rows = []
    for outcome in section:
        job, figures = outcome.job, outcome.figures
        rows.append(
            {
                "policy": job.name,
                **_asked(job),
                "output_tokens_per_second_to_oracle": _tokens_to_oracle(outcome, oracle),
                "goodput_to_oracle": _goodput_to_oracle(outcome, oracle),
                **msgspec.to_builtins(figures),
            }
        )
    return rows


def _asked(job: Job) -> dict[str, Any]:
    setting = job.setting
    span = job.rows[-1].arrives_at
    bounded = setting.max_queue_seconds < float("inf")
    return {
        "kv_budget_tokens": setting.kv_budget_tokens,
        "max_tokens": setting.max_tokens,
        "arrivals": job.arrivals,
        "rate_scale": job.rate_scale,
        "load": job.load,
        "offered_requests_per_second": len(job.rows) / span if span else None,
        "max_queue_seconds": setting.max_queue_seconds if bounded else None,
        "overflow_risk": setting.overflow_risk,
        "target_itl_seconds": setting.target_itl_seconds,
        "replicas": job.replicas,
        "routing": job.routing,
        "slo_ttft_seconds": job.slo.ttft,
        "slo_itl_seconds": job.slo.itl,
    }


def as_table(report: Report) -> str:
    parts = [
        _title(report),
        *(f"{_heading(section[0].job)}\n{_table(section)}" for section in report.sections),
    ]
    parts += [note for section in report.sections for note in _tenants(section)]
    return "\n\n".join([*parts, _NOTES])


_NOTES = """\
tokens/s: delivered; to oracle: of what one who knows every answer's length delivers; goodput: requests
a second within both limits; TTFT, ITL: to the first token, and between two; preempted: requests;
recomputed: tokens, of those delivered; cache: held of what is there; rejected: at the door or from the
queue; wait off by: median error of the predicted wait. Percentiles are p50 / p99."""


def _title(report: Report) -> str:
    trace, chosen = report.trace, report.step_model
    left_out = [
        f"{count:,} left out: {why}"
        for count, why in (
            (trace.too_long, "longer than the context"),
            (trace.without_tokens, "without tokens"),
        )
        if count
    ]
    rows = "; ".join([f"{len(trace.rows):,} requests", *left_out])
    preset = chosen.preset
    about = f" ({preset.about})" if preset.about else ""
    return (
        f"{trace.name}: {rows}\n"
        f"a step takes {preset.base_seconds:g} s + {preset.per_token_seconds:g} s a token + "
        f"{preset.per_context_token_seconds:g} s a token of context: {chosen.name}{about}"
    )


def _heading(job: Job) -> str:
    setting = job.setting
    limit = "no max_tokens" if setting.max_tokens is None else f"max_tokens {setting.max_tokens:,}"
    each = f" on each of {job.replicas} servers ({job.routing})" if job.replicas > 1 else ""
    if job.arrivals == "backlog":
        when = "backlog"
    else:
        span = job.rows[-1].arrives_at
        rate = f", {len(job.rows) / span:.2f} requests/s" if span else ""
        when = f"{job.load:g} times what the oracle sustains{rate}" if job.load else f"arrivals{rate}"
    limits = f"TTFT {job.slo.ttft:g} s, ITL {job.slo.itl:g} s"
    return f"{when}; {setting.kv_budget_tokens:,} tokens of cache{each}, {limit}; limits {limits}"


def _table(section: Sequence[Outcome]) -> str:
    oracle = _oracle(section)
    head = (
        "policy",
        "tokens/s",
        "to oracle",
        "goodput/s",
        "to oracle",
        "TTFT s",
        "ITL ms",
        "preempted",
        "recomputed",
    )
    rows: list[tuple[str, ...]] = [(*head, "cache", "rejected", "wait off by")]
    for outcome in section:
        figures = outcome.figures
        error = figures.wait_prediction_error
        rows.append(
            (
                outcome.job.name,
                f"{figures.output_tokens_per_second:,.0f}",
                _share(_tokens_to_oracle(outcome, oracle)),
                f"{figures.goodput_requests_per_second:.2f}",
                _share(_goodput_to_oracle(outcome, oracle)),
                _pair(figures.ttft_seconds, 1, ".2f"),
                _pair(figures.itl_seconds, 1000, ".0f"),
                f"{figures.preempted_requests_ratio:.2%}",
                f"{figures.recomputed_tokens_ratio:.2%}",
                f"{figures.kv_utilization_ratio:.1%}",
                f"{figures.rejected_ratio:.1%}",
                "-" if error is None else f"{error:.0%}",
            )
        )
    return columns(rows, indent=2)


def _tenants(section: Sequence[Outcome]) -> Iterable[str]:
    for outcome in section:
        tenants = outcome.figures.tenants
        if tenants is None:
            continue
        rows: list[tuple[str, ...]] = [("tenant", "requests", "tokens", "goodput/s", "TTFT s", "rejected")]
        for name, figures in tenants.items():
            rows.append(
                (
                    name,
                    f"{figures.requests:,}",
                    f"{figures.output_tokens:,}",
                    f"{figures.goodput_requests_per_second:.2f}",
                    _pair(figures.ttft_seconds, 1, ".2f"),
                    f"{figures.rejected_ratio:.1%}",
                )
            )
        yield f"{outcome.job.name}, by tenant\n{columns(rows, indent=2)}"


def _conditions(job: Job) -> tuple[object, ...]:
    return (job.setting.kv_budget_tokens, job.setting.max_tokens, job.arrivals, job.load)


def _oracle(section: Sequence[Outcome]) -> Outcome | None:
    return next((outcome for outcome in section if outcome.job.policy == "oracle"), None)


def _tokens_to_oracle(outcome: Outcome, oracle: Outcome | None) -> float | None:
    if oracle is None or not oracle.figures.output_tokens_per_second:
        return None
    return outcome.figures.output_tokens_per_second / oracle.figures.output_tokens_per_second


def _goodput_to_oracle(outcome: Outcome, oracle: Outcome | None) -> float | None:
    if oracle is None or not oracle.figures.goodput_requests_per_second:
        return None
    return outcome.figures.goodput_requests_per_second / oracle.figures.goodput_requests_per_second


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.3f}"


def _pair(times: Percentiles | None, factor: float, form: str) -> str:
    if times is None:
        return "-"
    return f"{times.p50 * factor:{form}} / {times.p99 * factor:{form}}"
