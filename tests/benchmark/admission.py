"""What predictive admission costs the API process, with 1,000 waiting and 256 running.

Run it: python -m tests.benchmark.admission

Asked is: under 100 microseconds for a request, and under 2 % of a step. A step of the default model with 256
sequences takes about a quarter of a second here (`python -m tests.benchmark.engine_step`).
"""

from __future__ import annotations

import math
import time

from model_runner.core.admission import MAX_PASSES, AdmissionController, Ask
from model_runner.core.block_layout import BlockGroup, BlockLayout
from model_runner.core.lengths import Lengths
from model_runner.core.pace import Pace
from model_runner.core.policy import Part, Predictive

RUNNING, WAITING, ARRIVALS, STEPS, LIMIT = 256, 1000, 2000, 40, 8192
LAYOUT = BlockLayout((BlockGroup("full", (0,), 1, 1),), 16, 1)


def make_ask(serial: int) -> Ask:
    prompt, most = 64 + serial * 37 % 1500, 1000
    part = Part(f"{serial}-0", LAYOUT.request_blocks(prompt, most), 1, prompt, most)
    return Ask(str(serial), (part,))


def full_house() -> AdmissionController:
    lengths = Lengths(LIMIT)
    for serial in range(2000):
        length = 20 + serial * 53 % 400
        lengths.of(64 + serial * 37 % 1500).drawn(length, length)
        lengths.of(64 + serial * 37 % 1500).ended(length)
    blocks = 17_000
    door = AdmissionController(
        num_blocks=blocks,
        max_num_seqs=RUNNING,
        max_queue_requests=10**6,
        max_queue_seconds=math.inf,
        pace=Pace(0.25, 1000.0),
        policy=Predictive(LAYOUT, lengths, num_blocks=blocks, overflow_risk=0.003),
        lengths=lengths,
        max_passes=MAX_PASSES,
    )
    door.open(0.0)
    for serial in range(RUNNING + WAITING):
        door.decide(make_ask(serial), 0.0)
    assert (len(door.reservations()), door.queue_length) == (RUNNING, WAITING)
    return door


def measure() -> tuple[float, float]:
    """Microseconds of one arrival, its part of the forecasts included; and of the bookkeeping of one step
    with an ending and an admission in it."""
    door = full_house()
    now, serial, arriving, stepping = 0.0, RUNNING + WAITING, 0.0, 0.0
    for step in range(1, STEPS + 1):
        now += 0.25
        began = time.perf_counter()
        for part_id in list(door.reservations()):
            door.progress(part_id, step)
        door.release([next(iter(door.reservations()))], now)
        stepping += time.perf_counter() - began
        for _ in range(ARRIVALS // STEPS):
            ask = make_ask(serial)
            serial += 1
            began = time.perf_counter()
            door.decide(ask, now)
            arriving += time.perf_counter() - began
            door.cancel(ask.ask_id, now)
    return arriving / ARRIVALS * 1e6, stepping / STEPS * 1e6


if __name__ == "__main__":
    arrival, step = measure()
    print(f"an arrival: {arrival:.0f} microseconds; a step's bookkeeping: {step:.0f} microseconds")
    print(f"of a step of 250 ms: {step / 250_000:.2%}")
