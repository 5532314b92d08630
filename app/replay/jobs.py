"""Replays side by side, each in a process of its own, and how far they have come."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import TypeAlias

from app.progress import Progress
from model_runner.replay.figures import Figures, Slo, figures_of
from model_runner.replay.replica import Level
from model_runner.replay.simulation import Row, Setting, Simulation

_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One policy over one trace."""

    name: str  # of the policy, as reports call it
    policy: str
    rows: tuple[Row, ...]
    setting: Setting
    slo: Slo
    arrivals: str  # trace | backlog
    rate_scale: float  # of arrivals: how many times as many a second as in the trace
    load: float | None = None  # what comes in, in units of what the oracle sustains
    replicas: int = 1
    routing: str = "round-robin"


@dataclass(frozen=True, slots=True)
class Outcome:
    job: Job
    figures: Figures
    levels: tuple[tuple[Level, ...], ...]  # of each replica's cache


Played: TypeAlias = tuple[Figures, tuple[tuple[Level, ...], ...]]


def run_job(job: Job, on_progress: Callable[[int], None]) -> Played:
    simulation = Simulation(job.rows, job.setting, job.policy, replicas=job.replicas, routing=job.routing)
    with _few_collections():
        course = simulation.run(on_progress)
    return figures_of(course, job.slo), tuple(tuple(tally.levels) for tally in course.tallies)


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """What a simulation makes is freed by its counts; looking for cycles took a fifth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run_all(jobs: Sequence[Job], workers: int, what: str) -> list[Outcome]:
    """In the order of `jobs`. `what` is being done, for the progress."""
    with Progress(what, sum(len(job.rows) for job in jobs)) as progress:
        if min(workers, len(jobs)) == 1:
            return [Outcome(job, *run_job(job, _Since(progress.advance))) for job in jobs]
        return _run_in_processes(jobs, workers, progress)


class _Since:
    """From how many are through, to how many more."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance
        self._before = 0

    def __call__(self, through: int) -> None:
        if through > self._before:
            self._advance(through - self._before)
            self._before = through


def _run_in_processes(jobs: Sequence[Job], workers: int, progress: Progress) -> list[Outcome]:
    # Spawned and not forked: this process has threads.
    context = multiprocessing.get_context("spawn")
    through = context.Value("q", 0)  # requests, of all jobs
    stop = context.Event()
    with ProcessPoolExecutor(
        min(workers, len(jobs)), mp_context=context, initializer=_begin, initargs=(through, stop)
    ) as pool:
        try:
            futures = [pool.submit(_run_told, job) for job in jobs]
            running = set(futures)
            while running:
                done, running = wait(running, timeout=_LOOK_SECONDS)
                progress.advance(through.value - progress.done)
                for future in done:
                    future.result()  # or its exception, at once
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [Outcome(job, *future.result()) for job, future in zip(jobs, futures, strict=True)]


class _Stopped(Exception):
    """The parent wants no more of it."""


_through: Synchronized[int]  # of this worker
_stop: Event


def _begin(through: Synchronized[int], stop: Event) -> None:
    """In each worker, once. The parent alone is interrupted, and says so."""
    global _through, _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _through, _stop = through, stop


def _run_told(job: Job) -> Played:
    def advance(more: int) -> None:
        if _stop.is_set():
            raise _Stopped
        with _through.get_lock():
            _through.value += more

    return run_job(job, _Since(advance))
