"""The figures that stand for many measured times."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds. Each is one of the values: the smallest that at least its share of them don't pass."""

    p50: float
    p90: float
    p99: float
    mean: float


def percentiles(values: Sequence[float] | npt.NDArray[np.float64]) -> Percentiles | None:
    """None of nothing."""
    if not len(values):
        return None
    measured = np.asarray(values, dtype=float)
    p50, p90, p99 = np.quantile(measured, (0.5, 0.9, 0.99), method="inverted_cdf").tolist()
    return Percentiles(p50, p90, p99, float(measured.mean()))
