"""What the queue at the door costs, with 1,000 waiting. Run it: python -m tests.benchmark.fair_queue

Asked is the target of the whole door: under 100 microseconds for a request.
"""

from __future__ import annotations

import math
import time
from itertools import islice

from model_runner.core.fair_queue import FairQueue, Waiting
from model_runner.core.tenants import Tenants

WAITING, TURNS, NOW = 1000, 2000, 10.0


def measure(tenants: int, priorities: int) -> tuple[float, float, float]:
    """Microseconds of: push and look at the first; take the first; look at 17 candidates."""
    queue: FairQueue[None] = FairQueue(Tenants())

    def push(serial: int) -> None:
        cost, tenant, priority = 1.0 + serial % 7, f"tenant-{serial % tenants}", serial % priorities
        queue.push(Waiting(str(serial), tenant, priority, cost, NOW * serial / WAITING, math.inf, None))

    for serial in range(WAITING):
        push(serial)
    pushing = taking = looking = 0.0
    for serial in range(WAITING, WAITING + TURNS):
        began = time.perf_counter()
        push(serial)
        first = next(queue.candidates(NOW))
        pushed = time.perf_counter()
        queue.take(first.ask_id, NOW)
        taken = time.perf_counter()
        list(islice(queue.candidates(NOW), 17))
        looking += time.perf_counter() - taken
        taking += taken - pushed
        pushing += pushed - began
    return pushing / TURNS * 1e6, taking / TURNS * 1e6, looking / TURNS * 1e6


if __name__ == "__main__":
    print("tenants  priorities  push + first  take  17 candidates  (microseconds)")
    for tenants, priorities in ((1, 1), (2, 1), (100, 1), (1000, 1), (1, 3), (2, 3), (100, 3)):
        pushed, taken, looked = measure(tenants, priorities)
        print(f"{tenants:7}  {priorities:10}  {pushed:12.1f}  {taken:4.1f}  {looked:13.1f}")
