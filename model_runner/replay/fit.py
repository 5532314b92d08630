"""The coefficients of a step's cost, from what was measured of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from model_runner.replay.step_model import StepModel


@dataclass(frozen=True, slots=True)
class Measured:
    """Some steps together: the cost is linear, so sums of steps do as well as single ones."""

    steps: int
    tokens: int  # computed
    context_tokens: int  # read
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    model: StepModel
    errors: tuple[float, ...]  # of each row: abs(predicted - measured) / measured

    @property
    def median_error(self) -> float:
        return float(np.median(self.errors))


def fit(rows: Sequence[Measured]) -> Fit:
    """Least squares of the relative errors, no coefficient below zero. Raises ValueError where the rows don't
    tell the three costs apart.

    With three unknowns, the best solution that is not negative is the best of those that leave some of them
    at zero and solve for the others (C. Lawson and R. Hanson, "Solving Least Squares Problems" (1974),
    chapter 23: the solution is an unconstrained one over its positive unknowns).
    """
    measured = np.array([[row.steps, row.tokens, row.context_tokens] for row in rows], dtype=float)
    seconds = np.array([row.seconds for row in rows])
    if len(rows) < 3 or (seconds <= 0).any():
        raise ValueError("there is too little to fit: at least three measurements, each of some time")
    relative = measured / seconds[:, None]
    scales = np.abs(relative).max(axis=0)
    if not scales.all() or np.linalg.matrix_rank(relative / scales, tol=1e-3) < 3:
        raise ValueError("the measurements are too much alike to tell the three costs apart")
    columns = relative / scales
    best, least = np.zeros(3), float(len(rows))  # of no cost at all
    for count in (1, 2, 3):
        for chosen in map(list, combinations(range(3), count)):
            found = np.zeros(3)
            found[chosen] = np.linalg.lstsq(columns[:, chosen], np.ones(len(rows)), rcond=None)[0]
            error = float(((columns @ found - 1.0) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = found, error
    base, per_token, per_context = (best / scales).tolist()
    errors = np.abs(columns @ best - 1.0)
    return Fit(StepModel(base, per_token, per_context), tuple(errors.tolist()))
