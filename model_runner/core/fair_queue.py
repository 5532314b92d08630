"""The queue at the door: whose turn it is, when several share the server.

The order of turn, most significant first:

  1. who had been let in once already, when an engine died (`push_front`);
  2. priority: a lower number is more urgent. A request gains one class for every `aging_seconds` it has
     waited, up to the most urgent class that anybody who waits now was given, and no further: age ends the
     privilege of priority, not the shares of tenants. (With one priority in use there is one class, and a
     tenant that sends a thousand requests can't push back another's fresh one by letting its own grow old.)
  3. virtual time, across the tenants of a class: start-time fair queueing (Goyal, Vin and Cheng 1996), with
     a counter for each tenant instead of tags on requests, as in the virtual token counter (Sheng et al.
     2024), so that a request that goes away leaves no trace. Being let in moves a tenant's clock on by
     cost / weight. The queue's own clock is the start of the last turn that was taken in order, and never
     goes back. A tenant that comes back after a pause starts there: it has no hoard of credit, and of debt
     only what the others haven't caught up with yet. When nobody waits nobody is deprived, and all clocks
     are forgotten;
  4. first come, first served.

With one tenant and one priority this is a plain queue. It is work-conserving: whoever waits is in turn.

Passing. A small request may be let in before those whose turn comes first but which don't fit yet:
`candidates` goes on past them. But each is passed at most `max_passes` times, and not at all once it has
waited `aging_seconds`; there `candidates` ends, and the room that comes free is kept for it.

The bound on a wait. Let r wait, of a tenant of weight w, with priority p, and let m be the most urgent
priority that anybody has who waits meanwhile. Then

  - after (p - m) · aging_seconds it is in the first class, for as long as it waits;
  - from then on each other tenant u is let in, in turn, for at most w_u · (d + C / w) + l_u before r. C is
    what r's own tenant is charged in that time, and will be for those of its requests that still come
    before r; d is how far its clock was ahead of the queue's when that time began (at most its largest
    request over w, if it had passed nobody); l_u is u's largest request;
  - at most `max_passes` requests pass it, and none once it has waited `aging_seconds`.

So after a known amount of work the room that comes free is r's alone, and as no request is larger than the
whole budget and all that runs ends, r gets in. No duration follows without knowing how fast work is done;
that is the forecast's affair.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf, isfinite
from typing import Generic, TypeAlias, TypeVar

from model_runner.core.tenants import Tenants

AskT = TypeVar("AskT")

# (class, start in virtual time): the smaller comes first.
Turn: TypeAlias = tuple[float, float]

_FEWEST_LINES_SWEPT = 64
_AT_THE_FRONT: Turn = (-inf, 0.0)


@dataclass(slots=True, eq=False)
class Waiting(Generic[AskT]):
    """One request in the queue. Times are seconds on the caller's clock."""

    ask_id: str
    tenant: str
    priority: int  # lower is more urgent
    cost: float  # predicted: KV byte-seconds, and prefill tokens at some rate; at least 0
    arrived_at: float
    deadline: float
    ask: AskT
    passes: int = 0  # how many have been let in before it that came after it in turn
    order: int = field(default=0, init=False)  # of arrival; the queue's own


@dataclass(frozen=True, slots=True)
class Standing:
    """How one request stands in the queue, for display."""

    ask_id: str
    tenant: str
    priority: int
    effective_class: int
    waited_seconds: float
    deadline: float
    passes: int
    may_be_passed: bool


@dataclass(slots=True, eq=False)
class _Line(Generic[AskT]):
    """One tenant's requests, and its virtual time."""

    weight: float
    clock: float
    tick: int  # when it came to this clock: of two tenants at one time, who has stood there longer goes first
    lanes: dict[int, OrderedDict[str, Waiting[AskT]]] = field(default_factory=dict)  # by priority; none empty
    costs: dict[int, float] = field(default_factory=dict)  # of each lane, together


class FairQueue(Generic[AskT]):
    """See the module. Iterators are of the moment: after any change, ask for a new one."""

    def __init__(self, tenants: Tenants, *, aging_seconds: float = 10.0, max_passes: int = 8) -> None:
        assert aging_seconds > 0
        assert max_passes >= 0
        self.tenants = tenants
        self.aging_seconds = aging_seconds
        self.max_passes = max_passes
        self._waiting: dict[str, Waiting[AskT]] = {}
        self._front: OrderedDict[str, Waiting[AskT]] = OrderedDict()
        self._lines: dict[str, _Line[AskT]] = {}  # of who waits, or is ahead of the clock
        self._ranks: list[tuple[float, int, _Line[AskT]]] = []  # (clock, tick, line) of who waits, sorted
        self._lengths: dict[str, int] = {}  # by tenant
        self._priorities: dict[int, int] = {}  # how many wait with each
        self._clock = 0.0
        self._ticks = 0
        self._arrivals = 0
        self._earliest_deadline = inf  # a lower bound: saves walking the queue when nobody is late
        self._sweep_at = _FEWEST_LINES_SWEPT

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, ask_id: str) -> bool:
        return ask_id in self._waiting

    def length_of(self, tenant: str) -> int:
        return self._lengths.get(tenant, 0)

    def lengths(self) -> dict[str, int]:
        """Requests by tenant, of those that wait."""
        return dict(self._lengths)

    @property
    def clock(self) -> float:
        """The virtual time: the start of the last turn taken in order. 0.0 when nobody waits."""
        return self._clock

    def clock_of(self, tenant: str) -> float:
        """The virtual time at which this tenant's next turn starts; never before the queue's."""
        line = self._lines.get(tenant)
        return self._clock if line is None else max(line.clock, self._clock)

    # ---- coming

    def push(self, waiting: Waiting[AskT]) -> None:
        """To its tenant's end."""
        assert isfinite(waiting.cost)
        assert waiting.cost >= 0
        self._remember(waiting)
        line = self._lines.get(waiting.tenant)
        if line is None:
            self._sweep()
            line = self._lines[waiting.tenant] = _Line(self.tenants[waiting.tenant].weight, self._clock, 0)
        if not line.lanes:
            self._place(line, max(line.clock, self._clock))
        lane = line.lanes.get(waiting.priority)
        if lane is None:
            lane = line.lanes[waiting.priority] = OrderedDict()
        lane[waiting.ask_id] = waiting
        line.costs[waiting.priority] = line.costs.get(waiting.priority, 0.0) + waiting.cost
        self._priorities[waiting.priority] = self._priorities.get(waiting.priority, 0) + 1

    def push_front(self, waitings: Sequence[Waiting[AskT]]) -> None:
        """Before everybody, in this order: they had been let in once, and have been charged for it."""
        for waiting in reversed(waitings):
            self._remember(waiting)
            self._front[waiting.ask_id] = waiting
            self._front.move_to_end(waiting.ask_id, last=False)

    # ---- whose turn it is

    def candidates(self, now: float) -> Iterator[Waiting[AskT]]:
        """Who may be let in now, in turn: the next may be, only if those before it don't fit. Ends at the
        first that may not be passed any more."""
        for waiting in self.in_turn(now):
            yield waiting
            if not self.may_be_passed(waiting, now):
                return

    def may_be_passed(self, waiting: Waiting[AskT], now: float) -> bool:
        return waiting.passes < self.max_passes and now - waiting.arrived_at < self.aging_seconds

    def in_turn(self, now: float) -> Iterator[Waiting[AskT]]:
        """Everybody, lazily, in the order in which they would be let in if each were charged what it is
        predicted to cost, and neither the time nor the most urgent priority changed."""
        return (waiting for _, waiting in self.turns(now))

    def turn_of_next(self, tenant: str, priority: int) -> Turn:
        """Of a request that comes now: after those that wait with the same turn. What age has done for the
        tenant's own less urgent ones is left out."""
        line = self._lines.get(tenant)
        if line is None or not line.lanes:
            return priority, self.clock_of(tenant)
        before = [cost for of, cost in line.costs.items() if of <= priority]
        if not before:  # a line that waits keeps its place, though the queue's clock went on elsewhere
            return priority, line.clock
        return priority, max(line.clock, self._clock) + sum(before) / line.weight

    def turns(self, now: float) -> Iterator[tuple[Turn, Waiting[AskT]]]:
        """As `in_turn`, with the turn of each; turns never fall."""
        yield from ((_AT_THE_FRONT, waiting) for waiting in self._front.values())
        if not self._ranks:
            return
        top = min(self._priorities)
        clock, ticks = self._clock, count(self._ticks)
        begun: list[tuple[int, float, int, Waiting[AskT], Iterator[Waiting[AskT]], float]] = []
        ranked = self._ranked(now, top)
        fresh = next(ranked, None)
        while begun or fresh is not None:
            if fresh is None or (begun and begun[0][:3] < fresh[:3]):
                urgency, start, _, waiting, rest, weight = heapq.heappop(begun)
            else:
                urgency, start, _, line = fresh
                rest, weight = self._line_in_turn(line, now, top), line.weight
                waiting = next(rest)
                fresh = next(ranked, None)
            yield (urgency, start), waiting
            clock = max(clock, start)
            following = next(rest, None)
            if following is not None:
                charged = clock + waiting.cost / weight
                turn = (self._class(following, now, top), charged, next(ticks), following, rest, weight)
                heapq.heappush(begun, turn)

    def snapshot(self, now: float) -> list[Standing]:
        """Everybody in turn, for display."""
        top = min(self._priorities, default=0)
        return [
            Standing(
                ask_id=waiting.ask_id,
                tenant=waiting.tenant,
                priority=waiting.priority,
                effective_class=self._class(waiting, now, min(top, waiting.priority)),
                waited_seconds=now - waiting.arrived_at,
                deadline=waiting.deadline,
                passes=waiting.passes,
                may_be_passed=self.may_be_passed(waiting, now),
            )
            for waiting in self.in_turn(now)
        ]

    # ---- leaving

    def take(self, ask_id: str, now: float) -> Waiting[AskT]:
        """Let in one of `candidates(now)`, and charge its tenant. Those whose turn came first are passed.

        Raises KeyError for one that doesn't wait.
        """
        waiting = self._waiting[ask_id]
        passed = False
        for other in self.in_turn(now):
            if other is waiting:
                break
            assert self.may_be_passed(other, now), "only candidates may be taken"
            other.passes += 1
            passed = True
        charged = ask_id not in self._front
        line = self._lines.get(waiting.tenant)
        self._forget(waiting)
        if charged and self._waiting:
            assert line is not None
            start = max(line.clock, self._clock)
            if not passed:
                self._clock = start
            self._lines[waiting.tenant] = line
            self._move(line, start + waiting.cost / line.weight)
        return waiting

    def remove(self, ask_id: str) -> Waiting[AskT] | None:
        """It has gone away, and costs nobody anything. None if it doesn't wait."""
        waiting = self._waiting.get(ask_id)
        if waiting is not None:
            self._forget(waiting)
        return waiting

    def expire(self, now: float) -> list[Waiting[AskT]]:
        """Those whose deadline has come, the earliest first; they wait no longer."""
        if now < self._earliest_deadline:
            return []
        late = [waiting for waiting in self._waiting.values() if waiting.deadline <= now]
        for waiting in late:
            self._forget(waiting)
        deadlines = (waiting.deadline for waiting in self._waiting.values())
        self._earliest_deadline = min(deadlines, default=inf)
        return sorted(late, key=lambda waiting: (waiting.deadline, waiting.order))

    def settle(self, tenant: str, predicted_cost: float, actual_cost: float) -> None:
        """One of its requests that had been let in has ended: charge what it really cost. Credit takes a
        clock back to the queue's at most. While nobody waits there is nothing to settle."""
        if not self._waiting or predicted_cost == actual_cost:
            return
        line = self._lines.get(tenant)
        if line is None:  # at the queue's clock: credit has nothing to give back
            if actual_cost < predicted_cost:
                return
            self._sweep()
            line = self._lines[tenant] = _Line(self.tenants[tenant].weight, self._clock, 0)
        change = (actual_cost - predicted_cost) / line.weight
        if change > 0:
            self._move(line, max(line.clock, self._clock) + change)
        elif line.clock > self._clock:
            self._move(line, max(line.clock + change, self._clock))

    # ---- within

    def _class(self, waiting: Waiting[AskT], now: float, top: int) -> int:
        if waiting.priority == top:
            return top
        return max(waiting.priority - int((now - waiting.arrived_at) / self.aging_seconds), top)

    def _ranked(self, now: float, top: int) -> Iterator[tuple[int, float, int, _Line[AskT]]]:
        """(class, clock, tick, line) of every tenant's first, sorted. With one priority, lazily."""
        if len(self._priorities) == 1:
            return ((top, clock, tick, line) for clock, tick, line in self._ranks)
        firsts = []
        for clock, tick, line in self._ranks:
            first = top
            if top not in line.lanes:
                heads = (next(iter(lane.values())) for lane in line.lanes.values())
                first = min(self._class(head, now, top) for head in heads)
            firsts.append((first, clock, tick, line))
        return iter(sorted(firsts))

    def _line_in_turn(self, line: _Line[AskT], now: float, top: int) -> Iterator[Waiting[AskT]]:
        lanes = [lane.values() for lane in line.lanes.values()]
        if len(lanes) == 1:
            return iter(lanes[0])
        return heapq.merge(*lanes, key=lambda waiting: (self._class(waiting, now, top), waiting.order))

    def _remember(self, waiting: Waiting[AskT]) -> None:
        assert waiting.ask_id not in self._waiting
        waiting.order = self._arrivals
        self._arrivals += 1
        self._waiting[waiting.ask_id] = waiting
        self._lengths[waiting.tenant] = self._lengths.get(waiting.tenant, 0) + 1
        self._earliest_deadline = min(self._earliest_deadline, waiting.deadline)

    def _forget(self, waiting: Waiting[AskT]) -> None:
        ask_id, tenant = waiting.ask_id, waiting.tenant
        del self._waiting[ask_id]
        _count_down(self._lengths, tenant)
        if self._front.pop(ask_id, None) is None:
            _count_down(self._priorities, waiting.priority)
            line = self._lines[tenant]
            lane = line.lanes[waiting.priority]
            del lane[ask_id]
            line.costs[waiting.priority] -= waiting.cost
            if not lane:
                del line.lanes[waiting.priority], line.costs[waiting.priority]
            if not line.lanes:
                self._unrank(line)
                if line.clock <= self._clock:
                    del self._lines[tenant]
        if not self._waiting:
            self._lines.clear()
            self._clock = 0.0
            self._earliest_deadline = inf

    def _move(self, line: _Line[AskT], clock: float) -> None:
        if line.lanes:
            self._unrank(line)
            self._place(line, clock)
        else:
            line.clock = clock

    def _place(self, line: _Line[AskT], clock: float) -> None:
        line.clock, line.tick = clock, self._ticks
        self._ticks += 1
        insort(self._ranks, (clock, line.tick, line))

    def _unrank(self, line: _Line[AskT]) -> None:
        del self._ranks[bisect_left(self._ranks, (line.clock, line.tick, line))]

    def _sweep(self) -> None:
        """Forget tenants that neither wait nor are ahead of the clock. Costs a constant for each newcomer, on
        the whole."""
        if len(self._lines) >= self._sweep_at:
            kept = {
                name: line for name, line in self._lines.items() if line.lanes or line.clock > self._clock
            }
            self._lines = kept
            self._sweep_at = max(2 * len(kept), _FEWEST_LINES_SWEPT)


KeyT = TypeVar("KeyT")


def _count_down(counts: dict[KeyT, int], key: KeyT) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
