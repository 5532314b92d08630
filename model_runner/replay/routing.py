"""Which replica gets the next request.

round-robin   each in turn
least-loaded  the one with the fewest requests, running and waiting
cache-aware   of those that could take it now, the one that has seen the most of its prompt's beginning, where
              the trace tells that; else, and among equals, the one with the most room under its line once all
              have come to their predicted peak
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from model_runner.replay.replica import Replica
from model_runner.replay.trace import Row


class Prefixes:
    """Which pieces of prompts each replica has seen. Nothing is ever forgotten: a bound from above for any
    cache of prefixes."""

    def __init__(self, replicas: int) -> None:
        self._seen: list[set[int]] = [set() for _ in range(replicas)]
        self._known = self._all = 0

    def known(self, replica: int, row: Row) -> int:
        """How many of its first pieces."""
        seen = self._seen[replica]
        for index, piece in enumerate(row.prefix_ids):
            if piece not in seen:
                return index
        return len(row.prefix_ids)

    def sent(self, replica: int, row: Row) -> None:
        self._known += self.known(replica, row)
        self._all += len(row.prefix_ids)
        self._seen[replica].update(row.prefix_ids)

    @property
    def known_ratio(self) -> float:
        """Of all pieces sent: those whose replica knew them and all before them."""
        return self._known / self._all if self._all else 0.0


class Router(ABC):
    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.prefixes = Prefixes(len(replicas))
        self._replicas = replicas

    def choose(self, row: Row) -> int:
        """A replica's index. All replicas stand at the row's arrival."""
        index = self._pick(row)
        self.prefixes.sent(index, row)
        return index

    @abstractmethod
    def _pick(self, row: Row) -> int: ...


class _RoundRobin(Router):
    def __init__(self, replicas: Sequence[Replica]) -> None:
        super().__init__(replicas)
        self._next = 0

    def _pick(self, row: Row) -> int:
        index = self._next
        self._next = (index + 1) % len(self._replicas)
        return index


class _LeastLoaded(Router):
    def _pick(self, row: Row) -> int:
        return min(range(len(self._replicas)), key=lambda index: self._replicas[index].num_live)


class _CacheAware(Router):
    def _pick(self, row: Row) -> int:
        rooms = [replica.free_room for replica in self._replicas]
        wanted = -(-row.prompt_tokens // self._replicas[0].setting.block_size)
        able = [index for index, room in enumerate(rooms) if room >= wanted]
        # Lower indices first among equals, so that a replay is the same each time.
        return max(
            able or range(len(rooms)),
            key=lambda index: (self.prefixes.known(index, row) if able else 0, rooms[index], -index),
        )


def make_router(routing: str, replicas: Sequence[Replica]) -> Router:
    """`routing` is one of ROUTINGS."""
    return _ROUTERS[routing](replicas)


_ROUTERS: dict[str, type[Router]] = {
    "round-robin": _RoundRobin,
    "least-loaded": _LeastLoaded,
    "cache-aware": _CacheAware,
}
ROUTINGS = tuple(_ROUTERS)
