"""What the HTTP side holds of a request it has submitted: an async iterator over what happens to it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from model_runner.core.dispatcher import Dispatcher
from model_runner.core.live_request import LiveRequest
from model_runner.errors import LoadError, PlimsollError
from model_runner.types import ChoiceOutput, FinishReason, TokenLogprobs


@dataclass(slots=True)
class Tokens:
    """New tokens of one choice; several steps' worth when the reader was slower than the engine."""

    prompt_index: int
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Restarted:
    """The engine died before anything was delivered, and the request runs again: drop all collected state."""


StreamEvent: TypeAlias = Tokens | Restarted


def jittered(error: PlimsollError) -> PlimsollError:
    """Up to a tenth more before a retry, so that a crowd turned away together doesn't come back together."""
    if isinstance(error, LoadError):
        error.retry_after_seconds *= 1 + random.random() / 10
    return error


class RequestStream:
    """Ends after every choice of every prompt has ended. One reader.

    Iterating raises QueueTimeout, EngineDied, or Draining when the server shuts down under it. Cancelling
    the task that waits on it aborts the request, for a cancelled reader is a client that has left.
    """

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float]) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._request: LiveRequest | None = None
        # At most one event for each choice, and before them perhaps one Restarted.
        self._restarted = False
        self._pending: dict[tuple[int, int], Tokens] = {}
        self._ended = False
        self._error: PlimsollError | None = None
        self._wakeup: asyncio.Future[None] | None = None

    def attach(self, request: LiveRequest) -> None:
        """Called once, by the async engine, as soon as the door has let the request in or queued it."""
        self._request = request

    @property
    def request(self) -> LiveRequest:
        assert self._request is not None
        return self._request

    @property
    def projected_bytes(self) -> int:
        """What the request is priced at: its reservation once it is admitted."""
        return self.request.projected_bytes

    @property
    def queue_seconds(self) -> float:
        """How long it waited for its reservation, or has waited until now."""
        admitted_at = self.request.admitted_at
        return (self._clock() if admitted_at is None else admitted_at) - self.request.arrived_at

    @property
    def delivered(self) -> bool:
        """Set to True before the client is sent anything: what it has seen can't be run again."""
        return self.request.delivered

    @delivered.setter
    def delivered(self, value: bool) -> None:
        if not value or self.request.delivered:
            return
        self._dispatcher.delivering(self.request, self._clock())

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamEvent:
        while True:
            if self._restarted:
                self._restarted = False
                self._dispatcher.restart_seen(self.request)
                return Restarted()
            if self._pending:
                return self._pending.pop(next(iter(self._pending)))
            if self._error is not None:
                raise self._error
            if self._ended:
                self._dispatcher.read_to_end(self.request)
                raise StopAsyncIteration
            self._wakeup = asyncio.get_running_loop().create_future()
            try:
                await self._wakeup
            except asyncio.CancelledError:
                self.abort("client_disconnected")
                raise
            finally:
                self._wakeup = None

    def stop(self, prompt_index: int, choice: int, tokens_delivered: int) -> None:
        """A stop string matched: the choice ends here for the client, whatever the engine has made since."""
        if not self._restarted:
            self._pending.pop((prompt_index, choice), None)
        self._dispatcher.stop(self.request, prompt_index, choice, tokens_delivered, self._clock())

    def abort(self, cause: str) -> None:
        """The client has left. Idempotent; after the end it does nothing."""
        self._dispatcher.abort(self.request, cause, self._clock())

    # ---- the dispatcher's side

    def output(self, prompt_index: int, output: ChoiceOutput) -> None:
        key = (prompt_index, output.choice)
        pending = self._pending.get(key)
        if pending is None:
            self._pending[key] = Tokens(
                prompt_index,
                output.choice,
                list(output.token_ids),
                None if output.logprobs is None else list(output.logprobs),
                output.prompt_logprobs,
                output.finish_reason,
            )
        else:
            pending.token_ids += output.token_ids
            if output.logprobs is not None:
                pending.logprobs = [*(pending.logprobs or ()), *output.logprobs]
            if output.prompt_logprobs is not None:
                pending.prompt_logprobs = output.prompt_logprobs
            pending.finish_reason = output.finish_reason
        self._wake()

    def restarted(self) -> None:
        self._pending.clear()
        self._restarted = True
        self._wake()

    def ended(self, error: PlimsollError | None) -> None:
        if error is not None and self._restarted:
            self._restarted = False  # it has come to nothing
            self._pending.clear()
        self._ended = True
        self._error = None if error is None else jittered(error)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
