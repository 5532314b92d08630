"""An engine without a model: it plays AsyncEngine's part from a script, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from model_runner.async_engine import EngineState, EngineStats, Restarted, StreamEvent, Submission, Tokens
from model_runner.core.admission import AdmissionController
from model_runner.core.block_layout import BlockGroup, BlockLayout
from model_runner.core.dispatcher import Dispatcher
from model_runner.core.door_view import DoorLevels, QueueRow
from model_runner.core.pace import Pace
from model_runner.core.quotes import Quote
from model_runner.core.weights import WeightsRead
from model_runner.errors import PlimsollError
from model_runner.messages import ModelInfo
from model_runner.types import FinishReason, TokenLogprobs

# What a stream brings: an event; an exception, which is raised; a number, which is a wait in seconds.
Played = StreamEvent | BaseException | float
Script = Callable[[Submission], Iterable[Played]]

FOREVER = math.inf

NOBODY = DoorLevels(
    policy="strict",
    predicted_peak_bytes=0,
    overflow_risk=None,
    margin_deviations=None,
    queue_lengths={},
    byte_seconds={},
)


def model_info(*, max_model_len: int = 512, vocab_size: int = 49152) -> ModelInfo:
    group = BlockGroup("full", tuple(range(30)), kv_heads=3, head_dim=64)
    return ModelInfo(
        architecture="LlamaForCausalLM",
        dtype="float32",
        device="cpu",
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=(0, 2),
        layout=BlockLayout((group,), block_size=16, element_bytes=4),
        num_blocks=64,
        headroom_blocks=0,
        weights=WeightsRead(1),
        weights_held_bytes=2,
        weights_parameters=134_515_008,
        model_type="llama",
        model_context=8192,
    )


def saying(token_ids: Sequence[int], *, finish: FinishReason = FinishReason.LENGTH, batch: int = 1) -> Script:
    """Every choice of every prompt generates these tokens, `batch` to an event, choices in turn."""

    def script(submission: Submission) -> Iterable[Played]:
        wanted = submission.params.logprobs
        scored = submission.params.prompt_logprobs
        for begin in range(0, len(token_ids), batch):
            piece = list(token_ids[begin : begin + batch])
            last = begin + batch >= len(token_ids)
            for prompt_index, prompt in enumerate(submission.prompts):
                for choice in range(submission.params.n):
                    first = begin == 0 and choice == 0 and scored is not None
                    yield Tokens(
                        prompt_index,
                        choice,
                        piece,
                        None if wanted is None else [score(token, wanted) for token in piece],
                        [score(token, scored or 0) for token in prompt[1:]] if first else None,
                        finish if last else None,
                    )

    return script


def score(token_id: int, k: int) -> TokenLogprobs:
    """Made up, but telling: minus a hundredth of the id; the likeliest are the ids after it."""
    top = [token_id + 1 + index for index in range(k)]
    return TokenLogprobs(token_id, -token_id / 100, top, [-index / 10 for index in range(k)])


class FakeStream:
    """RequestStream's part. Iterating plays the script."""

    def __init__(self, submission: Submission, script: Script) -> None:
        self.submission = submission
        self.delivered = False
        self.aborts: list[str] = []
        self.stops: list[tuple[int, int, int]] = []
        self.ended = False
        self.projected_bytes = 123_456
        self.queue_seconds = 0.25
        self._stopped: set[tuple[int, int]] = set()
        self._played = iter(script(submission))

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> StreamEvent:
        for played in self._played:
            if isinstance(played, BaseException):
                self.ended = True
                raise played
            if isinstance(played, int | float):
                await (asyncio.Event().wait() if played == FOREVER else asyncio.sleep(played))
            elif isinstance(played, Restarted) or (played.prompt_index, played.choice) not in self._stopped:
                return played
        self.ended = True
        raise StopAsyncIteration

    def stop(self, prompt_index: int, choice: int, tokens_delivered: int) -> None:
        self.stops.append((prompt_index, choice, tokens_delivered))
        self._stopped.add((prompt_index, choice))

    def abort(self, cause: str) -> None:
        if not self.ended:
            self.ended = True
            self.aborts.append(cause)


@dataclass
class FakeEngine:
    """AsyncEngine's part. Change `script`, `refusal` and `state` at will."""

    model: ModelInfo = field(default_factory=model_info)
    state: EngineState = EngineState.READY
    script: Script = field(default_factory=lambda: saying([28, 198]))
    refusal: PlimsollError | None = None
    streams: list[FakeStream] = field(default_factory=list)
    door: DoorLevels = field(default_factory=lambda: NOBODY)
    rows: list[QueueRow] = field(default_factory=list)

    def submit(self, submission: Submission) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        stream = FakeStream(submission, self.script)
        self.streams.append(stream)
        return stream

    def quote(self, submission: Submission) -> Quote:
        """Of an engine that is idle; or of one that refuses everything."""
        pace = Pace(decode_step_seconds=0.1, prefill_tokens_per_second=1000.0)
        admission = AdmissionController(
            num_blocks=self.model.num_blocks,
            max_num_seqs=256,
            max_queue_requests=10,
            max_queue_seconds=60.0,
            pace=pace,
        )
        admission.open(0.0)
        dispatcher = Dispatcher(self.model.layout, admission, cast(Any, None), lambda message: None)
        quote = dispatcher.quote(submission, 0.0, longest=self.model.max_model_len)
        return quote if self.refusal is None else replace(quote, decision=None, error=self.refusal)

    @property
    def submissions(self) -> list[Submission]:
        return [stream.submission for stream in self.streams]

    def queue(self, *, most: int) -> list[QueueRow]:
        return self.rows[:most]

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            kv_budget_bytes=self.model.kv_budget_bytes,
            reserved_bytes=0,
            used_bytes=0,
            blocks_total=self.model.num_blocks,
            used_blocks=0,
            running=0,
            waiting=len(self.rows),
            queue_length=len(self.rows),
            queued_bytes=0,
            running_sequences=0,
            waiting_sequences=0,
            engine_restarts=0,
        )
