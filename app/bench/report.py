"""From samples to figures, and from figures to a table or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from app.bench.client import Sample
from app.bench.machine import Shares
from app.table import columns
from model_runner.percentiles import Percentiles, percentiles
from model_runner.sizes import format_size


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One level of load. Times are seconds; a share of 1.0 is one core."""

    mode: str  # "concurrency" | "rate"
    level: float
    requests: int
    completed: int
    errors: dict[str, int]  # by kind
    elapsed_seconds: float
    prompt_tokens: int
    output_tokens: int
    without_usage: int  # completed requests whose tokens the server did not tell: their texts are counted
    output_tokens_per_second: float
    output_tokens_per_second_in_r: float | None
    requests_per_second: float
    ttft_seconds: Percentiles | None
    inter_token_seconds: Percentiles | None
    e2e_seconds: Percentiles | None
    generator_cpu: float
    api_cpu: float | None
    engine_cpu: float | None


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """What one sequence at a time could reach: every token reads all weights once."""

    read_bandwidth_bytes_per_second: float
    weights_bytes: int

    @property
    def tokens_per_second(self) -> float:
        return self.read_bandwidth_bytes_per_second / self.weights_bytes


def measure(
    mode: str, level: float, samples: Sequence[Sample], shares: Shares, roofline: Roofline | None
) -> Measurement:
    """Speed counts the tokens of completed requests, from the first request sent to the last one ended."""
    done = [sample for sample in samples if sample.error is None]
    elapsed = max(sample.ended for sample in samples) - min(sample.started for sample in samples)
    tokens = sum(sample.output_tokens for sample in done)
    speed = tokens / elapsed
    return Measurement(
        mode=mode,
        level=level,
        requests=len(samples),
        completed=len(done),
        errors=dict(Counter(sample.error for sample in samples if sample.error is not None).most_common()),
        elapsed_seconds=elapsed,
        prompt_tokens=sum(sample.prompt_tokens for sample in done),
        output_tokens=tokens,
        without_usage=sum(not sample.usage_told for sample in done),
        output_tokens_per_second=speed,
        output_tokens_per_second_in_r=speed / roofline.tokens_per_second if roofline else None,
        requests_per_second=len(done) / elapsed,
        ttft_seconds=percentiles([sample.ttft for sample in done if sample.ttft is not None]),
        inter_token_seconds=percentiles([gap for sample in done for gap in sample.gaps]),
        e2e_seconds=percentiles([sample.e2e for sample in done]),
        generator_cpu=shares.generator,
        api_cpu=shares.api,
        engine_cpu=shares.engine,
    )


def as_json(about: dict[str, Any], measurements: Sequence[Measurement], roofline: Roofline | None) -> str:
    """Units are in the names. `about` says what was asked."""
    report = {**about, "roofline": roofline, "measurements": measurements}
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"


def as_table(about: dict[str, Any], measurements: Sequence[Measurement], roofline: Roofline | None) -> str:
    head = [
        "load",
        "done",
        "tokens/s",
        *(["in R"] if roofline else []),
        "TTFT p50/p90/p99",
        "ITL p50/p90/p99",
    ]
    head += ["e2e p50/p90/p99", "generator", "API", "engine"]
    rows = [head, *(_row(each) for each in measurements)]
    lines = [_title(about, measurements), columns(rows)]
    if roofline:
        bandwidth = f"{roofline.read_bandwidth_bytes_per_second / 1e9:.1f} GB/s"
        weights = format_size(roofline.weights_bytes)
        lines.append(f"R = {bandwidth} / {weights} of weights = {roofline.tokens_per_second:.1f} tokens/s")
    lines.append(
        "times in milliseconds, as clients see them; generator, API, engine: cores that each kept busy"
    )
    for each in measurements:
        if each.without_usage:
            lines.append(
                f"at {_load(each)} the server told no usage of {each.without_usage} requests: "
                "each of their texts is counted as one token"
            )
        lines += [f"errors at {_load(each)}: {count} × {kind}" for kind, count in each.errors.items()]
    return "\n".join(lines) + "\n"


def _title(about: dict[str, Any], measurements: Sequence[Measurement]) -> str:
    completed = sum(each.completed for each in measurements)
    prompt, output = (
        f"{total / completed:.0f}" if total else "?"
        for total in (
            sum(each.prompt_tokens for each in measurements),
            sum(each.output_tokens for each in measurements),
        )
    )
    where = f"{about['model']} at {about['base_url']}, {about['endpoint']}"
    return f"{where}: {prompt} prompt and {output} output tokens a request"


def _load(each: Measurement) -> str:
    if each.mode == "rate":
        return f"{each.level:g}/s"
    return f"{each.level:g} client{'' if each.level == 1 else 's'}"


def _row(each: Measurement) -> list[str]:
    in_r = each.output_tokens_per_second_in_r
    return [
        _load(each),
        f"{each.completed}/{each.requests}",
        f"{each.output_tokens_per_second:.1f}",
        *([f"{in_r:.2f}"] if in_r is not None else []),
        *(_times(times) for times in (each.ttft_seconds, each.inter_token_seconds, each.e2e_seconds)),
        *(_share(share) for share in (each.generator_cpu, each.api_cpu, each.engine_cpu)),
    ]


def _times(times: Percentiles | None) -> str:
    if times is None:
        return "-"
    return " / ".join(f"{1000 * value:.0f}" for value in (times.p50, times.p90, times.p99))


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.2f}"
