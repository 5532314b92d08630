"""Who shares the server: each tenant's weight and limits, and the bucket that bounds a rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

DEFAULT_TENANT = "default"

_FEWEST_BUCKETS_SWEPT = 64


@dataclass(frozen=True, slots=True)
class Tenant:
    """A limit of None is no limit. Raises ValueError, which says what is allowed."""

    name: str
    weight: float = 1.0  # of two tenants that both wait, one of twice the weight is let in for twice the cost
    max_reserved_blocks: int | None = None
    max_queued_requests: int | None = None
    requests_per_second: float | None = None
    burst_requests: int | None = None  # how many may come at once after a pause; None is one second's worth

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tenant needs a name")
        _check("weight", self.weight, above=0)
        for name in ("max_reserved_blocks", "max_queued_requests"):
            limit: int | None = getattr(self, name)
            if limit is not None and limit < 0:
                raise ValueError(f"{name} must be at least 0, not {limit}")
        if self.requests_per_second is not None:
            _check("requests_per_second", self.requests_per_second, above=0)
        if self.burst_requests is not None and self.burst_requests < 1:
            raise ValueError(f"burst_requests must be at least 1, not {self.burst_requests}")

    @property
    def burst(self) -> int:
        """Requests that may come at once after a pause: at least one."""
        if self.burst_requests is not None:
            return self.burst_requests
        return max(1, math.ceil(self.requests_per_second or 1))


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """A tenant as an operator describes it, before it is known how many bytes a block has."""

    name: str
    weight: float = 1.0
    max_reserved_bytes: int | None = None
    max_queued_requests: int | None = None
    requests_per_second: float | None = None
    burst_requests: int | None = None

    def in_blocks(self, block_bytes: int) -> Tenant:
        """Raises ValueError, which says what is allowed."""
        limit = self.max_reserved_bytes
        return Tenant(
            name=self.name,
            weight=self.weight,
            max_reserved_blocks=None if limit is None else limit // block_bytes,
            max_queued_requests=self.max_queued_requests,
            requests_per_second=self.requests_per_second,
            burst_requests=self.burst_requests,
        )


def _check(name: str, value: float, *, above: float) -> None:
    if not (math.isfinite(value) and value > above):
        raise ValueError(f"{name} must be above {above:g}, not {value:g}")


class Tenants:
    """Tenants by name. One that nobody has described gets what `others` says (if that is left out, what the
    tenant `default` has), under its own name.

    Raises ValueError when two have one name.
    """

    def __init__(self, described: Iterable[Tenant] = (), *, others: Tenant | None = None) -> None:
        self._described: dict[str, Tenant] = {}
        for tenant in described:
            if tenant.name in self._described:
                raise ValueError(f"there are two tenants named {tenant.name!r}")
            self._described[tenant.name] = tenant
        self._others = (
            self._described.get(DEFAULT_TENANT, Tenant(DEFAULT_TENANT)) if others is None else others
        )

    def __getitem__(self, name: str) -> Tenant:
        return self._described.get(name) or replace(self._others, name=name)

    @property
    def names(self) -> list[str]:
        """Of those described, in their order."""
        return list(self._described)


class RateLimit:
    """A token bucket: `burst` requests at once, and `per_second` in the long run.

    In any span of s seconds at most `burst + per_second · s` are let through. It is kept as one number, the
    time at which the bucket will be full again (the generic cell rate algorithm of ITU-T I.371, which is the
    same bucket without a counter to refill).
    """

    def __init__(self, per_second: float, burst: int) -> None:
        assert per_second > 0
        assert burst >= 1
        self._interval = 1 / per_second
        self._slack = (burst - 1) * self._interval
        self._full_at = -math.inf

    def take(self, now: float) -> float:
        """0.0, and the token is taken; or the seconds until there is one, and nothing is taken."""
        wait = self.wait(now)
        if not wait:
            self._full_at = max(self._full_at, now) + self._interval
        return wait

    def wait(self, now: float) -> float:
        """What `take` would answer."""
        wait = self._full_at - self._slack - now
        # Who comes back exactly when it was told to must not be turned away by a rounding of the clock.
        return wait if wait > 1e-6 * self._interval and now + wait > now else 0.0

    def full(self, now: float) -> bool:
        return self._full_at <= now


@dataclass(slots=True)
class RateLimits:
    """One bucket for each tenant that has a rate and has used some of it lately.

    Bounded by the tenants that came within the time a bucket takes to fill: the names may be a gateway's,
    without end.
    """

    tenants: Tenants
    _buckets: dict[str, RateLimit] = field(default_factory=dict)
    _sweep_at: int = _FEWEST_BUCKETS_SWEPT

    def take(self, name: str, now: float) -> float:
        """As RateLimit.take, of this tenant's bucket; 0.0 for a tenant without a rate."""
        bucket = self._buckets.get(name)
        if bucket is None:
            tenant = self.tenants[name]
            if tenant.requests_per_second is None:
                return 0.0
            self._sweep(now)
            bucket = self._buckets[name] = RateLimit(tenant.requests_per_second, tenant.burst)
        return bucket.take(now)

    def wait(self, name: str, now: float) -> float:
        """What `take` would answer."""
        bucket = self._buckets.get(name)
        return bucket.wait(now) if bucket else 0.0

    def __len__(self) -> int:
        return len(self._buckets)

    def _sweep(self, now: float) -> None:
        """A full bucket is as good as none. Costs a constant for each one made, on the whole."""
        if len(self._buckets) >= self._sweep_at:
            self._buckets = {name: bucket for name, bucket in self._buckets.items() if not bucket.full(now)}
            self._sweep_at = max(2 * len(self._buckets), _FEWEST_BUCKETS_SWEPT)
