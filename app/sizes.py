"""Sizes and durations as people write them: `512MiB`, `1.5GB`, plain bytes; `90s`, `5m`, plain seconds.

How sizes are shown to people is model_runner.sizes.
"""

from __future__ import annotations

import re

_BYTES = {
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
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes, rounded down. Raises ValueError with examples of what to write."""
    number, unit = _split(text)
    if unit not in _BYTES:
        examples = "512MiB, 8GiB, 1.5GB or plain bytes (536870912)"
        raise ValueError(f"{text!r} is not a size{_which(number, unit)}; write {examples}")
    if len(number) > 30:
        raise ValueError(f"{number[:20]}… is out of range; no memory is so large")
    whole, _, fraction = number.partition(".")
    # Integers all the way: a float would lose bytes of a large size.
    size = int(whole + fraction) * _BYTES[unit] // int("1" + "0" * len(fraction))
    if size >= 1 << 63:
        raise ValueError(f"{text!r} is out of range; no memory is so large")
    return size


def parse_duration(text: str) -> float:
    """Seconds. Raises ValueError with examples of what to write."""
    number, unit = _split(text)
    if unit not in _SECONDS:
        raise ValueError(f"{text!r} is not a duration; write 30s, 5m, 1h, 500ms or plain seconds (30)")
    return float(number) * _SECONDS[unit]


def _split(text: str) -> tuple[str, str]:
    """Number and unit, in lower case; of what has another shape, a unit that nobody knows."""
    match = _QUANTITY.fullmatch(text.strip())
    return (match[1], match[2].lower()) if match else ("", "?")


def _which(number: str, unit: str) -> str:
    """`8G` may mean 8GB or 8GiB, which are 7 % apart: ask instead of guessing."""
    if number and unit in ("k", "m", "g", "t", "ki", "mi", "gi", "ti"):
        letter = unit[0].upper()
        return f" ({number}{letter}iB or {number}{letter}B?)"
    return ""
