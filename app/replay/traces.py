"""Traces as they lie in files: CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens, or JSON lines
with timestamp (milliseconds), input_length, output_length and, if there are any, hash_ids and a tenant."""

from __future__ import annotations

import csv
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any, TextIO, TypeVar

import msgspec

from app.options import UsageError
from model_runner.core.tenants import DEFAULT_TENANT
from model_runner.replay.trace import Row

_TIME, _PROMPT, _OUTPUT = CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TENANT = "tenant"
_MOST_TOKENS = 10**9
_Parsed = TypeVar("_Parsed")

Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]


@dataclass(frozen=True, slots=True)
class Trace:
    """`rows` in order of arrival, the first at 0."""

    name: str
    rows: tuple[Row, ...]
    too_long: int  # rows left out: prompt and output pass the context
    without_tokens: int  # rows left out: nothing asked, or nothing answered

    @property
    def span_seconds(self) -> float:
        return self.rows[-1].arrives_at

    def scaled(self, rate: float) -> tuple[Row, ...]:
        """The same requests, `rate` times as many a second."""
        return tuple(replace(row, arrives_at=row.arrives_at / rate) for row in self.rows)

    def at_once(self) -> tuple[Row, ...]:
        return tuple(replace(row, arrives_at=0.0) for row in self.rows)


class _Bad(Exception):
    """The message says what is wrong with the line."""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: Count
    output_length: Count
    hash_ids: list[int] = []


def read_trace(path: str, *, max_model_len: int, limit: int | None, tenant_column: str | None) -> Trace:
    """The first `limit` rows of those that fit the context. Raises UsageError, which names file and line."""
    kept: list[Row] = []
    too_long = without_tokens = 0
    for row in _read(path, tenant_column):
        if row.prompt_tokens < 1 or row.output_tokens < 1:
            without_tokens += 1
        elif row.prompt_tokens + row.output_tokens > max_model_len:
            too_long += 1
        else:
            kept.append(row)
            if len(kept) == limit:
                break
    if not kept:
        raise UsageError(f"{path}: there is no row to replay ({too_long} are longer than --max-model-len).")
    kept.sort(key=lambda row: row.arrives_at)
    began = kept[0].arrives_at
    rows = tuple(replace(row, arrives_at=row.arrives_at - began) for row in kept)
    return Trace(path, rows, too_long, without_tokens)


def with_tenants(trace: Trace, tenants: int, seed: int) -> Trace:
    """The same rows, each of one of so many tenants, drawn evenly."""
    rng = random.Random(seed)
    names = [f"tenant-{number}" for number in range(1, tenants + 1)]
    return replace(trace, rows=tuple(replace(row, tenant=rng.choice(names)) for row in trace.rows))


def _read(path: str, tenant_column: str | None) -> Iterator[Row]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            beginning = file.read(4096)
            file.seek(0)
            lines = _json_rows if beginning.lstrip().startswith("{") else _csv_rows
            yield from lines(file, tenant_column)
    except _Bad as error:
        raise UsageError(f"{path}, line {error}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text in UTF-8: neither CSV nor JSON lines.") from None
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.") from None


def _json_rows(file: TextIO, tenant_column: str | None) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield _at(number, _json_row, line, tenant_column)


def _csv_rows(file: TextIO, tenant_column: str | None) -> Iterator[Row]:
    reader = csv.reader(file)
    try:
        places = _at(1, _places, next(reader, []), tenant_column)
        for cells in reader:
            if cells:
                yield _at(reader.line_num, _csv_row, cells, places)
    except csv.Error as error:
        raise _Bad(f"{reader.line_num}: {error}") from None


def _at(line_number: int, parse: Callable[..., _Parsed], *what: object) -> _Parsed:
    try:
        return parse(*what)
    except _Bad as error:
        raise _Bad(f"{line_number}: {error}") from None


def _places(header: Sequence[str], tenant_column: str | None) -> dict[str, int]:
    names = [name.strip() for name in header]
    asked = (*CSV_COLUMNS, *([tenant_column] if tenant_column else []))
    for name in asked:
        if name not in names:
            shown = ", ".join(names) if any(names) else "nothing"
            raise _Bad(f"a column {name} is missing; the header has {shown}{_other_format(names)}")
    places = {name: names.index(name) for name in asked}
    if tenant_column is None and _TENANT in names:
        places[_TENANT] = names.index(_TENANT)
    elif tenant_column is not None:
        places[_TENANT] = places.pop(tenant_column)
    return places


def _other_format(names: Iterable[str]) -> str:
    if any(name in CSV_COLUMNS for name in names):
        return ""
    csv_has, json_has = ", ".join(CSV_COLUMNS), "timestamp, input_length, output_length"
    return f". A trace is CSV with {csv_has}, or JSON lines with {json_has}"


def _csv_row(cells: Sequence[str], places: dict[str, int]) -> Row:
    if len(cells) <= max(places.values()):
        raise _Bad(f"{len(cells)} cells where the header has more")
    tenant = cells[places[_TENANT]].strip() if _TENANT in places else ""
    return Row(
        _seconds(cells[places[_TIME]].strip()),
        _count(_PROMPT, cells[places[_PROMPT]]),
        _count(_OUTPUT, cells[places[_OUTPUT]]),
        tenant or DEFAULT_TENANT,
    )


def _count(name: str, value: str) -> int:
    written = value.strip()
    if not re.fullmatch(r"[0-9]{1,9}", written):
        raise _Bad(f"{name} is {value!r}, not a number of tokens")
    return int(written)


def _seconds(value: str) -> float:
    """`2023-11-16 18:15:46.6805900`, with or without an offset from UTC; or plain seconds."""
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
        return float(value)
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise _Bad(f"{_TIME} is {value!r}; write 2023-11-16 18:15:46.68, or seconds") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _json_row(line: str, tenant_column: str | None) -> Row:
    try:
        fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
        read = msgspec.convert(fields, _Line)
    except msgspec.MsgspecError as error:
        raise _Bad(f"{error}") from None
    if tenant_column is not None and tenant_column not in fields:
        raise _Bad(f"there is no {tenant_column!r}")
    tenant = fields.get(tenant_column or _TENANT)
    return Row(
        read.timestamp / 1000,
        read.input_length,
        read.output_length,
        DEFAULT_TENANT if tenant in (None, "") else str(tenant),
        tuple(read.hash_ids),
    )
