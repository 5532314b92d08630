"""A real server with more to do than it can: `python -m tests.benchmark.overload [--seconds 120] [--seed 1]`

The default model with 64 MiB of cache and predictive admission; prompts of 64 to 512 tokens, max_tokens of 16
to 128, a third of the requests without one. First what it sustains is measured, then requests arrive by a
Poisson process, whatever becomes of those before: as many as it sustains, and three times as many; a burst of
20 seconds, after which the refused come back when they were told to; and two tenants, one of whom sends ten
times as much.

Every ratio is of figures measured in the same run. Ends with 1 if a request did not have exactly one ending,
or had one that is not allowed for.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.server import Server, eventually, serving

PATIENCE = 10  # seconds, of the queue
OPTIONS = (
    *("--kv-cache-memory", "64MiB", "--max-model-len", "auto", "--admission", "predictive"),
    *("--max-queue-seconds", f"{PATIENCE}s", "--tenant-header", "x-tenant"),
)
CLIENTS = 16  # of the closed loop: more than fit
BURST_SECONDS = 20.0
WORDS = ["ship", "sea", "port", "crew", "wind", "sail", "mast", "rope", "deck", "tide", "wave", "coast"]
ALLOWED = {(200, None), (429, "wait_too_long"), (429, "queue_full"), (504, "queue_timeout")}


@dataclass
class Sent:
    """One request, and what became of it."""

    at: float
    status: int = 0
    code: str | None = None
    ttft: float | None = None
    queued: float = 0.0
    retry_after: float | None = None  # seconds
    room_after: float | None = None  # seconds after which it would have been let in, where that was watched
    again: Sent | None = None  # the next try


@dataclass
class Phase:
    sent: list[Sent] = field(default_factory=list)
    tokens_per_second: float = 0.0
    preemptions: int = 0

    def of(self, status: int) -> list[Sent]:
        return [one for one in self.sent if one.status == status]


def body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """(path, body)."""
    tokens = rng.randrange(64, 513)
    common = {"stream": True, "temperature": 0.8, "seed": rng.randrange(10**6)}
    if rng.random() < 1 / 3:
        # The chat template adds some 30 tokens; without a limit it may take up to --default-max-tokens.
        words = " ".join(rng.choice(WORDS) for _ in range(tokens - 40)) or "sea"
        text = f"Tell me about these: {words}"
        return "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": text}]}
    prompt = [rng.randrange(100, 40_000) for _ in range(tokens)]
    return "/v1/completions", {**common, "prompt": prompt, "max_tokens": rng.randrange(16, 129)}


async def send(client: httpx.AsyncClient, path: str, wanted: dict[str, Any], tenant: str = "default") -> Sent:
    one = Sent(at=time.monotonic())
    headers = {"x-tenant": tenant}
    async with client.stream("POST", path, json=wanted, headers=headers) as response:
        one.status = response.status_code
        if response.status_code != 200:
            await response.aread()
            one.code = response.json()["error"]["code"]
            if "retry-after-ms" in response.headers:
                one.retry_after = float(response.headers["retry-after-ms"]) / 1000
            return one
        one.queued = float(response.headers["x-plimsoll-queue-seconds"])
        lines = [line async for line in _data(response, one)]
        assert lines[-1] == "[DONE]", lines[-1]
        errors = [line for line in lines if line.startswith('{"error"')]
        assert not errors, errors
    return one


async def _data(response: httpx.Response, one: Sent) -> Any:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            if one.ttft is None:
                one.ttft = time.monotonic() - one.at
            yield line[6:]


async def watch_for_room(client: httpx.AsyncClient, wanted: dict[str, Any], one: Sent) -> None:
    """Ask, without a trace, when it would have been let in or queued."""
    while time.monotonic() - one.at < 6 * PATIENCE:
        await asyncio.sleep(0.25)
        answer = (await client.post("/v1/admission/check", json=wanted)).json()
        if answer["decision"] != "rejected":
            one.room_after = time.monotonic() - one.at
            return


def client_of(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=900, limits=limits)


async def closed_loop(server: Server, seconds: float, rng: random.Random) -> Phase:
    async with client_of(server) as client:
        phase, until = Phase(), time.monotonic() + seconds

        async def busy() -> None:
            while time.monotonic() < until:
                one = await send(client, *body(rng))
                phase.sent.append(one)
                await asyncio.sleep(one.retry_after or 0.0)

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(busy())
    return phase


async def open_loop(
    server: Server,
    rates: Sequence[tuple[float, float]],
    rng: random.Random,
    *,
    come_back: bool = False,
    look: bool = False,
    tenant_of: Callable[[], str] = lambda: "default",
) -> Phase:
    """`rates`: (seconds, requests a second), one after the other."""
    phase = Phase()
    watched = 0

    async with client_of(server) as client, asyncio.TaskGroup() as group:

        async def one() -> None:
            nonlocal watched
            path, wanted = body(rng)
            tenant = tenant_of()
            sent = await send(client, path, wanted, tenant)
            phase.sent.append(sent)
            if sent.status != 429 or sent.retry_after is None:
                return
            if come_back:
                await asyncio.sleep(sent.retry_after)
                sent.again = await send(client, path, wanted, tenant)
            elif look and watched < 8:
                watched += 1
                await watch_for_room(client, wanted, sent)
                watched -= 1

        for seconds, rate in rates:
            until = time.monotonic() + seconds
            while (pause := rng.expovariate(rate)) < until - time.monotonic():
                await asyncio.sleep(pause)
                group.create_task(one())
            await asyncio.sleep(max(until - time.monotonic(), 0.0))
    return phase


def measured(server: Server, seconds: float, run: Callable[[], Any]) -> Phase:
    """With what the server says of itself over the first `seconds`."""
    before, began = server.metrics(), time.monotonic()

    async def both() -> tuple[Phase, dict[str, float], float]:
        playing = asyncio.ensure_future(run())
        await asyncio.sleep(seconds)
        now = await asyncio.to_thread(server.metrics)
        elapsed = time.monotonic() - began
        return await playing, now, elapsed

    phase, after, elapsed = asyncio.run(both())
    eventually(server.idle, "every byte is back", 60)
    made = "plimsoll_generated_tokens_total"
    phase.tokens_per_second = (after[made] - before[made]) / elapsed
    name = "plimsoll_preemptions_total"
    phase.preemptions = int(server.metrics()[name] - before[name])
    odd = Counter((one.status, one.code) for one in phase.sent if (one.status, one.code) not in ALLOWED)
    if odd:
        sys.exit(f"endings that are not allowed for: {dict(odd)}")
    return phase


def quantile(values: Sequence[float], q: float) -> float:
    ranked = sorted(values)
    return ranked[min(int(q * len(ranked)), len(ranked) - 1)] if ranked else float("nan")


def tell(name: str, phase: Phase) -> None:
    done = phase.of(200)
    endings = dict(Counter(one.code or "completed" for one in phase.sent))
    queued = quantile([one.queued for one in done], 0.99)
    ttft = [one.ttft for one in done if one.ttft is not None]
    print(
        f"{name:<14} {len(phase.sent):>5} requests {endings}; {phase.tokens_per_second:.0f} tokens/s; "
        f"queue p99 {queued:.1f} s of {PATIENCE}; TTFT p50 {quantile(ttft, 0.5):.2f} p99 "
        f"{quantile(ttft, 0.99):.2f} s; preempted {phase.preemptions}",
        flush=True,
    )


def tell_of_retries(name: str, phase: Phase) -> None:
    pairs = [(one.retry_after, one.room_after) for one in phase.sent if one.retry_after and one.room_after]
    if pairs:
        off = statistics.median(abs(told - room) for told, room in pairs)
        told, room = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(
            f"{name}: Retry-After against when there was room, {len(pairs)} watched: off by {off:.1f} s in "
            f"the median (told {told:.1f}, room after {room:.1f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    seconds, rng = options.seconds, random.Random(options.seed)
    with serving(*OPTIONS) as server:
        cold = measured(server, 30, lambda: closed_loop(server, 30, rng))
        tell("cold start", cold)
        capacity = measured(server, 40, lambda: closed_loop(server, 40, rng))
        tell("closed loop", capacity)
        rate = len(capacity.of(200)) / 40
        print(f"capacity: {rate:.2f} requests/s", flush=True)
        once = measured(server, seconds, lambda: open_loop(server, [(seconds, rate)], rng))
        tell("1 x", once)
        thrice = measured(server, seconds, lambda: open_loop(server, [(seconds, 3 * rate)], rng, look=True))
        tell("3 x", thrice)
        ratio = thrice.tokens_per_second / once.tokens_per_second
        print(f"tokens/s at 3 x, of those at 1 x: {ratio:.2f} (aim: 0.95)")
        tell_of_retries("3 x", thrice)
        tell_of_the_burst(server, rate, rng)
        tell_of_two_tenants(server, rate, rng, seconds)


def tell_of_the_burst(server: Server, rate: float, rng: random.Random) -> None:
    course = [(BURST_SECONDS, 3 * rate), (2 * BURST_SECONDS, 0.5 * rate)]
    burst = measured(server, 3 * BURST_SECONDS, lambda: open_loop(server, course, rng, come_back=True))
    tell("burst", burst)
    back = [one.again for one in burst.sent if one.again is not None]
    if back:
        inside = sum(one.status == 200 for one in back)
        print(f"came back as told: {len(back)}; got in: {inside / len(back):.0%} (aim: 80 %)", flush=True)


def tell_of_two_tenants(server: Server, rate: float, rng: random.Random, seconds: float) -> None:
    quiet_rate = 3 * rate / 11
    quiet = [(seconds, quiet_rate)]
    alone = measured(server, seconds, lambda: open_loop(server, quiet, rng, tenant_of=lambda: "quiet"))
    tell("quiet alone", alone)

    async def together() -> Phase:
        phases = await asyncio.gather(
            open_loop(server, quiet, rng, tenant_of=lambda: "quiet"),
            open_loop(server, [(seconds, 10 * quiet_rate)], rng, tenant_of=lambda: "loud"),
        )
        beside.sent = phases[0].sent
        return Phase(phases[0].sent + phases[1].sent)

    beside = Phase()
    both = measured(server, seconds, together)
    tell("both", both)
    tell("quiet of both", beside)
    before, now = (quantile([o.ttft for o in p.of(200) if o.ttft], 0.99) for p in (alone, beside))
    print(
        f"quiet tenant's TTFT p99: {now:.2f} s beside the loud one, {before:.2f} alone: {now / before:.2f} x"
    )


if __name__ == "__main__":
    main()
