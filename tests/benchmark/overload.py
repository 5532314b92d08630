"""A real server with more to do than it can: `python -m tests.benchmark.overload [--seconds 120] [--seed 1]`

The default model with 64 MiB of cache and predictive admission; prompts of 64 to 512 tokens, max_tokens of 16
to 128, a third of the requests without one. First what it sustains is measured, then requests arrive by a
Poisson process, whatever becomes of those before: as many as it sustains, and three times as many; a burst of
20 seconds, after which the refused come back when they were told to; and two tenants, one of whom sends ten
times as much.

Every ratio is of figures measured in the same run. Fails if a request, or the next try of one, did not have
exactly one ending, or had one that is not allowed for.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from model_runner.percentiles import percentiles
from tests.benchmark.open_loop import Sent, closed_loop, open_loop
from tests.e2e.server import Server, eventually, serving

PATIENCE = 10  # seconds, of the queue
OPTIONS = (
    *("--kv-cache-memory", "64MiB", "--max-model-len", "auto", "--admission", "predictive"),
    *("--max-queue-seconds", f"{PATIENCE}s", "--tenant-header", "x-tenant"),
)
# Of the closed loop: more than fit, and so few that hardly one is refused and stays away for a while.
CLIENTS = 11
WARM_SECONDS, CAPACITY_SECONDS, BURST_SECONDS = 30.0, 40.0, 20.0
WATCH_SECONDS = 60.0
ALLOWED = {(200, None), (429, "wait_too_long"), (429, "queue_full"), (504, "queue_timeout")}


@dataclass(frozen=True)
class Phase:
    """`tokens_per_second` is of the time while requests came; the rest until the last had ended."""

    sent: list[Sent]
    began: float
    tokens_per_second: float
    preemptions: int


def measured(server: Server, seconds: float, sending: Coroutine[Any, Any, list[Sent]]) -> Phase:
    """Requests are sent for so many `seconds`."""
    before, began = server.metrics(), time.monotonic()

    async def both() -> tuple[list[Sent], float]:
        playing = asyncio.ensure_future(sending)
        await asyncio.sleep(seconds)
        now = await asyncio.to_thread(server.metrics)
        made = "plimsoll_generated_tokens_total"
        rate = (now[made] - before[made]) / (time.monotonic() - began)
        return await playing, rate

    sent, rate = asyncio.run(both())
    eventually(server.idle, "every byte is back", 60)
    check_endings(sent)
    name = "plimsoll_preemptions_total"
    return Phase(sent, began, rate, int(server.metrics()[name] - before[name]))


def check_endings(sent: Iterable[Sent]) -> None:
    tries = [one for first in sent for one in (first, first.again) if one is not None]
    odd = Counter((one.status, one.code) for one in tries if (one.status, one.code) not in ALLOWED)
    assert not odd, f"endings that are not allowed for: {dict(odd)}"


def p50_p99(values: Iterable[float]) -> tuple[float, float]:
    """nan of nothing."""
    of = percentiles(list(values))
    return (float("nan"), float("nan")) if of is None else (of.p50, of.p99)


def ttfts(sent: Iterable[Sent]) -> list[float]:
    return [one.ttft for one in sent if one.completed and one.ttft is not None]


def tell(name: str, phase: Phase) -> None:
    endings = dict(Counter(one.code or "completed" for one in phase.sent))
    queued = p50_p99(one.queued for one in phase.sent if one.completed)
    first = p50_p99(ttfts(phase.sent))
    print(
        f"{name:<13}{len(phase.sent):>5} requests {endings}; {phase.tokens_per_second:.0f} tokens/s; "
        f"queue p50 {queued[0]:.1f} p99 {queued[1]:.1f} s; TTFT p50 {first[0]:.2f} p99 {first[1]:.2f} s; "
        f"preempted {phase.preemptions}",
        flush=True,
    )


def tell_of_overload(
    server: Server, rate: float, saturated: float, rng: random.Random, seconds: float
) -> None:
    """`saturated`: tokens a second of the closed loop, which is never idle as Poisson arrivals are at 1 x."""
    url = server.url
    once = measured(server, seconds, open_loop(url, [(seconds, rate)], rng))
    tell("1 x", once)
    many = open_loop(url, [(seconds, 3 * rate)], rng, watch_seconds=WATCH_SECONDS)
    thrice = measured(server, seconds, many)
    tell("3 x", thrice)
    ratio = thrice.tokens_per_second / max(once.tokens_per_second, saturated)
    print(f"tokens/s at 3 x, of the most at 1 x or in the closed loop: {ratio:.2f} (at least 0.95)")
    tell_of_retries(thrice.sent)


def tell_of_retries(sent: Iterable[Sent]) -> None:
    """Room is where a check lets it in or has it queued. Where none came while it was watched, it is taken to
    have come at the end of that time."""
    watched = [one for one in sent if one.watched and one.retry_after is not None]
    if not watched:
        return
    pairs = [(one.retry_after or 0.0, one.room_after or WATCH_SECONDS) for one in watched]
    off = [abs(told - room) / room for told, room in pairs]
    told, room = (statistics.median(values) for values in zip(*pairs, strict=True))
    near = sum(each <= 0.25 for each in off) / len(off)
    never = sum(one.room_after is None for one in watched)
    print(
        f"Retry-After, of {len(watched)} watched: told {told:.1f} s, room after {room:.1f} s (medians); "
        f"off by {statistics.median(off):.0%} in the median; {near:.0%} of them by a quarter at most; "
        f"no room within {WATCH_SECONDS:.0f} s: {never}",
        flush=True,
    )


def tell_of_a_burst(server: Server, rate: float, rng: random.Random) -> None:
    course = [(BURST_SECONDS, 3 * rate), (2 * BURST_SECONDS, 0.5 * rate)]
    burst = measured(server, 3 * BURST_SECONDS, open_loop(server.url, course, rng, come_back=True))
    tell("burst", burst)
    back = [one.again for one in burst.sent if one.again is not None]
    if back:
        share = sum(one.completed for one in back) / len(back)
        print(f"came back as told: {len(back)}; got in: {share:.0%} (at least 80 %)", flush=True)


def tell_of_two_tenants(server: Server, rate: float, rng: random.Random, seconds: float) -> None:
    url, few = server.url, [(seconds, 3 * rate / 11)]
    alone = measured(server, seconds, open_loop(url, few, rng, tenant="quiet"))
    tell("quiet alone", alone)
    quiet: list[Sent] = []

    async def both() -> list[Sent]:
        mine, others = await asyncio.gather(
            open_loop(url, few, rng, tenant="quiet"),
            open_loop(url, [(seconds, 30 * rate / 11)], rng, tenant="loud"),
        )
        quiet.extend(mine)
        return mine + others

    tell("with a loud", measured(server, seconds, both()))
    (_, before), (_, now) = p50_p99(ttfts(alone.sent)), p50_p99(ttfts(quiet))
    endings = dict(Counter(one.code or "completed" for one in quiet))
    print(f"the quiet tenant, beside the loud one: {endings}")
    print(f"its TTFT p99: {now:.2f} s, alone {before:.2f}: {now / before:.1f} times (at most 2)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with serving(*OPTIONS) as server:
        tell(
            "cold start", measured(server, WARM_SECONDS, closed_loop(server.url, CLIENTS, WARM_SECONDS, rng))
        )
        sending = closed_loop(server.url, CLIENTS, CAPACITY_SECONDS, rng)
        capacity = measured(server, CAPACITY_SECONDS, sending)
        tell("closed loop", capacity)
        until = capacity.began + CAPACITY_SECONDS
        rate = sum(one.completed and one.ended_at <= until for one in capacity.sent) / CAPACITY_SECONDS
        print(f"capacity: {rate:.2f} requests/s", flush=True)
        tell_of_overload(server, rate, capacity.tokens_per_second, rng, options.seconds)
        tell_of_a_burst(server, rate, rng)
        tell_of_two_tenants(server, rate, rng, options.seconds)


if __name__ == "__main__":
    main()
