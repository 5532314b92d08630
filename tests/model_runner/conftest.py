"""An async engine over a real engine process that counts instead of running a model."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from model_runner.async_engine import AsyncEngine, RequestStream, Restarted, Submission
from model_runner.config import EngineConfig
from model_runner.door import DoorPolicy
from model_runner.types import Ending, SamplingParams, StepStats

FAKE_ENGINE = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]
BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 4  # keys and values · layers · heads · head_dim · block_size · float32


class RecordingObserver:
    def __init__(self) -> None:
        self.decisions: list[tuple[str, str, int]] = []
        self.endings: list[Ending] = []
        self.queue_times: list[float] = []
        self.first_tokens: list[float] = []
        self.inter_tokens: list[float] = []
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.steps: list[StepStats] = []
        self.byte_seconds = 0.0
        self.restarts = 0

    def decided(self, decision: str, reason: str, projected_bytes: int) -> None:
        self.decisions.append((decision, reason, projected_bytes))

    def dequeued(self, queue_time_seconds: float) -> None:
        self.queue_times.append(queue_time_seconds)

    def first_token(self, seconds: float) -> None:
        self.first_tokens.append(seconds)

    def inter_token(self, seconds: float) -> None:
        self.inter_tokens.append(seconds)

    def tokens(self, *, prompt: int, generated: int) -> None:
        self.prompt_tokens += prompt
        self.generated_tokens += generated

    def stepped(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def ended(self, ending: Ending) -> None:
        self.endings.append(ending)

    def released(self, tenant: str, kv_byte_seconds: float) -> None:
        self.byte_seconds += kv_byte_seconds

    def engine_restarted(self) -> None:
        self.restarts += 1


class Harness:
    """One engine with what it told, and short words for what the tests do with it."""

    def __init__(self, engine: AsyncEngine, observer: RecordingObserver) -> None:
        self.engine = engine
        self.observer = observer
        self._ids = itertools.count()

    def submit(
        self, *prompts: list[int], max_tokens: int = 8, n: int = 1, request_id: str | None = None
    ) -> RequestStream:
        params = SamplingParams(max_tokens=max_tokens, n=n)
        return self.engine.submit(
            Submission(
                request_id=request_id or f"r{next(self._ids)}",
                prompts=list(prompts) or [[1, 2, 3]],
                params=params,
                streaming=False,
            )
        )

    @staticmethod
    async def collect(stream: RequestStream) -> dict[tuple[int, int], list[int]]:
        collected: dict[tuple[int, int], list[int]] = {}
        async for event in stream:
            if isinstance(event, Restarted):
                collected.clear()
            else:
                collected.setdefault((event.prompt_index, event.choice), []).extend(event.token_ids)
        return collected


StartEngine = Callable[..., AbstractAsyncContextManager[Harness]]


@pytest.fixture
def start_engine() -> StartEngine:
    @asynccontextmanager
    async def start(
        knobs: dict[str, Any] | None = None,
        policy: DoorPolicy | None = None,
        *,
        blocks: int = 64,
        max_num_seqs: int = 16,
    ) -> AsyncIterator[Harness]:
        config = EngineConfig(
            model=json.dumps(knobs or {}),
            cache_dir="",
            kv_cache_memory_bytes=blocks * BLOCK_BYTES,
            max_num_seqs=max_num_seqs,
        )
        observer = RecordingObserver()
        engine = AsyncEngine(
            config, policy or DoorPolicy(first_back_off_seconds=0.05), observer, command=FAKE_ENGINE
        )
        try:
            await engine.start(lambda loading: None)
            await engine.wait_ready()
            yield Harness(engine, observer)
        finally:
            await engine.close()

    return start
