"""The API process's books: every live request, where it stands, and the one way out of each.

Pure: it is told what happened and when, sends messages through a callable, and calls its listeners. The
same object serves behind sockets and is driven by the state machine of the tests through every crossing of
messages.

Two lives are kept apart. A *request* lives until its client has its one ending: finished, aborted, timed
out, failed. A *reservation* lives in the ledger until the engine says that its blocks are back, or until
that engine is dead. An abort ends the first at once and leaves the second to the engine's word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from model_runner.core import refusals
from model_runner.core.admission import AdmissionController, Admitted, Rejected
from model_runner.core.block_layout import BlockLayout
from model_runner.core.ledger import Ask
from model_runner.core.live_request import Listener, LiveChoice, LiveRequest, Submission
from model_runner.core.policy import Part
from model_runner.core.quotes import Quote, largest_that_fit, price_by_group
from model_runner.errors import EngineDied, PlimsollError, Reason
from model_runner.messages import Abort, StepDone, Submit, ToEngine
from model_runner.types import ChoiceOutput, Ending, EngineObserver, FinishReason

MAX_DEATHS = 2  # a request that was running at so many engine deaths may be what kills them


class Dispatcher:
    """Every request submitted ends exactly once, and `observer.ended` is called exactly once for it."""

    def __init__(
        self,
        layout: BlockLayout,
        admission: AdmissionController,
        observer: EngineObserver,
        send: Callable[[ToEngine], None],
    ) -> None:
        self.layout = layout
        self.admission = admission
        self.observer = observer
        self.epoch = 0
        self.used_blocks = 0
        self.running_sequences = 0
        self.waiting_sequences = 0  # admitted, and not yet scheduled by the engine
        self._send = send
        self._serial = self._quotes = 0
        self._live: dict[str, LiveRequest] = {}  # by ask_id, in order of arrival
        self._parts: dict[str, tuple[LiveRequest, int]] = {}  # of running requests: (request, prompt index)

    @property
    def live_requests(self) -> list[LiveRequest]:
        return list(self._live.values())

    def live(self, ask_id: str) -> LiveRequest:
        return self._live[ask_id]

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_running(self) -> int:
        return len(self._live) - self.admission.queue_length

    # ---- from the client

    def submit(self, submission: Submission, listener: Listener, now: float) -> LiveRequest:
        """Decide at once. Raises KVCacheBudgetExceeded, QueueFull or WaitTooLong, and remembers nothing."""
        self._serial += 1
        ask = self._price(submission, str(self._serial))
        projected_bytes = ask.blocks * self.layout.block_bytes
        decision = self.admission.decide(ask, now)
        if isinstance(decision, Rejected):
            error = self._refusal(decision, ask, submission)
            self.observer.decided("rejected", error.reason, projected_bytes)
            raise error
        choices = [LiveChoice() for _ in range(ask.sequences)]
        request = LiveRequest(submission, ask, listener, now, projected_bytes, choices, len(choices))
        request.predicted_tokens = self.admission.predict_tokens(ask)
        self._live[ask.ask_id] = request
        if isinstance(decision, Admitted):
            self.observer.decided("admitted", "", projected_bytes)
            self._launch([ask], now)
        else:
            request.predicted_wait_seconds = decision.predicted_wait_seconds
            self.observer.decided("queued", "", projected_bytes)
        return request

    def quote(self, submission: Submission, now: float, *, longest: int) -> Quote:
        """What `submit` would answer, without a trace. A sequence may be `longest` tokens long."""
        # A name of its own: the policy remembers whom it has refused for a while, and must not take this one
        # for another that asked for the same before.
        self._quotes += 1
        ask = self._price(submission, f"quote {self._quotes}")
        decision = self.admission.judge(ask, now)
        error = self._refusal(decision, ask, submission) if isinstance(decision, Rejected) else None
        lengths = [part.prompt_tokens for part in ask.parts]
        limit = max(longest - max(lengths), 0)
        return Quote(
            decision,
            error,
            price_by_group(self.layout, lengths, submission.params.max_tokens, submission.params.n),
            *largest_that_fit(self.layout, self.admission, ask, limit=limit),
        )

    def stop(
        self, request: LiveRequest, prompt_index: int, choice_index: int, tokens: int, now: float
    ) -> None:
        """A stop string has matched in what the client got: this choice is finished, `tokens` long."""
        choice = request.choice(prompt_index, choice_index)
        if request.restart_unseen or (request.ended and request.unsaid is None):
            return
        if choice.finish_reason is None:
            self._send(Abort(request.ask.parts[prompt_index].part_id, choice_index))
            request.unfinished -= 1
        if choice.finish_reason is not FinishReason.STOP:
            self.admission.ended(request.ask.parts[prompt_index], tokens)
        choice.finish_reason = FinishReason.STOP
        choice.generated_tokens = tokens
        if request.ended:  # in its last tokens: its bytes are on their way back, and its Ending will say so
            return
        if request.has_finished(prompt_index):
            self.admission.ending(request.ask.parts[prompt_index].part_id)
        self._end_if_finished(request, now)

    def abort(self, request: LiveRequest, cause: str, now: float, error: PlimsollError | None = None) -> None:
        """End it for the client now; its bytes come back on the engine's word. Idempotent."""
        self.read_to_end(request)
        if not request.ended:
            self._leave(request, FinishReason.ABORT, now, error=error, abort_cause=cause)

    def read_to_end(self, request: LiveRequest) -> None:
        """No stop string can be found in it any more. Comes after every end, sooner or later; idempotent."""
        if (ending := request.unsaid) is not None:
            request.unsaid = None
            tokens = request.generated_tokens
            self.observer.ended(replace(ending, reason=request.how_finished.value, generated_tokens=tokens))

    def delivering(self, request: LiveRequest, now: float) -> None:
        """The client is about to see output. If that output is of an engine that has died since, the request
        can neither go on nor be run again."""
        request.delivered = True
        if request.restart_unseen and not request.ended:
            self._leave(request, FinishReason.ERROR, now, error=_engine_died(request))

    def restart_seen(self, request: LiveRequest) -> None:
        """The listener has dropped what it had: from here on it speaks of the new run."""
        request.restart_unseen = False

    # ---- from the engine

    def step_done(self, step: StepDone, now: float) -> None:
        """Raises KeyError when the engine releases what was never reserved with it: its books are wrong."""
        if step.epoch != self.epoch:
            return
        if step.stats is not None:
            self.admission.pace.observe(step.stats)
            self.used_blocks = step.stats.used_blocks
            self.running_sequences = step.stats.running_sequences
            self.waiting_sequences = step.stats.waiting_sequences
            self.admission.policy.preempted(step.stats.preempted_requests)
            self.observer.stepped(step.stats)
        else:  # an answer to aborts from an engine that has nothing left to run
            self.used_blocks = self.running_sequences = self.waiting_sequences = 0
        prompt_tokens = generated_tokens = 0
        for output in step.outputs:
            prompt, generated = self._output(output, now)
            prompt_tokens += prompt
            generated_tokens += generated
        if prompt_tokens or generated_tokens:
            self.observer.tokens(prompt=prompt_tokens, generated=generated_tokens)
        self.admission.grant(step.grants, now)
        for part_id in step.preempted:
            if (found := self._parts.get(part_id)) is not None:  # None: nobody waits for it any more
                found[0].preemptions += 1
        # The late go before anyone is let in: a request past its deadline must not be prefilled.
        self.expire(now)
        self._tell_released(step.released, now)
        self._launch(self.admission.release(step.released, now), now)

    def engine_ready(self, epoch: int, now: float) -> None:
        self.epoch = epoch
        self.expire(now)
        self._launch(self.admission.open(now), now)

    def engine_died(self, now: float) -> None:
        """What the client has seen part of, and what was running at a death before, fails; the rest of what
        was running goes back to the head of the queue, to be run once more. What was queued is kept."""
        self.epoch = -1  # nobody's: words still in flight are ignored
        self.used_blocks = self.running_sequences = self.waiting_sequences = 0
        self._tell_released(self.admission.ledger.reservations, now)
        self.admission.close()
        self._parts.clear()
        again: list[Ask] = []
        for request in self.live_requests:
            if not request.running:
                continue
            request.running = False
            request.deaths += 1
            if request.delivered or request.deaths >= MAX_DEATHS:
                self._end(request, FinishReason.ERROR, now, error=_engine_died(request))
                continue
            request.forget_output()
            request.restart_unseen = True
            again.append(request.ask)
            request.listener.restarted()
        self.admission.requeue(again, now)

    # ---- from the clock

    def expire(self, now: float) -> None:
        late, let_in = self.admission.expire(now)
        for ask in late:
            request = self._live[ask.ask_id]
            error = refusals.waited_too_long(now - request.arrived_at, self.admission.predict_wait(ask, now))
            self._end(request, FinishReason.TIMEOUT, now, error=error)
        self._launch(let_in, now)

    # ---- within

    def _tell_released(self, part_ids: Iterable[str], now: float) -> None:
        reservations = self.admission.ledger.reservations
        for reservation in [reservations[part_id] for part_id in part_ids]:
            byte_seconds = reservation.block_seconds(now) * self.layout.block_bytes
            self.observer.released(reservation.ask.tenant, byte_seconds)

    def _price(self, submission: Submission, ask_id: str) -> Ask:
        params = submission.params
        parts = tuple(
            Part(
                part_id=f"{ask_id}-{index}",
                blocks=self.layout.request_blocks(len(prompt), params.max_tokens, params.n),
                sequences=params.n,
                prompt_tokens=len(prompt),
                max_tokens=params.max_tokens,
                tenant=submission.tenant,
            )
            for index, prompt in enumerate(submission.prompts)
        )
        timeout = submission.timeout_seconds
        return Ask(
            ask_id,
            parts,
            tenant=submission.tenant,
            priority=submission.priority,
            timeout_seconds=float("inf") if timeout is None else timeout,
        )

    def _refusal(self, rejected: Rejected, ask: Ask, submission: Submission) -> PlimsollError:
        if rejected.reason is Reason.KV_CACHE_BUDGET_EXCEEDED:
            return refusals.never_fits(
                self.layout,
                [part.prompt_tokens for part in ask.parts],
                submission.params.max_tokens,
                submission.params.n,
                budget_blocks=self.admission.shares.most(ask.tenant),
                of_tenant=self.admission.shares.most(ask.tenant) < self.admission.num_blocks,
            )
        return refusals.come_back(rejected, ask, self.admission, self.layout.block_bytes)

    def _launch(self, asks: Iterable[Ask], now: float) -> None:
        for ask in asks:
            request = self._live[ask.ask_id]
            request.running = True
            if request.admitted_at is None:
                request.admitted_at = now
                self.observer.dequeued(now - request.arrived_at)
            for index, part in enumerate(ask.parts):
                self._parts[part.part_id] = (request, index)
                self._send(
                    Submit(
                        request_id=part.part_id,
                        prompt_token_ids=request.submission.prompts[index],
                        params=request.submission.params,
                        priority=ask.priority,
                        reserved_blocks=0 if self.admission.policy.grows else part.blocks,
                    )
                )

    def _output(self, output: ChoiceOutput, now: float) -> tuple[int, int]:
        """Pass it on. Returns (prompt tokens if this is the request's first token, tokens generated)."""
        found = self._parts.get(output.request_id)
        if found is None:
            return 0, 0  # the client has left, and the abort was still on its way
        request, prompt_index = found
        choice = request.choice(prompt_index, output.choice)
        if choice.finish_reason is not None:
            return 0, 0  # a stop string has ended it, and the abort was still on its way
        prompt_tokens, generated_tokens = 0, len(output.token_ids)
        if generated_tokens:
            if request.first_token_at is None:
                request.first_token_at = now
                prompt_tokens = request.prompt_tokens
                self.observer.first_token(now - request.arrived_at)
            if choice.last_token_at is not None:
                self.observer.inter_token((now - choice.last_token_at) / generated_tokens)
            choice.last_token_at = now
            choice.generated_tokens += generated_tokens
            self.admission.progress(output.request_id, choice.generated_tokens, generated_tokens)
        if output.finish_reason is FinishReason.STOP:
            self.admission.ended(request.ask.parts[prompt_index], choice.generated_tokens)
        if output.finish_reason is not None:
            choice.finish_reason = output.finish_reason
            request.unfinished -= 1
        request.listener.output(prompt_index, output)
        self._end_if_finished(request, now)
        return prompt_tokens, generated_tokens

    def _leave(
        self,
        request: LiveRequest,
        reason: FinishReason,
        now: float,
        *,
        error: PlimsollError | None,
        abort_cause: str | None = None,
    ) -> None:
        """End it before it has finished, wherever it stands."""
        self.expire(now)  # nobody who is late may be let in by its going
        if request.ended:
            return
        let_in: list[Ask] = []
        if request.running:
            for part in request.ask.parts:
                self._send(Abort(part.part_id))
        else:
            let_in = self.admission.cancel(request.ask.ask_id, now)
        self._end(request, reason, now, error=error, abort_cause=abort_cause)
        self._launch(let_in, now)

    def _end_if_finished(self, request: LiveRequest, now: float) -> None:
        if not request.unfinished:
            self._end(request, request.how_finished, now)

    def _end(
        self,
        request: LiveRequest,
        reason: FinishReason,
        now: float,
        *,
        error: PlimsollError | None = None,
        abort_cause: str | None = None,
    ) -> None:
        """The only way out."""
        assert not request.ended
        request.ended = True
        request.running = False
        del self._live[request.ask.ask_id]
        for part in request.ask.parts:
            self._parts.pop(part.part_id, None)
            self.admission.ending(part.part_id)
        admitted_at = request.admitted_at
        ending = Ending(
            request_id=request.submission.request_id,
            tenant=request.ask.tenant,
            reason=reason.value,
            code=None if error is None else error.reason.value,
            abort_cause=abort_cause,
            prompt_tokens=request.prompt_tokens,
            generated_tokens=request.generated_tokens,
            choices=len(request.choices),
            reserved_bytes=0 if admitted_at is None else request.projected_bytes,
            preemptions=request.preemptions,
            predicted_tokens=request.predicted_tokens,
            predicted_wait_seconds=request.predicted_wait_seconds,
            queue_seconds=(now if admitted_at is None else admitted_at) - request.arrived_at,
            run_seconds=0.0 if admitted_at is None else now - admitted_at,
            e2e_seconds=now - request.arrived_at,
        )
        if error is None and abort_cause is None and request.submission.stop_strings:
            request.unsaid = ending
        else:
            self.observer.ended(ending)
        request.listener.ended(error)


def _engine_died(request: LiveRequest) -> EngineDied:
    sent, again = "after a part of its output had been sent", "for the second time, so it is not tried again"
    return EngineDied(f"The engine died while it ran this request, {sent if request.delivered else again}.")
