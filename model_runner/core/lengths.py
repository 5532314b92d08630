"""How long answers are, learned as they end: given that one has `g` tokens already, how many will follow?

A discrete-time hazard model. Lengths are cut into bins, narrow at first and then growing with the length. Of
each bin it knows how many tokens were ever drawn inside it (the exposure) and how many answers ended there of
themselves; their quotient is the chance that a token there is the last. Answers that are still running, were
cut off by their max_tokens or left early count in the exposure of the bins that they passed and in nothing
else, so short answers, which end first, can't make the world look shorter than it is.

Answers differ by who asks and by how long the prompt is: a long document is summarised, a long chat goes on.
So there is a model for all, below it one for each class of prompt lengths, and below that one for each tenant
of several. Each believes what it has seen itself, and as much as a few answers' worth of its parent.

What was long ago counts less, by halves; and so that few observations are not believed too much, there are
two ways to ask:

- `log_survival` is careful: as if half an answer more had come by and went on. It goes towards 0 (nobody ends
  before max_tokens, which is what strict admission assumes) while nothing has been seen.
- `mean_left` is a guess at the middle: where nothing has been seen, of the lengths that chats have.

Source: E. L. Kaplan and P. Meier, "Nonparametric Estimation from Incomplete Observations" (1958); with
exposure in tokens it is the piecewise exponential model of survival analysis.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from itertools import pairwise
from math import exp, log, log2

from model_runner.core.tenants import DEFAULT_TENANT

STEP = 8  # tokens between two entries of `log_survival`

_NARROW_TO = 32  # tokens; bins are 4 wide up to here,
_GROWTH = 1.08  # and then grow by this
_NEVER_ENDING = 0.5  # so many imagined answers run through every bin
_TAIL = 2.0  # past all that was seen, answers are taken to grow rare like a power law with this exponent,
_SPEAKS_OF_A_TAIL = 8  # half as fast while only so many have been seen, and not at all before the first
_OF_PARENT = 2.0  # a class believes its parent as much as so many answers of its own
_HALF_LIFE = 1000  # endings after which an observation counts half
_GENERAL_MEAN = 256.0  # tokens of an answer, where nothing is known,
_GENERAL_WEIGHT = 4.0  # believed as much as so many observed answers
_CLASSES_AN_OCTAVE = 3  # of prompt lengths
_MOST_CLASSES = 512


class LengthModel:
    """Of one class of answers. Told of every token (`drawn`) and every ending (`ended`), it tells its
    parents."""

    def __init__(self, bins: Bins, parent: LengthModel | None = None) -> None:
        self.observed = 0  # endings, since the beginning
        self._bins = bins
        self._parent = parent
        self._exposure = [0.0] * len(bins)
        self._endings = [0.0] * len(bins)
        self._since_decay = 0
        self._stale = True
        self._careful: list[float] = []  # hazard of each bin
        self._middle: list[float] = []
        self._log_survival: list[float] = []  # the careful one, every STEP tokens
        self._log_middle: list[float] = []  # at each edge
        self._area: list[float] = []  # under the middle survival up to each edge

    def drawn(self, length: int, tokens: int = 1) -> None:
        """An answer has come to `length` tokens, by `tokens` more than before."""
        model: LengthModel | None = self
        while model is not None:
            for at in range(length - tokens + 1, length + 1):
                model._exposure[self._bins.of(at)] += 1.0
            model = model._parent

    def ended(self, length: int) -> None:
        """An answer has ended of itself, with its `length`-th token (which has been told by `drawn`)."""
        if self._parent is not None:
            self._parent.ended(length)
        self._endings[self._bins.of(length)] += 1.0
        self.observed += 1
        # The curve is drawn anew for each of the first, and then now and then: it hardly changes by one.
        self._stale = self._stale or self.observed < 64 or self.observed % 16 == 0
        self._since_decay += 1
        if self._since_decay == _HALF_LIFE // 8:
            self._since_decay = 0
            keep = 0.5 ** (1 / 8)
            self._exposure = [value * keep for value in self._exposure]
            self._endings = [value * keep for value in self._endings]

    def log_survival(self) -> list[float]:
        """Natural log of the careful chance that an answer has more tokens than STEP times the index."""
        self._refresh()
        return self._log_survival

    def survival(self, generated: int, more: int) -> float:
        """The careful chance that an answer of `generated` tokens goes on for more than `more` others."""
        table = self.log_survival()
        last = len(table) - 1
        return exp(table[min((generated + more) // STEP, last)] - table[min(generated // STEP, last)])

    def mean_left(self, generated: int, most: int) -> float:
        """Tokens that will follow, at least 1 and at most `most`: the integral of survival from here on."""
        if most <= 1:
            return 1.0
        self._refresh()
        bins = self._bins
        at_start = exp(bins.interpolate(self._log_middle, generated))
        area = self._area_to(generated + most) - self._area_to(generated)
        return min(max(area / at_start, 1.0), float(most))

    def quantiles_left(self, generated: int, most: int, parts: int) -> list[float]:
        """The moments, in tokens from now and at most `most`, by which the middles of so many equally likely
        parts of all such answers have ended."""
        self._refresh()
        edges, curve = self._bins.edges, self._log_middle
        start = self._bins.interpolate(curve, generated)
        moments = []
        for part in range(parts):
            goal = start + log(1.0 - (part + 0.5) / parts)
            j = min(bisect_left(curve, -goal, key=lambda value: -value), len(curve) - 1)
            slope = (curve[j] - curve[j - 1]) / (edges[j] - edges[j - 1])
            at = edges[j - 1] + ((goal - curve[j - 1]) / slope if slope else 0.0)
            moments.append(min(max(at - generated, 1.0), float(most)))
        return moments

    def _area_to(self, length: int) -> float:
        bins = self._bins
        j = bins.of(length)
        here, there = exp(self._log_middle[j]), exp(bins.interpolate(self._log_middle, length))
        return self._area[j] + (length - bins.edges[j]) * (here + there) / 2

    def _refresh(self) -> None:
        if not self._stale:
            return
        self._stale = False
        bins, parent = self._bins, self._parent
        if parent is not None:
            parent._refresh()
        self._careful, self._middle = [], []
        tail = _TAIL * self.observed / (self.observed + _SPEAKS_OF_A_TAIL)
        for j, (exposure, endings) in enumerate(zip(self._exposure, self._endings, strict=True)):
            width = bins.edges[j + 1] - bins.edges[j]
            if parent is not None:
                believed = _OF_PARENT * width
                careful, middle = parent._careful[j] * believed, parent._middle[j] * believed
                self._careful.append((endings + careful) / (exposure + believed))
                self._middle.append((endings + middle) / (exposure + believed))
            else:
                general = _GENERAL_WEIGHT * exp(-bins.edges[j] / _GENERAL_MEAN) * width
                imagined = _NEVER_ENDING * width
                thinning = tail / (bins.edges[j] + width)
                self._careful.append((endings + imagined * thinning) / (exposure + imagined))
                self._middle.append((endings + general / _GENERAL_MEAN) / max(exposure + general, 1e-9))
        self._draw_curves()

    def _draw_curves(self) -> None:
        edges = self._bins.edges
        careful, middle, area = [0.0], [0.0], [0.0]
        for j, (low, high) in enumerate(pairwise(edges)):
            careful.append(careful[-1] - (high - low) * _per_token(self._careful[j]))
            middle.append(middle[-1] - (high - low) * _per_token(self._middle[j]))
            area.append(area[-1] + (high - low) * (exp(middle[-2]) + exp(middle[-1])) / 2)
        self._log_middle, self._area = middle, area
        table: list[float] = []
        for j, (low, high) in enumerate(pairwise(edges)):
            slope = (careful[j + 1] - careful[j]) / (high - low)
            table += [careful[j] + slope * (at - low) for at in range(len(table) * STEP, high, STEP)]
        self._log_survival = table


class Lengths:
    """The models of all classes, of answers up to `limit` tokens."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._bins = Bins(limit)
        self.of_all = LengthModel(self._bins)
        self._of_prompts: dict[int, LengthModel] = {}
        self._of_tenants: OrderedDict[tuple[str, int], LengthModel] = OrderedDict()

    def of(self, prompt_tokens: int, tenant: str = DEFAULT_TENANT) -> LengthModel:
        """The model of the answers to such prompts; those of the tenants that came longest ago are forgotten
        when there are too many."""
        octave = int(_CLASSES_AN_OCTAVE * log2(max(prompt_tokens, 1)))
        model = self._of_prompts.get(octave)
        if model is None:
            model = self._of_prompts[octave] = LengthModel(self._bins, self.of_all)
        if tenant == DEFAULT_TENANT:
            return model
        key = tenant, octave
        own = self._of_tenants.get(key)
        if own is None:
            own = self._of_tenants[key] = LengthModel(self._bins, model)
            if len(self._of_tenants) > _MOST_CLASSES:
                self._of_tenants.popitem(last=False)
        else:
            self._of_tenants.move_to_end(key)
        return own


class Bins:
    """Bin j holds the lengths edges[j] … edges[j + 1] - 1."""

    def __init__(self, limit: int) -> None:
        edges = list(range(0, min(_NARROW_TO, limit + 1), 4))
        while edges[-1] <= limit + STEP:
            edges.append(max(edges[-1] + 4, int(edges[-1] * _GROWTH)))
        self.edges = edges
        # A table is cheap up to any context, and lengths are asked for at every token.
        self._of = [bisect_right(edges, token) - 1 for token in range(edges[-1])]

    def __len__(self) -> int:
        return len(self.edges) - 1

    def of(self, length: int) -> int:
        return self._of[length] if length < len(self._of) else len(self.edges) - 2

    def interpolate(self, at_edges: list[float], length: int) -> float:
        """The value at `length` of a line through the values at the edges."""
        j = self.of(length)
        start, end = self.edges[j], self.edges[j + 1]
        return at_edges[j] + (at_edges[j + 1] - at_edges[j]) * min((length - start) / (end - start), 1.0)


def _per_token(share: float) -> float:
    """The constant hazard of a bin in which so large a share of the tokens was an answer's last."""
    return -log(max(1.0 - share, 1e-9))
