"""How far a measurement has come: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from types import TracebackType

from tqdm import tqdm

from app.bench.client import Sample

_LINE_SECONDS = 5.0


class Progress:
    """Of one measurement, its warm-up included. To standard error: the report has standard output."""

    def __init__(self, what: str, requests: int, warmup: int) -> None:
        self._what = what
        self._requests = requests
        self._warmup = warmup
        self._warmed = self._ended = self._errors = 0
        self._began = time.monotonic()
        self._bar = tqdm(total=requests, desc=what, unit="request", disable=None)
        self._telling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Progress:
        if not sys.stderr.isatty():
            self._telling = asyncio.create_task(self._tell())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._telling is not None:
            self._telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._telling

    def warmed_up(self, _: Sample) -> None:
        self._warmed += 1
        if self._warmed == self._warmup:
            self._bar.reset()  # its rate is of what is measured

    def ended(self, sample: Sample) -> None:
        if sample.error is not None:
            self._errors += 1
            self._bar.set_postfix(errors=self._errors, refresh=False)
        self._ended += 1
        self._bar.update()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_LINE_SECONDS)
            print(self._line(time.monotonic() - self._began), file=sys.stderr, flush=True)

    def _line(self, seconds: float) -> str:
        if self._warmed < self._warmup:
            come = f"warm-up, {self._warmed} of {self._warmup} requests"
        else:
            come = f"{self._ended} of {self._requests} requests"
        failed = f", {self._errors} failed" if self._errors else ""
        return f"{self._what}: {come}{failed}, {seconds:.0f} s"
