"""The cache's use against the line over time, one picture below the other for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.picture import COOL, DARK, FILL, INK, LINE, SOFT, dress, new_figure, save
from app.replay.jobs import Outcome
from model_runner.replay.replica import Level

_POINTS = 1500


def draw(outcomes: Sequence[Outcome], file: str, *, title: str, text: str) -> None:
    """Raises UsageError without matplotlib, or where the file can't be written."""
    figure = new_figure(9.6, 1.4 + 2.3 * len(outcomes))
    figure.suptitle(title, x=0.02, ha="left", fontsize=15, fontweight="bold", color=INK)
    panels = figure.subplots(len(outcomes), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(outcome.figures.seconds for outcome in outcomes) or 1.0
    seconds = np.linspace(0.0, longest, _POINTS)
    for axes, outcome in zip(panels, outcomes, strict=True):
        _draw_one(axes, outcome, seconds)
    panels[-1].set_xlabel("seconds", color=INK)
    save(figure, file, title=title, text=text)


def _draw_one(axes: Any, outcome: Outcome, seconds: Any) -> None:
    job, figures = outcome.job, outcome.figures
    block_size, line = job.setting.block_size, job.setting.num_blocks * job.replicas
    used = _summed(outcome, seconds, lambda level: level.used)
    reserved = _summed(outcome, seconds, lambda level: level.reserved)
    peak = _summed(outcome, seconds, lambda level: level.predicted_peak)
    about = (
        f"{job.name}: {figures.output_tokens_per_second:,.0f} tokens/s, "
        f"{figures.kv_utilization_ratio:.0%} of the cache held, "
        f"{figures.preempted_requests_ratio:.1%} of requests preempted"
    )
    axes.set_title(about, loc="left", fontsize=10, color=SOFT)
    axes.fill_between(seconds, 0, used * block_size, color=FILL, label="held")
    axes.plot(seconds, reserved * block_size, color=COOL, linewidth=1.2, label="reserved or granted")
    if job.policy == "predictive":
        axes.plot(seconds, peak * block_size, color=DARK, linewidth=0.8, linestyle=":", label="peak foreseen")
    axes.axhline(line * block_size, color=LINE, linewidth=2.4, label="the line")
    axes.set_ylim(0, 1.25 * line * block_size)
    axes.set_xlim(0, seconds[-1])
    axes.set_ylabel("tokens of cache", color=INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    dress(axes)
    axes.legend(loc="upper right", fontsize=8, ncols=4, framealpha=0.95)


def _summed(outcome: Outcome, seconds: Any, value: Any) -> Any:
    """Of all replicas, at each of these moments: what was noted last before it."""
    total = np.zeros(len(seconds))
    for levels in outcome.levels:
        noted = (
            [Level(0.0, 0, 0, 0.0), *levels, Level(levels[-1].seconds + 1e-9, 0, 0, 0.0)] if levels else []
        )
        if noted:
            at = np.searchsorted([level.seconds for level in noted], seconds, side="right") - 1
            total += np.array([value(level) for level in noted], dtype=float)[at]
    return total
