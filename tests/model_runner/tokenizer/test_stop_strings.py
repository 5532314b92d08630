from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model_runner.tokenizer import StopStringMatcher

letters = st.text(alphabet="abé", max_size=30)
stop_lists = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=4)


def run(stops: list[str], chunks: list[str]) -> tuple[str, bool, str | None]:
    matcher = StopStringMatcher(stops)
    out = []
    matched = False
    for chunk in chunks:
        text, matched = matcher.push(chunk)
        out.append(text)
    text, matched = matcher.flush()
    return "".join([*out, text]), matched, matcher.matched_stop


def naive(stops: list[str], text: str) -> tuple[str, bool, str | None]:
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, False, None
    position, _, stop = min(found)
    return text[:position], True, stop


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


@given(stop_lists, letters, st.lists(st.integers(0, 100), max_size=10))
@example(["aab"], "aaab", [1, 2, 3])
@example(["abab", "b"], "abaab", [1, 2])
@example(["ba", "b"], "ba", [1])
def test_it_equals_a_search_of_the_whole_text_however_it_is_cut(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    assert run(stops, cut(text, cuts)) == naive(stops, text)


@given(stop_lists, letters)
def test_what_has_been_emitted_never_has_to_be_taken_back(stops: list[str], text: str) -> None:
    """After every character: what is out is a prefix of the final text, whatever is still to come."""
    matcher = StopStringMatcher(stops)
    emitted = ""
    for position, character in enumerate(text):
        emitted += matcher.push(character).text
        for continuation in ("", *stops, *(stop[1:] for stop in stops)):
            assert naive(stops, text[: position + 1] + continuation)[0].startswith(emitted)


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3), letters)
def test_it_holds_back_less_than_the_longest_stop_string(stops: list[str], text: str) -> None:
    matcher = StopStringMatcher(stops)
    emitted = ""
    for position, character in enumerate(text):
        chunk, matched = matcher.push(character)
        emitted += chunk
        if matched:
            break
        assert position + 1 - len(emitted) < max(map(len, stops))


def test_without_stop_strings_everything_passes_at_once() -> None:
    matcher = StopStringMatcher([])
    assert matcher.push("anything") == ("anything", False)
    assert matcher.flush() == ("", False)


def test_nothing_comes_after_the_match() -> None:
    matcher = StopStringMatcher(["\n\n"])
    assert matcher.push("one\n") == ("one", False)
    assert matcher.push("\ntwo") == ("", True)
    assert matcher.matched_stop == "\n\n"
    assert matcher.push("three") == ("", True)
    assert matcher.flush() == ("", True)


@pytest.mark.parametrize("stops", [["ab", "a"], ["a", "ab"]])
@pytest.mark.parametrize("chunks", [["xab"], ["xa", "b"], ["x", "ab"]])
def test_of_two_that_begin_together_the_shorter_is_named(stops: list[str], chunks: list[str]) -> None:
    assert run(stops, chunks) == ("x", True, "a")


def test_a_long_stop_string_against_its_own_prefix_is_linear() -> None:
    stop = "a" * 50_000 + "b"
    text = "a" * 100_000
    assert run([stop], [text]) == (text, False, None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringMatcher(["x", ""])
