"""The engine as the HTTP side sees it: submit, iterate, abort. Clock and sockets around the dispatcher."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from model_runner.config import EngineConfig
from model_runner.core.dispatcher import Dispatcher
from model_runner.core.door_view import DoorLevels, QueueRow, door_levels, queue_rows
from model_runner.core.live_request import Submission
from model_runner.core.pace import Pace
from model_runner.core.quotes import Quote
from model_runner.core.refusals import price_blocks
from model_runner.door import DoorPolicy, make_door
from model_runner.errors import (
    Draining,
    EngineRestarting,
    InvalidRequest,
    PlimsollError,
    ServerFault,
    Starting,
    StartupError,
)
from model_runner.messages import FromEngine, Loading, ModelInfo, Planned, Ready, StartFailed, ToEngine
from model_runner.request_stream import RequestStream, Restarted, StreamEvent, Tokens, jittered
from model_runner.supervisor import BackOff, EngineMisbehaved, Supervisor
from model_runner.types import EngineObserver

__all__ = [
    "AsyncEngine",
    "EngineState",
    "EngineStats",
    "RequestStream",
    "Restarted",
    "StreamEvent",
    "Submission",
    "Tokens",
]

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.05  # how late a deadline in the queue may be noticed
_STARTUP_GUESS_SECONDS = 10.0  # until a first start has been measured


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STUCK = "stuck"  # it has work, and has been silent for half the time after which it counts as dead
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot, cheap to take."""

    kv_budget_bytes: int
    reserved_bytes: int
    used_bytes: int  # blocks really held
    blocks_total: int  # that requests may reserve, and the headroom
    used_blocks: int
    running: int  # requests, admitted and not ended
    waiting: int  # requests in the queue
    queue_length: int
    queued_bytes: int
    running_sequences: int
    waiting_sequences: int  # admitted, and not yet scheduled
    engine_restarts: int

    @property
    def free_bytes(self) -> int:
        return self.kv_budget_bytes - self.reserved_bytes


class AsyncEngine:
    """One engine process, kept alive, and the door before it. All methods belong to one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        policy: DoorPolicy,
        observer: EngineObserver,
        *,
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._policy = policy
        self._observer = observer
        self._clock = clock
        self._supervisor = Supervisor(
            self,
            config,
            command or [sys.executable, "-m", "model_runner.build"],
            step_timeout_seconds=policy.engine_step_timeout,
            start_timeout_seconds=policy.engine_start_timeout,
            back_off=BackOff(policy.first_back_off_seconds, policy.most_back_off_seconds),
            clock=clock,
        )
        self._on_progress: Callable[[Loading], None] = lambda loading: None
        self._model: ModelInfo | None = None
        self._dispatcher: Dispatcher | None = None
        self._planned = asyncio.Event()
        self._ready = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._draining = False
        self._stopped = False
        self._failure: PlimsollError | None = None

    # ---- its life

    async def start(self, on_progress: Callable[[Loading], None]) -> ModelInfo:
        """Start the engine process. Returns as soon as prices and budget are known; raises StartupError."""
        self._on_progress = on_progress
        self._running = asyncio.create_task(self._supervise())
        self._ticking = asyncio.create_task(self._tick())
        await self._reached(self._planned)
        return self.model

    async def wait_ready(self) -> None:
        """Returns when the first engine has begun to serve; raises StartupError."""
        await self._reached(self._ready)

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109 - running out of it is no error
        """Take nothing new; let what runs and waits finish within `timeout` seconds; end the rest."""
        self._draining = True
        deadline = self._clock() + timeout
        while self._busy and self._clock() < deadline:  # noqa: ASYNC110 - the books know of no event loop
            await asyncio.sleep(0.02)
        self._end_all("shutdown", _shut_down)

    async def close(self) -> None:
        """End what is left, then the engine process. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._end_all("shutdown", _shut_down)
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
        if self._running is not None:
            await self._supervisor.close(self._running)

    # ---- what it tells

    @property
    def state(self) -> EngineState:
        if self._stopped:
            return EngineState.STOPPED
        if self._failure is not None:
            return EngineState.FAILED
        if self._draining:
            return EngineState.DRAINING
        if not self._ready.is_set():
            return EngineState.STARTING
        if not self._supervisor.up:
            return EngineState.RESTARTING
        if self._supervisor.silent_seconds > self._policy.engine_step_timeout / 2:
            return EngineState.STUCK
        return EngineState.READY

    @property
    def model(self) -> ModelInfo:
        """Known from the return of `start` on."""
        assert self._model is not None, "the engine has not been started"
        return self._model

    @property
    def engine_pid(self) -> int | None:
        return self._supervisor.pid

    @property
    def stats(self) -> EngineStats:
        """Known from the return of `start` on."""
        dispatcher, model = self._dispatcher, self.model
        assert dispatcher is not None
        admission, block_bytes = dispatcher.admission, model.layout.block_bytes
        return EngineStats(
            kv_budget_bytes=model.kv_budget_bytes,
            reserved_bytes=admission.reserved_blocks * block_bytes,
            used_bytes=dispatcher.used_blocks * block_bytes,
            blocks_total=model.num_blocks + model.headroom_blocks,
            used_blocks=dispatcher.used_blocks,
            running=dispatcher.num_running,
            waiting=admission.queue_length,
            queue_length=admission.queue_length,
            queued_bytes=admission.queued_blocks * block_bytes,
            running_sequences=dispatcher.running_sequences,
            waiting_sequences=dispatcher.waiting_sequences,
            engine_restarts=self._supervisor.restarts,
        )

    @property
    def door(self) -> DoorLevels:
        """Known from the return of `start` on."""
        assert self._dispatcher is not None
        return door_levels(self._dispatcher, self._clock())

    def queue(self, *, most: int) -> list[QueueRow]:
        """The first `most` of those that wait, in turn."""
        assert self._dispatcher is not None
        rows = queue_rows(self._dispatcher, self._clock(), most=most)
        if self.state is not EngineState.RESTARTING:
            return rows
        until_up = self._supervisor.seconds_until_up(_STARTUP_GUESS_SECONDS)
        return [replace(row, expected_in_seconds=row.expected_in_seconds + until_up) for row in rows]

    # ---- requests

    def submit(self, submission: Submission) -> RequestStream:
        """Decided before anything is awaited. Raises ClientError or LoadError; then nothing was reserved."""
        refusal = self._refusal(submission)
        if refusal is not None:
            self._observer.decided("rejected", refusal.reason, self._projected_bytes(submission))
            raise jittered(refusal)
        assert self._dispatcher is not None
        stream = RequestStream(self._dispatcher, self._clock)
        try:
            stream.attach(self._dispatcher.submit(submission, stream, self._clock()))
        except PlimsollError as error:
            raise jittered(error) from None
        return stream

    def quote(self, submission: Submission) -> Quote:
        """What `submit` would answer now. Nothing is reserved, queued or counted; waits have no jitter."""
        refusal = self._refusal(submission)
        assert self._dispatcher is not None
        if isinstance(refusal, InvalidRequest):
            raise refusal
        quote = self._dispatcher.quote(submission, self._clock(), longest=self.model.max_model_len)
        if refusal is None:
            return quote
        return replace(quote, decision=None, error=refusal, largest_max_tokens_now=0)

    def _refusal(self, submission: Submission) -> PlimsollError | None:
        """Why nothing of the kind, or nothing at all, is taken now."""
        state, supervisor = self.state, self._supervisor
        until_up = supervisor.seconds_until_up(_STARTUP_GUESS_SECONDS)
        if state in (EngineState.DRAINING, EngineState.STOPPED):
            return Draining("The server is shutting down.", retry_after_seconds=1.0)
        if state is EngineState.STARTING:
            return Starting("The model is still loading.", retry_after_seconds=until_up)
        if state is EngineState.FAILED:
            return EngineRestarting(
                "The engine has failed; this server must be restarted.", retry_after_seconds=30.0
            )
        if state is EngineState.RESTARTING:
            return EngineRestarting("The engine is being restarted.", retry_after_seconds=until_up)
        n = submission.params.n
        if n > self._max_num_seqs:
            return InvalidRequest(
                f"n is {n}, and this server runs at most {self._max_num_seqs} sequences at once.", param="n"
            )
        if not submission.prompts or not all(submission.prompts):
            return InvalidRequest("The prompt is empty.", param="prompt")
        return None

    def _projected_bytes(self, submission: Submission) -> int:
        if self._model is None or not all(submission.prompts):
            return 0
        params, layout = submission.params, self._model.layout
        lengths = [len(prompt) for prompt in submission.prompts]
        return price_blocks(layout, lengths, params.max_tokens, params.n) * layout.block_bytes

    # ---- the supervisor's side

    @property
    def engine_has_work(self) -> bool:
        return self._dispatcher is not None and self._dispatcher.admission.reserved_sequences > 0

    def received(self, message: FromEngine) -> None:
        if isinstance(message, Loading):
            if not self._ready.is_set():
                self._on_progress(message)
        elif isinstance(message, Planned):
            self._plan(message.model)
        elif isinstance(message, Ready):
            self._plan(message.model)
            self._serve(message)
        elif not isinstance(message, StartFailed):
            assert self._dispatcher is not None
            try:
                self._dispatcher.step_done(message, self._clock())
            except KeyError as error:
                raise EngineMisbehaved(f"it released {error}, which it did not hold") from error

    def engine_died(self) -> None:
        if self._dispatcher is not None:  # None: it hung before it had planned
            self._dispatcher.engine_died(self._clock())
        self._observer.engine_restarted()

    def _plan(self, model: ModelInfo) -> None:
        if self._model is None:
            self._model = model
            admission = make_door(model, self._policy, max_num_seqs=self._max_num_seqs)
            self._dispatcher = Dispatcher(model.layout, admission, self._observer, self._send)
            # What was decided once stays: what waits in the queue was priced by it.
            self._supervisor.config = msgspec.structs.replace(
                self._supervisor.config,
                kv_cache_memory_bytes=(model.num_blocks + model.headroom_blocks) * model.layout.block_bytes,
                max_model_len=model.max_model_len,
                max_model_len_auto=False,
            )
            self._planned.set()
        elif (model.layout, model.num_blocks) != (self._model.layout, self._model.num_blocks):
            raise EngineMisbehaved("it came with another price list or budget than the one before it")
        else:
            self._model = model  # what was foreseen of it has been measured

    def _serve(self, ready: Ready) -> None:
        assert self._dispatcher is not None
        self._dispatcher.admission.pace = Pace(ready.decode_step_seconds, ready.prefill_tokens_per_second)
        self._dispatcher.engine_ready(ready.epoch, self._clock())
        self._ready.set()
        logger.info("engine ready: %s", ready.execution)

    def _send(self, message: ToEngine) -> None:
        self._supervisor.send(message)

    # ---- within

    @property
    def _busy(self) -> bool:
        return self._dispatcher is not None and self._dispatcher.num_live > 0

    async def _supervise(self) -> None:
        try:
            await self._supervisor.run()
        except StartupError as error:
            self._failure = error
        except Exception:
            # A mistake of ours, not the engine's. Nobody may be left waiting for an answer that can't come.
            logger.exception("the engine's supervisor failed")
            self._failure = ServerFault("The engine's supervisor failed.")
            self._end_all("server_fault", lambda: ServerFault("The engine's supervisor failed."))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            if self._dispatcher is not None:
                self._dispatcher.expire(self._clock())

    async def _reached(self, milestone: asyncio.Event) -> None:
        assert self._running is not None, "start() comes first"
        reached = asyncio.create_task(milestone.wait())
        try:
            await asyncio.wait({reached, self._running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reached.cancel()
        if not milestone.is_set():
            raise self._failure or StartupError("The engine was stopped before it was ready.")

    def _end_all(self, cause: str, make_error: Callable[[], PlimsollError]) -> None:
        """Each gets an error of its own: it is jittered, and raised, once for each."""
        if self._dispatcher is not None:
            for request in self._dispatcher.live_requests:
                self._dispatcher.abort(request, cause, self._clock(), make_error())


def _shut_down() -> Draining:
    return Draining("The server has shut down.", retry_after_seconds=1.0)
