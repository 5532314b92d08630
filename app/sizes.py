"""Sizes as people write them: `512MiB`, `8GiB`, `1.5GB`, or plain bytes."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]*)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes, rounded down. Raises ValueError with examples of what to write."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match["unit"].lower() not in _UNITS:
        hint = _hint(match["number"], match["unit"].lower()) if match else ""
        raise ValueError(
            f"{text!r} is not a size{hint}; write 512MiB, 8GiB, 1.5GB or plain bytes (536870912)"
        )
    whole, _, fraction = match["number"].partition(".")
    scale = 10 ** len(fraction)  # integers all the way: a float would lose bytes of a large size
    return int(whole + fraction) * _UNITS[match["unit"].lower()] // scale


def _hint(number: str, unit: str) -> str:
    """`8G` may mean 8GB or 8GiB, which are 7 % apart: ask instead of guessing."""
    if unit in ("k", "m", "g", "t", "ki", "mi", "gi", "ti"):
        letter = unit[0].upper()
        return f" ({number}{letter}iB or {number}{letter}B?)"
    return ""


def format_size(size: int) -> str:
    """The largest binary unit that leaves at least 1, with at most two decimals: `64 MiB`, `1.5 GiB`, `45 KiB`."""
    if abs(size) < 2**10:
        return f"{size} B"
    exponent = min((abs(size).bit_length() - 1) // 10, 4)
    number = f"{size / 2 ** (10 * exponent):.2f}".rstrip("0").rstrip(".")
    return f"{number} {('KiB', 'MiB', 'GiB', 'TiB')[exponent - 1]}"
