"""How long answers are, learned as they end: given that one has `g` tokens already, how many will follow?

A discrete-time hazard model. Lengths are cut into bins, narrow at first and then growing with the length. Of
each bin it knows how many tokens were ever drawn inside it (the exposure) and how many answers ended there of
themselves; their quotient is the chance that a token there is the last. Answers that are still running, were
cut off by their max_tokens or left early count in the exposure of the bins that they passed and in nothing
else, so short answers, which end first, can't make the world look shorter than it is.

Source: E. L. Kaplan and P. Meier, "Nonparametric Estimation from Incomplete Observations" (1958); with
exposure in tokens it is the piecewise exponential model of survival analysis.

What was long ago counts less, by halves; and so that few observations are not believed too much, there are
two ways to ask:

- `survival` is careful: as if some answers more had come by and never ended. It goes towards 0 (nobody ends
  before max_tokens, which is what strict admission assumes) where nothing has been seen.
- `mean_left` is a guess at the middle: where nothing has been seen, of the lengths that chats have.
"""

from __future__ import annotations

from bisect import bisect_right
from math import exp, log

_NARROW_TO = 32  # tokens; bins are 4 wide up to here,
_GROWTH = 1.08  # and then grow by this
_NEVER_ENDING = 1.0  # so many imagined answers run through every bin
_HALF_LIFE = 1000  # endings after which an observation counts half
_TABLE_STEP = 8  # tokens
_GENERAL_MEAN = 256.0  # tokens of an answer, where nothing is known,
_GENERAL_WEIGHT = 4.0  # believed as much as so many observed answers


class LengthModel:
    """Of answers up to `limit` tokens. Told of every token (`drawn`) and every ending (`ended`)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.edges = _edges(limit)  # bin j covers answers of edges[j] … edges[j + 1] - 1 tokens
        bins = len(self.edges) - 1
        self._exposure = [0.0] * bins
        self._endings = [0.0] * bins
        self._since_decay = 0
        self.observed = 0  # endings, since the beginning
        self._stale = True
        self._log_survival: list[float] = []  # at each edge
        self._log_middle: list[float] = []
        self._beyond: list[float] = []  # integral of the middle survival up to each edge
        self._table: list[float] = []  # the careful one, every _TABLE_STEP tokens
        self._bin_of = _bins_by_token(self.edges)

    def drawn(self, length: int, tokens: int = 1) -> None:
        """Answers have come to `length` tokens, by `tokens` more than before."""
        for at in range(length - tokens + 1, length + 1):
            self._exposure[self._bin(at)] += 1.0

    def ended(self, length: int) -> None:
        """An answer has ended of itself, with its `length`-th token (which has been told by `drawn`)."""
        self._endings[self._bin(length)] += 1.0
        self.observed += 1
        # The curve is drawn anew for each of the first, and then now and then: it hardly changes by one.
        self._stale = self._stale or self.observed < 64 or self.observed % 16 == 0
        self._since_decay += 1
        if self._since_decay == _HALF_LIFE // 8:
            self._since_decay = 0
            keep = 0.5 ** (1 / 8)
            self._exposure = [value * keep for value in self._exposure]
            self._endings = [value * keep for value in self._endings]

    def survival(self, generated: int, more: int) -> float:
        """The chance that an answer of `generated` tokens goes on for more than `more` others. Careful."""
        self._refresh()
        return exp(
            min(0.0, self._at(self._log_survival, generated + more) - self._at(self._log_survival, generated))
        )

    def log_survival(self) -> tuple[list[float], int]:
        """(log of the chance that an answer is longer than the index times the second value, the step in
        tokens). For those who ask about many at once."""
        self._refresh()
        return self._table, _TABLE_STEP

    def mean_left(self, generated: int, most: int) -> float:
        """Tokens that will follow, of at most `most`: the integral of survival, and at least 1."""
        if most <= 1:
            return 1.0
        self._refresh()
        at_start = exp(self._at(self._log_middle, generated))
        if at_start <= 0.0:
            return float(most)
        area = self._integral(generated + most) - self._integral(generated)
        return min(max(area / at_start, 1.0), float(most))

    def _bin(self, length: int) -> int:
        return self._bin_of[length] if length < len(self._bin_of) else len(self.edges) - 2

    def _at(self, table: list[float], length: float) -> float:
        """Linear within a bin: its hazard is constant."""
        j = self._bin(int(length))
        start, end = self.edges[j], self.edges[j + 1]
        return table[j] + (table[j + 1] - table[j]) * min((length - start) / (end - start), 1.0)

    def _integral(self, length: int) -> float:
        """Of the middle survival from 0 to `length`."""
        j = self._bin(length)
        start = self.edges[j]
        here, there = exp(self._log_middle[j]), exp(self._at(self._log_middle, length))
        return self._beyond[j] + (length - start) * (here + there) / 2

    def _refresh(self) -> None:
        if not self._stale:
            return
        self._stale = False
        careful, middle, area = [0.0], [0.0], [0.0]
        for j, (exposure, endings) in enumerate(zip(self._exposure, self._endings, strict=True)):
            width = self.edges[j + 1] - self.edges[j]
            careful.append(careful[-1] - width * _rate(endings, exposure + _NEVER_ENDING * width))
            imagined = _GENERAL_WEIGHT * exp(-self.edges[j] / _GENERAL_MEAN) * width
            rate = _rate(endings + imagined / _GENERAL_MEAN, exposure + imagined)
            middle.append(middle[-1] - width * rate)
            area.append(area[-1] + width * (exp(middle[-2]) + exp(middle[-1])) / 2)
        self._log_survival, self._log_middle, self._beyond = careful, middle, area
        self._table = [
            self._at(careful, index * _TABLE_STEP) for index in range(self.limit // _TABLE_STEP + 2)
        ]


def _rate(endings: float, exposure: float) -> float:
    """The constant hazard of a bin in which the share endings/exposure of all tokens was the last."""
    if exposure <= 0.0:
        return 0.0
    return -log(max(1.0 - endings / exposure, 1e-9))


def _edges(limit: int) -> list[int]:
    edges = list(range(0, min(_NARROW_TO, limit + 1), 4))
    while edges[-1] <= limit:
        edges.append(max(edges[-1] + 4, int(edges[-1] * _GROWTH)))
    return edges


def _bins_by_token(edges: list[int]) -> list[int]:
    """For the first tokens, which are asked for most, by table; it is cheap up to any context."""
    return [bisect_right(edges, token) - 1 for token in range(edges[-1])]
