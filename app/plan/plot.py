"""The load line: how many sequences fit at each context, and how fast they can be served along it."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

import numpy as np

from app.options import UsageError
from app.plan.report import Report
from app.sizes import format_size
from model_runner.core.capacity import AtContext

_POINTS = 80
_INK, _WATER, _HULL, _SPEED = "#1d2b3a", "#9cc4e4", "#c0392b", "#d98200"


def draw(report: Report, file: str) -> None:
    """Write the picture, as PNG, SVG or a page by the file's name. Raises UsageError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'plimsoll[plot]'") from None
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    _fill(figure, report)
    path = Path(file)
    if path.suffix.lower() == ".html":
        path.write_text(_page(figure, report), encoding="utf-8")
    else:
        figure.savefig(path, dpi=160)


def _line(report: Report) -> list[AtContext]:
    """The plan at contexts from 64 tokens up to the model's own, evenly spaced to the eye."""
    contexts = np.unique(
        np.geomspace(min(64, report.longest_context), report.longest_context, _POINTS).astype(int)
    )
    return [at for at in map(report.plan.at_context, contexts.tolist()) if at.max_sequences]


def _fill(figure: Any, report: Report) -> None:
    line = _line(report)
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(_title(report), loc="left", color=_INK, fontsize=11)
    axes.set_xlabel("context of each sequence, tokens")
    axes.set_ylabel("sequences at once")
    axes.grid(True, which="major", color="#e3e8ee", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    if not line:
        axes.text(0.5, 0.5, "not one sequence fits", transform=axes.transAxes, ha="center", color=_HULL)
        return
    contexts = [at.context for at in line]
    batches = [at.max_sequences or 0 for at in line]
    axes.fill_between(contexts, batches, 0.9, color=_WATER, alpha=0.45, linewidth=0)
    axes.plot(contexts, batches, color=_HULL, linewidth=2.2, label="the load line: no more memory")
    axes.set_xlim(contexts[0], contexts[-1])
    axes.set_ylim(0.9, max(batches) * 1.6)
    axes.text(contexts[len(contexts) // 6], 1.3, "fits", color="#2c5d82", fontsize=13, style="italic")
    axes.xaxis.set_major_formatter(lambda value, _: _tokens(int(value)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if report.plan.device.bandwidth is not None:
        _add_speed(axes, line)
    axes.legend(loc="upper right", frameon=False, fontsize=9)


def _add_speed(axes: Any, line: list[AtContext]) -> None:
    """The ceiling along the line, on an axis of its own; and where the caches outweigh the weights."""
    contexts = [at.context for at in line]
    halves = [at.half_ceiling_batch or np.nan for at in line]
    axes.plot(
        contexts,
        halves,
        color=_INK,
        linewidth=1.1,
        linestyle=":",
        label="caches read outweigh the weights above",
    )
    speed = axes.twinx()
    speed.set_yscale("log")
    speed.plot(
        contexts, [at.tokens_per_second or np.nan for at in line], color=_SPEED, linewidth=1.6, linestyle="--"
    )
    speed.set_ylabel("tokens/s at most, along the load line", color=_SPEED)
    speed.tick_params(axis="y", colors=_SPEED)
    speed.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    speed.spines[["top", "left"]].set_visible(False)
    axes.plot([], [], color=_SPEED, linewidth=1.6, linestyle="--", label="tokens/s at most (right axis)")


def _title(report: Report) -> str:
    plan, ranks = report.plan, report.options.tensor_parallel
    devices = f"{ranks} × {report.device}" if ranks > 1 else report.device
    return (
        f"{Path(report.model).name or report.model} on {devices}\n{format_size(plan.weights.total_bytes)} of "
        f"weights, {format_size(plan.kv_budget_bytes)} of {plan.spec.kv_dtype} cache"
        f"{' per device' if ranks > 1 else ''}"
    )


def _tokens(count: int) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}"


def _page(figure: Any, report: Report) -> str:
    """One self-contained page: the picture as inline SVG, and the figures as a table that can be copied."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    svg = drawn.getvalue()
    rows = "".join(
        f"<tr><td>{at.context:,}</td><td>{html.escape(format_size(at.sequence_bytes))}</td>"
        f"<td>{'any' if at.max_sequences is None else f'{at.max_sequences:,}'}</td></tr>"
        for at in report.plan.contexts
    )
    title = html.escape(_title(report).replace("\n", ": "))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: {_INK}; max-width: 60rem; margin: 2rem auto; }}
svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .2rem .9rem; text-align: right; }}
tr + tr {{ border-top: 1px solid #e3e8ee; }}
</style>
{svg[svg.index("<svg") :]}
<table><tr><th>context</th><th>bytes per sequence</th><th>sequences at once</th></tr>{rows}</table>
</html>
"""
