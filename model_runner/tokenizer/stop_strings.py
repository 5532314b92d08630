"""Finding stop strings in text that arrives in pieces, without ever letting a part of one out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """`text` may go to the client now. After `matched` nothing more ever comes."""

    text: str
    matched: bool


class StopStringMatcher:
    """Cuts a stream of text before the first stop string in it.

    The first is the one that begins earliest in the whole text (of two that begin together, the shorter); the
    outcome doesn't depend on how the text was cut into pieces. Text that may yet turn out to be
    the beginning of a stop string is held back, at most as many characters as the longest one has. One
    automaton per stop string (Knuth, Morris, Pratt 1977), so the cost is linear in the text whatever the
    strings are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError on an empty stop string, which would match everywhere."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)  # how much of each stop string the text so far ends with
        self._held = ""
        self._seen = 0  # characters scanned so far; the held ones are the last of them
        self._match: tuple[int, int] | None = None  # (where it begins, which stop string), the best so far
        self._done = False

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, once it has."""
        return self._stops[self._match[1]] if self._done and self._match is not None else None

    def push(self, text: str) -> StopResult:
        if self._done:
            return StopResult("", True)
        if not self._stops:
            return StopResult(text, False)
        self._held += text
        for character in text:
            self._scan(character)
        begun = self._seen - max(self._states)  # where the earliest unfinished stop string begins
        if self._match is not None and self._match[0] <= begun:
            return self._finish(self._match[0])
        # A match that is already found stays in what is held: an unfinished stop string begins before it.
        return self._release(begun)

    def flush(self) -> StopResult:
        """The text has ended: what was held back, unless a stop string is in it."""
        if self._done:
            return StopResult("", True)
        if self._match is not None:
            return self._finish(self._match[0])
        return self._release(self._seen)

    def _scan(self, character: str) -> None:
        self._seen += 1
        for index, (stop, table) in enumerate(zip(self._stops, self._tables, strict=True)):
            state = self._states[index]
            while state and (state == len(stop) or stop[state] != character):
                state = table[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                begin = self._seen - len(stop)
                if self._match is None or begin < self._match[0]:
                    self._match = begin, index
                state = table[state - 1]
            self._states[index] = state

    def _release(self, position: int) -> StopResult:
        keep = self._seen - position
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return StopResult(text, False)

    def _finish(self, position: int) -> StopResult:
        self._done = True
        text = self._release(position).text
        self._held = ""
        return StopResult(text, True)


def _failure_table(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table
