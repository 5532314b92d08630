"""The load line: batch against context where the memory ends, and the speed that is possible along it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.picture import COOL, DARK, FILL, INK, LINE, SOFT, dress, new_figure, save
from app.plan.report import Report, as_table
from model_runner.core.capacity import Plan, cached_tokens
from model_runner.sizes import format_size

_POINTS_PER_DOUBLING = 12
_SHORTEST = 256  # tokens


def draw(report: Report, file: str) -> None:
    """Write the picture in the format that the file's name ends in. Raises UsageError where it can't."""
    figure = new_figure(9.6, 8.4)
    _fill(figure, report)
    save(figure, file, title=_title(report), text=as_table(report))


def _title(report: Report) -> str:
    ranks = report.options.tensor_parallel
    name = Path(report.model).name or report.model
    return f"{name} on {f'{ranks} × ' if ranks > 1 else ''}{report.device}"


def _fill(figure: Any, report: Report) -> None:
    plan = report.plan
    contexts = _contexts(report)
    # Between whole numbers, too: a line that is a staircase only where batches are small reads badly.
    prices = [plan.spec.sequence_bytes(cached_tokens(each)) for each in contexts]
    batches = [plan.kv_budget_bytes / price if price else float("nan") for price in prices]
    if plan.device.bandwidth is None:
        load, speed = figure.subplots(), None
    else:
        load, speed = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(_title(report), x=0.02, ha="left", fontsize=15, fontweight="bold", color=INK)
    _draw_load(load, report, contexts, batches)
    if speed is not None:
        _draw_speed(speed, plan, contexts, batches)
    _context_axis(load if speed is None else speed, report, contexts)


def _contexts(report: Report) -> list[int]:
    """Evenly spaced on a logarithmic axis, from short to the longest that is asked or possible."""
    asked = [at.context for at in report.plan.contexts]
    longest = max(report.longest_context, *asked)
    shortest = min(_SHORTEST, *asked, max(longest // 2, 1))
    contexts, at = [], float(shortest)
    while at < longest:
        contexts.append(round(at))
        at *= 2 ** (1 / _POINTS_PER_DOUBLING)
    return sorted({*contexts, longest})


def _draw_load(axes: Any, report: Report, contexts: Sequence[int], batches: Sequence[float]) -> None:
    plan = report.plan
    top = 2 * max([4.0, *(each for each in batches if not math.isnan(each))])
    about = (
        f"{format_size(plan.kv_budget_bytes)} left for the cache beside "
        f"{format_size(plan.weights.total_bytes)} of weights"
        f"{' on each device' if report.options.tensor_parallel > 1 else ''}; cache in {plan.spec.kv_dtype}"
    )
    axes.set_title(about, loc="left", fontsize=10, color=SOFT)
    axes.fill_between(contexts, 0.5, batches, color=FILL, label="fits")
    axes.plot(contexts, batches, color=LINE, linewidth=4.5, label="the load line: memory is full")
    if plan.layout is not None and plan.num_blocks:
        layout, blocks = plan.layout, plan.num_blocks
        ours = [blocks / layout.sequence_blocks(cached_tokens(each)) for each in contexts]
        dashes = (0, (5, 2))
        # On top of the load line, and thinner: where whole blocks cost hardly more, both are seen.
        style = {"color": DARK, "linewidth": 1.6, "linestyle": dashes, "zorder": 3}
        axes.plot(contexts, ours, label="as Plimsoll allocates", **style)
    evens = [plan.at_context(each).half_ceiling_batch or float("nan") for each in contexts]
    label = "cache read = weights read: above, half of the ceiling is passed"
    axes.plot(contexts, evens, color=COOL, linewidth=1.4, linestyle=":", label=label)
    for at in plan.contexts:
        if at.max_sequences:
            spot = (at.context, at.max_sequences)
            axes.plot(*spot, "o", color=LINE, markeredgecolor="white", markersize=7, zorder=4)
            axes.annotate(
                f"{at.max_sequences:,}", spot, (5, 6), textcoords="offset points", fontsize=9, color=INK
            )
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.5, top)
    axes.set_ylabel("sequences in the batch", color=INK)
    axes.set_yticks(_powers(1, top))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    dress(axes)


def _draw_speed(axes: Any, plan: Plan, contexts: Sequence[int], batches: Sequence[float]) -> None:
    """Tokens per second: of the fullest batch, of one sequence alone, and of a batch without end."""
    prices = [plan.spec.sequence_bytes(cached_tokens(each)) for each in contexts]

    def ceiling(batch: Callable[[float], int]) -> list[float]:
        found = []
        for price, most in zip(prices, batches, strict=True):
            wished = batch(most) if most >= 1 else 0
            step = plan.device.step_seconds(plan.weights, wished, price)
            found.append(wished / step if wished and step else float("nan"))
        return found

    bandwidth = plan.device.bandwidth or float("nan")
    endless = [bandwidth / price if price else float("nan") for price in prices]
    title = "The ceiling that memory bandwidth sets along the line"
    axes.set_title(title, loc="left", fontsize=10, color=SOFT)
    axes.plot(contexts, endless, color=COOL, linewidth=1.4, linestyle=":", label="a batch without end")
    axes.plot(contexts, ceiling(int), color=LINE, linewidth=2.4, label="the largest batch that fits")
    axes.plot(contexts, ceiling(lambda _: 1), color=SOFT, linewidth=1.4, label="one sequence alone")
    axes.set_yscale("log")
    axes.set_ylabel("tokens per second, at most", color=INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    dress(axes)


def _context_axis(axes: Any, report: Report, contexts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(contexts[0], contexts[-1] * 1.2)
    axes.set_xticks(_powers(contexts[0], contexts[-1]))
    axes.xaxis.set_major_formatter(lambda value, _: _tokens(round(value)))
    unknown = "" if report.about.model_context else " (the model states no longest)"
    axes.set_xlabel(f"context: tokens of prompt and answer{unknown}", color=INK)


def _powers(lowest: float, highest: float) -> list[int]:
    """Powers of two between; every other one where there would be many."""
    found = [1 << bit for bit in range(41) if lowest <= 1 << bit <= highest]
    return found[:: 1 if len(found) <= 12 else 2]


def _tokens(count: int) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}"
