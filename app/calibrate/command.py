"""`plimsoll calibrate`: batches of several sizes and lengths, one after the other; how long their steps took;
the step model that fits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from app.bench.client import Client
from app.calibrate.meter import Meter, Served, since
from app.calibrate.options import CalibrateOptions, load_options
from app.options import UsageError
from app.progress import Progress
from app.replay.presets import Preset
from app.table import columns
from model_runner.errors import StartupError
from model_runner.replay.fit import Fit, Measured, fit

_LOOK_SECONDS = 0.25
_SHORT = 2  # tokens of an answer, where it is the prompt's cost that is looked for
_FEWEST_STEPS = 4  # that are one measurement: a reading of the metrics disturbs a step a little


def calibrate(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code. Raises StartupError for what can't be measured."""
    options = load_options(argv, environ)
    served, cases = asyncio.run(_measure(options))
    try:
        fitted = fit([row for case in cases for row in case.rows])
    except ValueError as error:
        raise StartupError(f"{error}: write more --batch and --prompt-tokens.") from None
    preset = _preset(served, fitted)
    print(_as_json(preset, fitted) if options.format == "json" else _as_table(preset, fitted, cases))
    try:
        Path(options.output).write_bytes(msgspec.json.format(msgspec.json.encode(preset), indent=2) + b"\n")
    except OSError as error:
        raise UsageError(f"--output {options.output} can't be written: {error.strerror}.") from None
    return 0


@dataclass(frozen=True, slots=True)
class Case:
    """So many requests at once, of such lengths; what was measured while they ran."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    rows: tuple[Measured, ...]


async def _measure(options: CalibrateOptions) -> tuple[Served, list[Case]]:
    meter = Meter(options.base_url, options.api_key)
    client = Client(options.base_url, "completions", options.api_key, options.timeout)
    served = await meter.served()
    cases = [
        (batch, prompt)
        for prompt in options.prompt_tokens
        for batch in options.batch
        if _fits(served, batch, prompt + options.output_tokens)
    ]
    if not cases:
        raise StartupError(
            f"Nothing of this fits the server: its context is {served.max_model_len:,} tokens and its cache "
            f"{served.budget_tokens:,}; write smaller --prompt-tokens, or fewer --output-tokens."
        )
    measured: list[Case] = []
    with Progress("calibrate", 2 * sum(batch for batch, _ in cases)) as progress:
        await _send(client, served, *cases[0], options.output_tokens)  # the first is slower than others
        for batch, prompt in cases:
            for output in (_SHORT, options.output_tokens):
                rows = await _measure_case(client, meter, served, batch, prompt, output)
                measured.append(Case(batch, prompt, output, tuple(rows)))
                progress.advance(batch)
    return served, measured


def _fits(served: Served, batch: int, tokens: int) -> bool:
    return tokens <= served.max_model_len and batch * tokens <= served.budget_tokens


async def _measure_case(
    client: Client, meter: Meter, served: Served, batch: int, prompt: int, output: int
) -> list[Measured]:
    """The metrics are read now and then meanwhile: prefills and decodes come to different measurements."""
    rows: list[Measured] = []
    before = await meter.total()
    sending = asyncio.create_task(_send(client, served, batch, prompt, output))
    try:
        while not sending.done():
            await asyncio.wait([sending], timeout=_LOOK_SECONDS)
            now = await meter.total()
            seen = since(before, now)
            if seen.steps >= _FEWEST_STEPS or (sending.done() and seen.steps):
                rows.append(seen)
                before = now
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
    return rows


async def _send(client: Client, served: Served, batch: int, prompt: int, output: int) -> None:
    bodies = _bodies(served, batch, prompt, output)
    for sample in await asyncio.gather(*(client.complete(body) for body in bodies)):
        if sample.error is not None:
            raise StartupError(f"A request failed ({sample.error}): {batch} at once of {prompt} tokens.")


def _bodies(served: Served, batch: int, prompt: int, output: int) -> Iterator[dict[str, Any]]:
    for index in range(batch):
        yield {
            "model": served.model,
            # Of token ids, so that it is exactly so long; a small one is in every vocabulary.
            "prompt": [1 + (index + 7 * at) % 61 for at in range(prompt)],
            "max_tokens": output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _preset(served: Served, fitted: Fit) -> Preset:
    return Preset(
        base_seconds=fitted.model.base,
        per_token_seconds=fitted.model.per_token,
        per_context_token_seconds=fitted.model.per_context_token,
        kv_bytes_per_token=served.kv_bytes_per_token,
        about=f"{served.about}; median error {fitted.median_error:.1%}",
    )


def _as_json(preset: Preset, fitted: Fit) -> str:
    """Keys are documented in docs/replay.md."""
    report = {
        **msgspec.to_builtins(preset),
        "measurements": len(fitted.errors),
        "median_error": fitted.median_error,
        "largest_error": max(fitted.errors),
    }
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def _as_table(preset: Preset, fitted: Fit, cases: Sequence[Case]) -> str:
    shown: list[tuple[str, ...]] = [
        ("batch", "prompt", "answer", "steps", "tokens a step", "context a step", "ms a step", "fitted")
    ]
    for case in cases:
        steps, tokens = sum(row.steps for row in case.rows), sum(row.tokens for row in case.rows)
        context, seconds = sum(row.context_tokens for row in case.rows), sum(row.seconds for row in case.rows)
        each = fitted.model.seconds(tokens, context) + fitted.model.base * (steps - 1)
        shown.append(
            (
                f"{case.batch:,}",
                f"{case.prompt_tokens:,}",
                f"{case.output_tokens:,}",
                f"{steps:,}",
                f"{tokens / steps:,.1f}",
                f"{context / steps:,.0f}",
                f"{1e3 * seconds / steps:,.2f}",
                f"{1e3 * each / steps:,.2f}",
            )
        )
    return (
        f"{columns(shown)}\n\n{preset.about}\n"
        f"seconds of a step = {preset.base_seconds:.4g} + {preset.per_token_seconds:.4g} · tokens computed + "
        f"{preset.per_context_token_seconds:.4g} · tokens of context read"
    )
