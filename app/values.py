"""What an option's value may be: functions from what was written to the value. They raise ValueError, which
says what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from app.sizes import parse_duration, parse_size

Parse = Callable[[str], Any]

PICTURE_FORMATS = (".png", ".svg", ".html")


def text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value.strip()


def choice(*allowed: str) -> Parse:
    def parse(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"{value!r} is not one of {', '.join(allowed)}{did_you_mean(value, allowed)}")
        return value

    return parse


def yes(value: str) -> bool:
    """Of a switch."""
    return bool(choice("yes", "no")(value) == "yes")


def integer(minimum: int, maximum: int | None = None) -> Parse:
    def parse(value: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", value.strip()):
            raise ValueError(f"{value!r} is not a whole number; write for example {max(minimum, 1)}")
        if len(value.strip()) > 20:
            raise ValueError(f"{value.strip()[:20]}… is out of range; no number here is so long")
        _check_range(int(value), minimum, maximum)
        return int(value)

    return parse


def number(minimum: float, maximum: float | None = None) -> Parse:
    def parse(value: str) -> float:
        if not re.fullmatch(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)", value.strip()):
            raise ValueError(f"{value!r} is not a number; write for example {maximum or 30:g}")
        _check_range(float(value), minimum, maximum)
        return float(value)

    return parse


def _check_range(value: float, minimum: float, maximum: float | None) -> None:
    if value < minimum or (maximum is not None and value > maximum):
        allowed = f"at least {minimum:g}" if maximum is None else f"from {minimum:g} to {maximum:g}"
        raise ValueError(f"{value:g} is out of range; it must be {allowed}")


def memory(value: str) -> int:
    size = parse_size(value)
    if size < 1:
        raise ValueError("must be more than nothing; write for example 512MiB")
    return size


def duration(minimum: float) -> Parse:
    def parse(value: str) -> float:
        seconds = parse_duration(value)
        if not minimum <= seconds <= 86400:
            raise ValueError(f"{value} is out of range; it must be from {minimum:g}s to 24h")
        return seconds

    return parse


def model_len(value: str) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    length: int = integer(1)(value)
    return length


def or_none(parse: Parse) -> Parse:
    """`none` is a value, too."""
    return lambda value: None if value == "none" else parse(value)


def block_size(value: str) -> int:
    size: int = integer(1, 1024)(value)
    if size & (size - 1):
        below = 1 << (size.bit_length() - 1)
        raise ValueError(f"{size} is not a power of two; write {below} or {below * 2}")
    return size


def device(value: str) -> str:
    kind, _, index = value.partition(":")
    if kind in ("auto", "cpu") and value == kind:
        return value
    if kind == "cuda" and (value == kind or index.isdecimal()):
        return value
    raise ValueError(f"{value!r} is not a device; write auto, cpu, cuda or cuda:0")


def api_keys(value: str) -> tuple[str, ...]:
    """Never echoes a key: these messages end up in logs."""
    if value.startswith("@"):
        try:
            lines = Path(value[1:]).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the file of keys can't be read: {error}") from None
    else:
        lines = value.split(",")
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ValueError("holds no key; leave the option out to serve without keys")
    return keys


def header_name(value: str) -> str:
    name = value.lower()
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9a-z-]+", name) or name == "authorization":
        raise ValueError(f"{value!r} can't be the header; write for example x-tenant")
    return name


def base_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or not _has_valid_port(value):
        raise ValueError(f"{value!r} is not a base URL; write for example http://127.0.0.1:8000")
    return value.rstrip("/").removesuffix("/v1")


def _has_valid_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def several(parse: Parse) -> Parse:
    """Of values with commas between them."""
    return lambda value: tuple(parse(each.strip()) for each in value.split(","))


def picture_file(value: str) -> str:
    if Path(value).suffix.lower() not in PICTURE_FORMATS:
        raise ValueError(f"{value!r} is not a picture; its name ends in {', '.join(PICTURE_FORMATS)}")
    return value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "."
