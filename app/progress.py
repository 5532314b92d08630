"""How far something long has come: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from tqdm import tqdm

_LINE_SECONDS = 5.0


class Progress:
    """To standard error: reports have standard output. What is counted is told to `advance`."""

    def __init__(self, what: str, total: int, unit: str = "request") -> None:
        self.bar = tqdm(total=total, desc=what, unit=unit, disable=None)
        self.done = 0
        self._what = what
        self._total = total
        self._unit = unit
        self._began = time.monotonic()
        self._left = threading.Event()
        self._telling: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if not sys.stderr.isatty():
            self._telling = threading.Thread(target=self._tell, name="progress", daemon=True)
            self._telling.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()
        self._left.set()
        if self._telling is not None:
            self._telling.join()

    def advance(self, more: int = 1) -> None:
        self.done += more
        self.bar.update(more)

    def come(self) -> str:
        """How far, in words."""
        return f"{self.done} of {self._total} {self._unit}s"

    def line(self, seconds: float) -> str:
        return f"{self._what}: {self.come()}, {seconds:.0f} s"

    def _tell(self) -> None:
        while not self._left.wait(_LINE_SECONDS):
            print(self.line(time.monotonic() - self._began), file=sys.stderr, flush=True)
