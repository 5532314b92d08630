"""Columns for people to read."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], *, indent: int = 0) -> str:
    """Each as wide as its widest cell, to the right. All rows are equally long."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(" " * indent + line for line in lines)
