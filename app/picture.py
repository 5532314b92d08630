"""What all drawings have in common: the figure, its colours, and the file that it goes to."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

from app.options import UsageError

INK, SOFT, GRID = "#1c2733", "#66727f", "#e3e7eb"
LINE, FILL, COOL, DARK = "#b3261e", "#dbe9f6", "#2f6f9f", "#14181d"

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
  body {{ margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1c2733; background: #fff;
         font: 16px/1.5 system-ui, sans-serif; }}
  svg {{ width: 100%; height: auto; }}
  pre {{ overflow-x: auto; font-size: 13px; line-height: 1.4; background: #f6f8fa; padding: 1rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
{picture}
<pre>{text}</pre>
</body>
</html>
"""


def new_figure(width: float, height: float) -> Any:
    """Inches. Raises UsageError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'plimsoll[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(figure: Any, file: str, *, title: str, text: str) -> None:
    """In the format that the file's name ends in: .png, .svg or .html, which is one page with nothing to
    fetch and `text` below the picture. Raises UsageError where the file can't be written."""
    try:
        _save(figure, Path(file), title, text)
    except OSError as error:
        raise UsageError(f"--plot {file} can't be written: {error.strerror}.") from None


def _save(figure: Any, path: Path, title: str, text: str) -> None:
    if path.suffix.lower() == ".png":
        figure.savefig(path, format="png", dpi=160)
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Title": title})
    svg = drawn.getvalue()
    if path.suffix.lower() == ".html":
        # Within a page, neither the XML declaration nor the document type has a place.
        svg = _PAGE.format(title=html.escape(title), picture=svg[svg.index("<svg") :], text=html.escape(text))
    path.write_text(svg, encoding="utf-8")


def dress(axes: Any) -> None:
    axes.grid(which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=9)
    axes.legend(loc="upper right", fontsize=9, framealpha=0.95, edgecolor=GRID)
