"""Fair queues and those who wait in them, for tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from hypothesis import strategies as st

from model_runner.core.fair_queue import FairQueue, Waiting
from model_runner.core.tenants import Tenant, Tenants

A = 10.0  # aging_seconds
_ids = itertools.count()
costs = st.one_of(st.floats(0, 1e3), st.integers(1, 10).map(float))


def wait(
    tenant: str = "a",
    *,
    name: str = "",
    priority: int = 0,
    cost: float = 1.0,
    at: float = 0.0,
    deadline: float = math.inf,
) -> Waiting[None]:
    return Waiting(name or f"r{next(_ids)}", tenant, priority, cost, at, deadline, None)


def queue(weights: dict[str, float] | None = None, *, max_passes: int = 8) -> FairQueue[None]:
    tenants = Tenants(Tenant(name, weight=weight) for name, weight in (weights or {}).items())
    return FairQueue(tenants, aging_seconds=A, max_passes=max_passes)


def filled(waitings: Iterable[Waiting[None]], weights: dict[str, float] | None = None) -> FairQueue[None]:
    made = queue(weights)
    for waiting in waitings:
        made.push(waiting)
    return made


def names(waitings: Iterable[Waiting[None]]) -> list[str]:
    return [waiting.ask_id for waiting in waitings]


def head(of: FairQueue[None], now: float = 0.0) -> Waiting[None]:
    return next(of.candidates(now))


def take_head(of: FairQueue[None], now: float = 0.0) -> Waiting[None]:
    return of.take(head(of, now).ask_id, now)


weights_of_three = st.fixed_dictionaries({name: st.floats(0.1, 10) for name in "abc"})
