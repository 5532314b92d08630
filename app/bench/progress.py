"""How far a measurement has come, its warm-up included."""

from __future__ import annotations

from app import progress
from app.bench.client import Sample


class Progress(progress.Progress):
    """Of one measurement."""

    def __init__(self, what: str, requests: int, warmup: int) -> None:
        super().__init__(what, requests)
        self._warmup = warmup
        self._warmed = self._errors = 0

    def __enter__(self) -> Progress:
        super().__enter__()
        return self

    def warmed_up(self, _: Sample) -> None:
        self._warmed += 1
        if self._warmed == self._warmup:
            self.bar.reset()  # its rate is of what is measured

    def ended(self, sample: Sample) -> None:
        if sample.error is not None:
            self._errors += 1
            self.bar.set_postfix(errors=self._errors, refresh=False)
        self.advance()

    def come(self) -> str:
        if self._warmed < self._warmup:
            return f"warm-up, {self._warmed} of {self._warmup} requests"
        return super().come() + (f", {self._errors} failed" if self._errors else "")
