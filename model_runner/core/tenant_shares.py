"""How much of the cache each tenant's requests are priced at together, against what it may have."""

from __future__ import annotations

from model_runner.core.tenants import Tenants


class TenantShares:
    """Counts only tenants that have a limit; one whose requests have all gone is forgotten."""

    def __init__(self, tenants: Tenants, num_blocks: int) -> None:
        self._tenants = tenants
        self._num_blocks = num_blocks
        self._priced: dict[str, int] = {}  # blocks, of requests that run or wait

    def most(self, tenant: str) -> int:
        """Blocks that one request of this tenant may ever take."""
        limit = self._tenants[tenant].max_reserved_blocks
        return self._num_blocks if limit is None else min(limit, self._num_blocks)

    def left(self, tenant: str) -> int:
        """Blocks that one more may take beside those that run or wait."""
        limit = self._tenants[tenant].max_reserved_blocks
        return self._num_blocks if limit is None else limit - self._priced.get(tenant, 0)

    def take(self, tenant: str, blocks: int) -> None:
        if self._tenants[tenant].max_reserved_blocks is not None:
            self._priced[tenant] = self._priced.get(tenant, 0) + blocks

    def give_back(self, tenant: str, blocks: int) -> None:
        held = self._priced.get(tenant)
        if held is None:
            return
        assert held >= blocks, f"tenant {tenant!r} gives back {blocks} blocks of {held}"
        if held > blocks:
            self._priced[tenant] = held - blocks
        else:
            del self._priced[tenant]
