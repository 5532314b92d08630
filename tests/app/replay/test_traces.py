from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.options import UsageError
from app.replay.traces import Trace, read_trace, with_tenants

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def read(path: Path, text: str, *, limit: int | None = None, tenant_column: str | None = None) -> Trace:
    path.write_text(text)
    return read_trace(str(path), max_model_len=100, limit=limit, tenant_column=tenant_column)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def shapes(trace: Trace) -> list[tuple[float, int, int]]:
    return [(row.arrives_at, row.prompt_tokens, row.output_tokens) for row in trace.rows]


def test_csv(path: Path) -> None:
    trace = read(
        path,
        HEAD + "2023-11-16 18:15:46.6805900,37,4\n\n2023-11-16 18:15:50.1805900,39,10\n",
    )
    assert shapes(trace) == [(0.0, 37, 4), (pytest.approx(3.5), 39, 10)]
    assert trace.span_seconds == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:02.009930+00:00"),
        ("2024-05-10T23:59:59Z", "2024-05-11T02:00:01+02:00"),
        ("10", "12.0"),
    ],
)
def test_moments_are_written_in_many_ways(path: Path, first: str, second: str) -> None:
    trace = read(path, f"{HEAD}{first},1,2\n{second},3,4\n")
    assert shapes(trace) == [(0.0, 1, 2), (pytest.approx(2.0), 3, 4)]


def test_columns_in_any_order_and_others_among_them(path: Path) -> None:
    trace = read(path, "\ufeffGeneratedTokens, TIMESTAMP,Model,ContextTokens\n4,10,GPT-4,37\n")
    assert shapes(trace) == [(0.0, 37, 4)]


def test_json_lines(path: Path) -> None:
    lines = [
        {"timestamp": 500, "input_length": 37, "output_length": 4, "hash_ids": [0, 1], "more": None},
        {"timestamp": 1250.5, "input_length": 39, "output_length": 10, "tenant": "a"},
    ]
    trace = read(path, "\n".join(map(json.dumps, lines)) + "\n")
    assert shapes(trace) == [(0.0, 37, 4), (pytest.approx(0.7505), 39, 10)]
    assert [row.prefix_ids for row in trace.rows] == [(0, 1), ()]
    assert [row.tenant for row in trace.rows] == ["default", "a"]


def test_rows_are_put_in_order_of_arrival(path: Path) -> None:
    assert shapes(read(path, f"{HEAD}12,1,1\n10,2,2\n11,3,3\n")) == [(0.0, 2, 2), (1.0, 3, 3), (2.0, 1, 1)]


def test_rows_that_do_not_fit_are_left_out_and_counted(path: Path) -> None:
    trace = read(path, f"{HEAD}1,90,10\n2,90,11\n3,0,5\n4,5,0\n5,1,1\n6,1,1\n", limit=2)
    assert shapes(trace) == [(0.0, 90, 10), (4.0, 1, 1)]
    assert (trace.too_long, trace.without_tokens) == (1, 2)


def test_tenants_are_named_by_a_column_or_drawn(path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens,tenant,team\n1,2,3,x,red\n1,2,3,,blue\n"
    assert [row.tenant for row in read(path, text).rows] == ["x", "default"]
    trace = read(path, text, tenant_column="team")
    assert [row.tenant for row in trace.rows] == ["red", "blue"]
    many = read(path, HEAD + "1,2,3\n" * 90)
    drawn = with_tenants(many, 3, seed=1)
    assert drawn == with_tenants(many, 3, seed=1) != with_tenants(many, 3, seed=2)
    assert {row.tenant for row in drawn.rows} == {"tenant-1", "tenant-2", "tenant-3"}
    line = '{"timestamp": 1, "input_length": 1, "output_length": 1, "team": 7}\n'
    assert [row.tenant for row in read(path, line, tenant_column="team").rows] == ["7"]


def test_faster_and_all_at_once(path: Path) -> None:
    trace = read(path, f"{HEAD}1,2,3\n5,2,4\n")
    assert [row.arrives_at for row in trace.scaled(2.0)] == [0.0, 2.0]
    assert [row.arrives_at for row in trace.at_once()] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: a column TIMESTAMP is missing; the header has nothing"),
        ("TIMESTAMP,ContextTokens\n", "line 1: a column GeneratedTokens is missing"),
        ("time,in,out\n1,2,3\n", "or JSON lines with timestamp, input_length, output_length"),
        (f"{HEAD}1,2,3\n1,2\n", "line 3: 2 cells where the header has more"),
        (f"{HEAD}1,2,3\n\n1,two,3\n", "line 4: ContextTokens is 'two', not a number of tokens"),
        (f"{HEAD}1,2,-3\n", "line 2: GeneratedTokens is '-3', not a number of tokens"),
        (f"{HEAD}yesterday,2,3\n", "line 2: TIMESTAMP is 'yesterday'; write 2023-11-16 18:15:46.68"),
        (f"{HEAD}1,2,1234567890\n", "line 2: GeneratedTokens is '1234567890'"),
        (f'{HEAD}1,2,"3\n4,5,6\n', "line 3: GeneratedTokens is"),
        ('{"timestamp": 1, "input_length": 2}\n', "line 1: Object missing required field `output_length`"),
        (
            '{"timestamp": 1, "input_length": 2, "output_length": 3}\n\n{"timestamp": 1,\n',
            "line 3: Input data was truncated",
        ),
        (
            '{"timestamp": 1, "input_length": 2.5, "output_length": 3}\n',
            "line 1: Expected `int`, got `float` - at `$.input_length`",
        ),
        (
            '{"timestamp": 1, "input_length": -2, "output_length": 3}\n',
            "line 1: Expected `int` >= 0 - at `$.input_length`",
        ),
        ('{"timestamp": "x", "input_length": 2, "output_length": 3}\n', "at `$.timestamp`"),
        (f"{HEAD}1,99,3\n", "there is no row to replay (1 are longer than --max-model-len)"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        read(path, text)
    assert says in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_tenant_column_that_is_not_there(path: Path) -> None:
    with pytest.raises(UsageError, match="line 1: a column team is missing"):
        read(path, f"{HEAD}1,2,3\n", tenant_column="team")
    with pytest.raises(UsageError, match="line 1: there is no 'team'"):
        read(path, '{"timestamp": 1, "input_length": 1, "output_length": 1}\n', tenant_column="team")


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read: No such file or directory"):
        read_trace(str(tmp_path / "none"), max_model_len=10, limit=None, tenant_column=None)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not text in UTF-8"):
        read_trace(str(tmp_path / "bytes"), max_model_len=10, limit=None, tenant_column=None)
