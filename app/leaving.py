"""From a signal to the end of the process. The first asks it to drain, the second to end what runs and leave
within a second, the third ends it where it stands.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable
from typing import NoReturn, TypeVar

from app import logs

# One signal may come twice: `timeout` and terminals send it to the process and to its group.
_SAME_SIGNAL_SECONDS = 0.5
_HURRY_SECONDS = 1.0  # for last words to readers that read

T = TypeVar("T")


class Leaving:
    """Made in the event loop that serves. Takes SIGTERM, SIGINT and SIGHUP (a terminal that closes; under
    nohup that stays ignored)."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self.exit_code = 0
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(each) is signal.SIG_IGN and each is signal.SIGHUP:
                continue
            self._loop.add_signal_handler(each, self._on_signal, each)

    def _on_signal(self, received: signal.Signals) -> None:
        now = self._loop.time()
        if self.asked.is_set() and now - self._last < _SAME_SIGNAL_SECONDS:
            return
        self._last = now
        if not self.asked.is_set():
            self.asked.set()
        elif not self.hurried.is_set():
            logs.event(f"second signal ({received.name}): ending what runs")
            self.exit_code = 128 + received
            self.hurried.set()
            why = "leaving, though not all is told"
            self._loop.call_later(_HURRY_SECONDS, leave_now, why, self.exit_code)
        else:
            leave_now(f"third signal ({received.name}): leaving at once", 128 + received)


def leave_now(why: str, code: int) -> NoReturn:
    """Without waiting for anything, not even for threads: a download can't be interrupted otherwise. The
    engine goes with its parent."""
    logs.event(why)
    logging.shutdown()
    os._exit(code)


async def unless(event: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None when the event comes first; `work` is cancelled then."""
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for each in (working, waiting):
            each.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
