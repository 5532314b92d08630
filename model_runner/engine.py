"""The engine's loop body: admitted requests in, tokens and released reservations out, one step at a time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from model_runner.core.block_layout import BlockLayout
from model_runner.core.growth import WhenShort
from model_runner.core.output import Runner, SchedulerOutput
from model_runner.core.pace import Pace
from model_runner.core.scheduler import Scheduler
from model_runner.messages import StepDone, Submit
from model_runner.types import ChoiceOutput, StepStats


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. `released` are requests that ended and hold nothing any more, each reported once."""

    outputs: list[ChoiceOutput]
    released: list[str]
    grants: list[tuple[str, int]]  # (request id, blocks), where they have changed; empty in strict mode
    prefill_tokens: int
    decode_tokens: int
    running_sequences: int
    waiting_sequences: int
    used_blocks: int
    batch_sequences: int
    held_sequences: int
    preempted: list[str]  # requests, in this step
    recomputed_tokens: int  # that it will cost
    context_tokens: int  # as SchedulerOutput's

    def stats(self, step_seconds: float) -> StepStats:
        """The account of the step for StepDone, once the caller has measured how long it took."""
        return StepStats(
            step_seconds=step_seconds,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            running_sequences=self.running_sequences,
            waiting_sequences=self.waiting_sequences,
            used_blocks=self.used_blocks,
            batch_sequences=self.batch_sequences,
            held_sequences=self.held_sequences,
            preempted_requests=len(self.preempted),
            recomputed_tokens=self.recomputed_tokens,
            context_tokens=self.context_tokens,
        )

    def message(self, epoch: int, stats: StepStats) -> StepDone:
        """What the API process is told of it."""
        return StepDone(epoch, self.outputs, self.released, stats, self.grants, self.preempted)


class EngineCore:
    """Runs admitted requests. Not thread-safe: submit and abort belong between steps.

    Every mistake of the caller (a duplicate id, a reservation below the price, more reserved than
    `num_blocks`) is an AssertionError: the books of the two processes no longer agree, and carrying on would
    corrupt the cache.
    """

    def __init__(
        self,
        layout: BlockLayout,
        runner: Runner,
        *,
        num_blocks: int,
        headroom_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_token_ids: Collection[int],
        max_model_len: int,
        grows: bool = False,
        when_short: WhenShort = "hold early",
    ) -> None:
        self.runner = runner
        self._aim: tuple[float, Pace] | None = None
        self.scheduler = Scheduler(
            layout,
            num_blocks=num_blocks,
            headroom_blocks=headroom_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            eos_token_ids=eos_token_ids,
            max_model_len=max_model_len,
            grows=grows,
            when_short=when_short,
        )

    @property
    def has_work(self) -> bool:
        """Whether step() would run anything."""
        return self.scheduler.has_work

    def submit(self, submit: Submit) -> None:
        """Take one admitted prompt, with its n choices. It waits until a step has room for it."""
        self.scheduler.submit(
            submit.request_id,
            submit.prompt_token_ids,
            submit.params,
            submit.reserved_blocks,
            submit.priority,
        )

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its choices, now. No output tells of it: when the whole request has ended,
        its id is in `released`. Unknown and finished ids are ignored: an abort may cross the finish."""
        self.scheduler.abort(request_id, choice)

    def step(self) -> StepResult | None:
        """Run one batch. None when there is nothing to run; drain() then tells what aborts released."""
        if not self.has_work:
            return None
        recomputed_before = self.scheduler.recomputed_tokens
        scheduled = self.scheduler.schedule()
        produced = self.runner.execute(scheduled)
        outputs = self.scheduler.update_from_output(scheduled, produced)
        return self._result(scheduled, outputs, recomputed_before)

    def aim_at(self, target_itl_seconds: float, pace: Pace) -> None:
        """Keep steps that decode under so many seconds, as far as shorter prompt chunks can. `pace` is what
        was measured so far, and learns from `observe`."""
        self._aim = target_itl_seconds, pace
        self._limit_prefills()

    def observe(self, stats: StepStats) -> None:
        """How long the last step took."""
        if self._aim is not None:
            self._aim[1].observe(stats)
            self._limit_prefills()

    def _limit_prefills(self) -> None:
        assert self._aim is not None
        target, pace = self._aim
        spare = max(target - pace.decode_step_seconds, 0.0)
        self.scheduler.prefill_limit = int(spare * pace.prefill_tokens_per_second)

    def drain(self) -> list[str]:
        """Releases not reported yet; each id is returned once, here or in a StepResult."""
        return self.scheduler.take_released()

    def check_idle(self) -> None:
        """Raises AssertionError when there is no work and yet something is reserved or held."""
        self.scheduler.check_idle()

    def _result(
        self, scheduled: SchedulerOutput, outputs: list[ChoiceOutput], recomputed_before: int
    ) -> StepResult:
        on_hold = self.scheduler.growth.on_hold
        return StepResult(
            outputs=outputs,
            released=self.scheduler.take_released(),
            grants=self.scheduler.take_grants(),
            prefill_tokens=scheduled.prefill_tokens,
            decode_tokens=scheduled.decode_tokens,
            running_sequences=self.scheduler.running_sequences,
            waiting_sequences=self.scheduler.waiting_sequences,
            used_blocks=self.scheduler.pool.used,
            batch_sequences=len(scheduled.sequences),
            held_sequences=sum(request.live_choices for request in on_hold),
            preempted=self.scheduler.take_preempted(),
            recomputed_tokens=self.scheduler.recomputed_tokens - recomputed_before,
            context_tokens=scheduled.context_tokens,
        )
