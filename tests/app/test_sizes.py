from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.sizes import parse_duration, parse_size
from model_runner.sizes import format_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MiB", 512 * 2**20),
        ("8GiB", 8 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("536870912", 536870912),
        ("64 mib", 64 * 2**20),
        ("0.5KiB", 512),
        ("1.0000000001TiB", 2**40 + 109),
        ("12b", 12),
    ],
)
def test_sizes_as_people_write_them(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "12XB", "-1GiB", "1e9", "1,5GB", "٣GiB", "8 GiB free"])
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"512MiB, 8GiB, 1\.5GB or plain bytes"):
        parse_size(text)


def test_an_ambiguous_unit_is_asked_about() -> None:
    with pytest.raises(ValueError, match=r"\(8GiB or 8GB\?\)"):
        parse_size("8G")


@given(st.integers(0, 2**60))
def test_a_size_says_what_it_is(size: int) -> None:
    """Formatting and parsing again loses at most half of the last digit shown, and a byte in rounding."""
    assert abs(parse_size(format_size(size)) - size) <= size * 0.005 + 1


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (1023, "1023 B"), (46080, "45 KiB"), (3 * 2**29, "1.5 GiB")]
)
def test_the_unit_fits(size: int, shown: str) -> None:
    assert format_size(size) == shown


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("2.5s", 2.5), ("500ms", 0.5), ("5m", 300), ("1h", 3600), ("1min", 60)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "5 days", "-1s"])
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="write 30s, 5m, 1h, 500ms"):
        parse_duration(text)
