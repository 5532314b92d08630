"""Bytes as people read them."""

from __future__ import annotations


def format_size(size: int) -> str:
    """In the largest binary unit that leaves at least 1, with at most two decimals: `64 MiB`, `1.5 GiB`."""
    if abs(size) < 2**10:
        return f"{size} B"
    exponent = min((abs(size).bit_length() - 1) // 10, 4)
    number = f"{size / 2 ** (10 * exponent):.2f}".rstrip("0").rstrip(".")
    return f"{number} {('KiB', 'MiB', 'GiB', 'TiB')[exponent - 1]}"
