"""`plimsoll bench`: one measurement after another, how far it has come, one report."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from app.bench.client import Client
from app.bench.load import bodies, closed_loop, open_loop
from app.bench.machine import ProcessorMeter, read_bandwidth, weights_bytes
from app.bench.options import BenchOptions, load_options
from app.bench.progress import Progress
from app.bench.report import Measurement, Roofline, as_json, as_table, measure
from app.options import UsageError


class BenchError(Exception):
    """There is nothing to measure; the message says why."""


def bench(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code: 1 when not one request was completed."""
    options = load_options(argv, environ)
    try:
        model = options.model or _first_model(options)
        roofline = _roofline(options) if options.roofline else None
    except BenchError as error:
        print(f"plimsoll bench: {error}", file=sys.stderr)
        return 1
    with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
        measurements = runner.run(_measure_all(options, model, roofline))
    _write(options, _about(options, model), measurements, roofline)
    return 0 if any(each.completed for each in measurements) else 1


async def _measure_all(options: BenchOptions, model: str, roofline: Roofline | None) -> list[Measurement]:
    client = Client(options.base_url, options.endpoint, options.api_key, options.timeout)
    asked = bodies(options, model)
    mode, levels = ("rate", options.rate) if options.rate else ("concurrency", options.concurrency)
    return [
        await _measure(options, client, asked, mode=mode, level=level, roofline=roofline) for level in levels
    ]


async def _measure(
    options: BenchOptions,
    client: Client,
    asked: Iterator[dict[str, Any]],
    *,
    mode: str,
    level: float,
    roofline: Roofline | None,
) -> Measurement:
    requests = options.requests or _enough(mode, level)
    with Progress(f"{mode} {level:g}", requests, options.warmup) as progress:
        await closed_loop(
            client,
            asked,
            requests=options.warmup,
            concurrency=options.warmup,
            on_end=progress.warmed_up,
        )
        meter = ProcessorMeter(options.base_url)
        if mode == "rate":
            samples = await open_loop(
                client, asked, requests=requests, rate=level, seed=options.seed, on_end=progress.ended
            )
        else:
            samples = await closed_loop(
                client, asked, requests=requests, concurrency=int(level), on_end=progress.ended
            )
        return measure(mode, level, samples, meter.read(), roofline)


def _enough(mode: str, level: float) -> int:
    return max(16, round(10 * level)) if mode == "rate" else max(8, 4 * int(level))


def _first_model(options: BenchOptions) -> str:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    url = f"{options.base_url}/v1/models"
    try:
        answer = httpx.get(url, headers=headers, timeout=30)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise BenchError(f"no answer from {url}: {error}. Is the server up? --base-url says where.") from None
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"{url} lists no model; write --model NAME.") from None


def _roofline(options: BenchOptions) -> Roofline:
    weights = options.weights_bytes or weights_bytes(options.base_url)
    if not weights:
        raise BenchError("the server doesn't tell the size of its weights; write --weights-bytes SIZE too.")
    return Roofline(read_bandwidth_bytes_per_second=read_bandwidth(), weights_bytes=weights)


def _about(options: BenchOptions, model: str) -> dict[str, Any]:
    return {
        "base_url": options.base_url,
        "model": model,
        "endpoint": options.endpoint,
        "prompt_tokens_asked": options.prompt_tokens,
        "output_tokens_asked": options.output_tokens,
        "seed": options.seed,
        "warmup": options.warmup,
    }


def _write(
    options: BenchOptions, about: dict[str, Any], measurements: list[Measurement], roofline: Roofline | None
) -> None:
    report = (as_json if options.format == "json" else as_table)(about, measurements, roofline)
    if not options.output:
        print(report, end="")
        return
    try:
        Path(options.output).write_text(report, encoding="utf-8")
    except OSError as error:
        print(report, end="")  # an hour's measurement is not thrown away for a bad path
        raise UsageError(f"--output {options.output} can't be written: {error.strerror}.") from None
