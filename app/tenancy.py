"""Who asks: from a request's key, or from the name that a trusted gateway gives, to a tenant."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from starlette.datastructures import Headers

from app.tenant_file import OTHER, DescribedTenant, digest, is_tenant_name, key_name
from model_runner.core.tenants import DEFAULT_TENANT, RateLimits, Tenants
from model_runner.errors import InvalidRequest, TenantRateLimited


class Tenancy:
    """Names tenants, and holds each to its rate.

    A key is known by the tenant that the file gives it to, else by its place among the `--api-key`s: key-1,
    key-2, … It never appears itself, in logs or metrics.
    """

    def __init__(
        self,
        *,
        api_keys: Sequence[str] = (),
        described: Sequence[DescribedTenant] = (),
        header: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        keys = dict.fromkeys(api_keys)
        # By digest: to find one by its time one would have to choose digests, not keys.
        self._holders = {digest(key.encode()): key_name(number) for number, key in enumerate(keys, start=1)}
        for tenant in described:
            self._holders.update(dict.fromkeys(tenant.key_digests, tenant.policy.name))
        self._header = header
        self._clock = clock
        # Rates know no blocks.
        self._rates = RateLimits(Tenants(tenant.policy.in_blocks(1) for tenant in described))

    @property
    def has_keys(self) -> bool:
        return bool(self._holders)

    def holder(self, authorization: str) -> str | None:
        """The tenant of the key in this header; None when it holds none that is known."""
        scheme, _, given = authorization.partition(" ")
        found = self._holders.get(digest(given.strip().encode("latin-1")))
        return found if scheme.lower() == "bearer" else None

    def tenant_of(self, holder: str | None, headers: Headers) -> str:
        """Whom the gateway names, else whose the key is, else the one tenant.

        Raises InvalidRequest, with the header's name, when what it says is no name.
        """
        named = headers.getlist(self._header) if self._header else []
        if not named:
            return holder or DEFAULT_TENANT
        if len(named) > 1 or not is_tenant_name(named[0]):
            allowed = "one tenant's name, of 1 to 64 printable ASCII characters without a space"
            message = f"`{self._header}` must be {allowed}."
            raise InvalidRequest(message, param=self._header, code="invalid_value")
        return named[0]

    def count_request(self, tenant: str) -> None:
        """One more of this tenant's. Raises TenantRateLimited, which says when it may come, and counts it
        not."""
        wait = self._rates.take(tenant, self._clock())
        if wait:
            raise _too_fast(wait)

    def check_rate(self, tenant: str) -> None:
        """Raises as `count_request` would, without counting."""
        wait = self._rates.wait(tenant, self._clock())
        if wait:
            raise _too_fast(wait)


def _too_fast(wait: float) -> TenantRateLimited:
    message = (
        f"This tenant sends more requests than its rate allows. The next may come in {wait:.3f} seconds."
    )
    return TenantRateLimited(message, retry_after_seconds=wait)


class TenantLabels:
    """Metric labels for tenants, at most `most` besides `other`: each label is a time series for ever.

    Those who are described come first; of the rest, who comes first has a label, and the others share one.
    """

    def __init__(self, most: int, described: Iterable[str] = ()) -> None:
        self._most = most
        self._labels: dict[str, str] = {}
        for name in described:
            self.label(name)

    @property
    def given(self) -> list[str]:
        return list(self._labels)

    def label(self, tenant: str) -> str:
        if tenant in self._labels:
            return self._labels[tenant]
        if len(self._labels) >= self._most or tenant == OTHER:
            return OTHER
        self._labels[tenant] = tenant
        return tenant
