"""What a replay plays: requests as they arrived, and what became of each."""

from __future__ import annotations

from dataclasses import dataclass

from model_runner.core.tenants import DEFAULT_TENANT
from model_runner.errors import PlimsollError


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace. Seconds from the trace's beginning, and tokens."""

    arrives_at: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = DEFAULT_TENANT
    # Of the prompt's pieces, each for itself and all before it: equal ones begin equally.
    prefix_ids: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Record:
    """What became of one request. Times are seconds on the replay's clock."""

    row: Row
    replica: int = 0
    refused: bool = False
    predicted_wait_seconds: float | None = None  # None: it did not have to wait
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    longest_gap_seconds: float = 0.0
    tokens: int = 0
    preemptions: int = 0
    ended_at: float | None = None
    error: PlimsollError | None = None

    @property
    def completed(self) -> bool:
        return self.ended_at is not None and self.error is None

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.row.arrives_at
