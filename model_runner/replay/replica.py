"""One server in simulated time: the dispatcher, the door, the queue and the engine that serve.

Nothing here decides anything: arrivals, steps and deadlines are handed to the same objects that stand behind
the sockets, and what becomes of every request is written down.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from model_runner.core.admission import MAX_PASSES, AdmissionController
from model_runner.core.block_layout import BlockGroup, BlockLayout
from model_runner.core.dispatcher import Dispatcher
from model_runner.core.growth import WhenShort
from model_runner.core.lengths import Lengths
from model_runner.core.live_request import LiveRequest, Submission
from model_runner.core.pace import Pace
from model_runner.core.policy import Policy, Predictive, Strict
from model_runner.engine import EngineCore, StepResult
from model_runner.errors import PlimsollError
from model_runner.messages import Abort, Submit, ToEngine
from model_runner.replay.rivals import Greedy, Oracle
from model_runner.replay.step_model import SimulatedRunner, StepModel
from model_runner.replay.trace import Record
from model_runner.types import ChoiceOutput, Ending, SamplingParams, StepStats

NEVER = float("inf")
_NO_BOUND = 10**9
_EPOCH = 1
_TOLD_EVERY = 64  # steps
_CONTEXT_OF_ONE = 1024  # tokens, of a sequence, before anything is known of it
_MOST_LEVELS = 4000  # kept of the cache's course; past that, every other one goes
_WHEN_SHORT: dict[str, WhenShort] = {"greedy": "preempt", "oracle": "hold"}
POLICIES = ("strict", "predictive", "greedy", "oracle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all policies of a replay have in common. Times are seconds."""

    step_model: StepModel
    kv_budget_tokens: int  # of each replica
    max_tokens: int | None  # of every request; None: as much as the context leaves
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 1024
    block_size: int = 16
    max_queue_seconds: float = NEVER
    max_queue_requests: int = _NO_BOUND
    target_itl_seconds: float | None = None  # prompts are cut so that a step stays under it
    overflow_risk: float

    @property
    def num_blocks(self) -> int:
        return self.kv_budget_tokens // self.block_size


@dataclass(frozen=True, slots=True)
class Level:
    """Of the cache at one moment, in blocks: held, granted or reserved, and foreseen at the peak."""

    seconds: float
    used: int
    reserved: int
    predicted_peak: float


@dataclass(slots=True)
class Tally:
    """What one replica's engine did."""

    steps: int = 0
    held_sequence_steps: int = 0
    recomputed_tokens: int = 0
    used_block_seconds: float = 0.0
    gaps: array[float] = field(default_factory=lambda: array("d"))  # seconds between two tokens of one answer
    levels: list[Level] = field(default_factory=list)


class Replica:
    """Between calls it stands at a moment `now`, perhaps in the middle of a step."""

    def __init__(self, setting: Setting, policy: str) -> None:
        self.setting = setting
        self.now = 0.0
        self.tally = Tally()
        self._layout = BlockLayout((BlockGroup("full", (0,), 1, 1),), setting.block_size, 1)
        self._runner = SimulatedRunner(setting.step_model)
        self._answers: list[int] = []  # the true lengths, in the order of submission
        lengths = Lengths(setting.max_model_len)
        self.policy = self._make_policy(policy, lengths)
        bounded = policy not in ("greedy", "oracle")
        step = setting.step_model
        admission = AdmissionController(
            num_blocks=setting.num_blocks,
            max_num_seqs=setting.max_num_seqs,
            max_queue_requests=setting.max_queue_requests if bounded else _NO_BOUND,
            max_queue_seconds=setting.max_queue_seconds if bounded else NEVER,
            pace=_pace(step),
            policy=self.policy,
            lengths=lengths,
            max_passes=MAX_PASSES if bounded else 0,
        )
        self._engine = EngineCore(
            self._layout,
            self._runner,
            num_blocks=setting.num_blocks,
            headroom_blocks=0,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            eos_token_ids=(SimulatedRunner.end_token_id,),
            max_model_len=setting.max_model_len,
            grows=self.policy.grows,
            when_short=_WHEN_SHORT.get(policy, "hold early"),
        )
        if setting.target_itl_seconds is not None:
            self._engine.aim_at(setting.target_itl_seconds, _pace(step))
        self.dispatcher = Dispatcher(self._layout, admission, _Unobserved(), self._to_engine)
        self.dispatcher.engine_ready(_EPOCH, 0.0)
        self._by_part: dict[str, Record] = {}
        self._queued_blocks: dict[str, float] = {}  # by part: what those that wait are thought to take
        self._step: StepResult | None = None  # the one that runs
        self._step_ends_at = 0.0
        self._levels_every = 16  # steps

    # ---- time

    def run_until(self, moment: float) -> None:
        """Up to `moment`, at which something arrives: a step that begins there has not begun."""
        while self.now < moment and self._in_step():
            if self._step_ends_at > moment:
                return
            self._finish_step()

    def run_to_the_end(self, on_step: Callable[[], None]) -> None:
        """Until everybody has gone."""
        while self._in_step():
            self._finish_step()
            if self.tally.steps % _TOLD_EVERY == 0:
                on_step()
        # Nothing runs, so nobody waits: the head of the queue always fits an empty house.
        assert not self.dispatcher.num_live, "requests wait before an idle engine"
        self._engine.check_idle()

    def arrive(self, record: Record) -> None:
        """At its moment, which `run_until` has come to."""
        row, most = record.row, self.setting.max_tokens
        self.now = max(self.now, row.arrives_at)
        limit = self.setting.max_model_len - row.prompt_tokens
        params = SamplingParams(
            max_tokens=limit if most is None else min(most, limit), seed=row.output_tokens
        )
        submission = Submission("replay", [_prompt(row.prompt_tokens)], params, True, tenant=row.tenant)
        listener = _Listener(self, record)
        self.dispatcher.expire(self.now)
        self._answers.append(row.output_tokens)
        try:
            request = self.dispatcher.submit(submission, listener, self.now)
        except PlimsollError as error:
            record.refused, record.error = True, error
            return
        listener.request = request
        part = request.ask.parts[0]
        self._by_part[part.part_id] = record
        if request.admitted_at is None:
            record.predicted_wait_seconds = request.predicted_wait_seconds
            self._queued_blocks[part.part_id] = self.policy.footprint(part, 0)

    # ---- what a router can know

    @property
    def num_live(self) -> int:
        """Requests that run or wait."""
        return self.dispatcher.num_live

    @property
    def free_room(self) -> float:
        """Blocks under the line, once those that run have come to their predicted peak and those that wait
        have come in. Below 0 where more wait than will fit."""
        return self.setting.num_blocks - self.predicted_peak - sum(self._queued_blocks.values())

    @property
    def predicted_peak(self) -> float:
        """Blocks; what is reserved, where the policy foresees nothing."""
        if isinstance(self.policy, Predictive):
            return self.policy.predicted_peak_blocks
        return self._engine.scheduler.reserved_blocks

    # ---- within

    def _make_policy(self, name: str, lengths: Lengths) -> Policy:
        layout, blocks = self._layout, self.setting.num_blocks
        if name == "strict":
            return Strict()
        if name == "predictive":
            risk = self.setting.overflow_risk
            return Predictive(layout, lengths, num_blocks=blocks, overflow_risk=risk)
        if name == "greedy":
            return Greedy(blocks, layout.block_size, len(layout.groups))
        assert name == "oracle", name
        return Oracle(blocks, layout.block_size, len(layout.groups), self._answers)

    def _in_step(self) -> bool:
        """Whether a step runs; the next begins if there is any work."""
        if self._step is None and self._engine.has_work:
            self._step = self._engine.step()
            self._step_ends_at = self.now + self._runner.step_seconds
        return self._step is not None

    def _finish_step(self) -> None:
        result, tally = self._step, self.tally
        assert result is not None
        self._step, self.now = None, self._step_ends_at
        seconds = self._runner.step_seconds
        for part_id in result.preempted:
            self._by_part[part_id].preemptions += 1
        tally.steps += 1
        tally.held_sequence_steps += result.held_sequences
        tally.recomputed_tokens += result.recomputed_tokens
        tally.used_block_seconds += result.used_blocks * seconds
        stats = result.stats(seconds)
        self._engine.observe(stats)
        self.dispatcher.step_done(result.message(_EPOCH, stats), self.now)
        if tally.steps % self._levels_every == 0:
            self._note_level(result.used_blocks)

    def _note_level(self, used_blocks: int) -> None:
        reserved = self._engine.scheduler.reserved_blocks
        self.tally.levels.append(Level(self.now, used_blocks, reserved, self.predicted_peak))
        if len(self.tally.levels) > _MOST_LEVELS:
            del self.tally.levels[::2]
            self._levels_every *= 2

    def _to_engine(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._queued_blocks.pop(message.request_id, None)
            self._engine.submit(message)
        else:
            assert isinstance(message, Abort)
            self._engine.abort(message.request_id, message.choice)

    def left_queue(self, part_id: str) -> None:
        self._queued_blocks.pop(part_id, None)


class _Listener:
    """Writes down when each token came."""

    request: LiveRequest

    def __init__(self, replica: Replica, record: Record) -> None:
        self._replica = replica
        self._record = record

    def output(self, prompt_index: int, output: ChoiceOutput) -> None:
        record, now = self._record, self._replica.now
        last = record.last_token_at
        if last is None:
            record.first_token_at = now
        else:
            gap = now - last
            self._replica.tally.gaps.append(gap)
            record.longest_gap_seconds = max(record.longest_gap_seconds, gap)
        record.last_token_at = now
        record.tokens += len(output.token_ids)

    def restarted(self) -> None:
        raise AssertionError("no engine dies in a replay")

    def ended(self, error: PlimsollError | None) -> None:
        self._record.ended_at, self._record.error = self._replica.now, error
        self._record.admitted_at = self.request.admitted_at
        if error is not None:  # its deadline has passed
            self._replica.left_queue(self.request.ask.parts[0].part_id)


class _Unobserved:
    """A replay looks at what became of the requests, not at the metrics."""

    def decided(self, decision: str, reason: str, projected_bytes: int) -> None: ...

    def dequeued(self, queue_time_seconds: float) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float) -> None: ...

    def tokens(self, *, prompt: int, generated: int) -> None: ...

    def stepped(self, stats: StepStats) -> None: ...

    def ended(self, ending: Ending) -> None: ...

    def released(self, tenant: str, kv_byte_seconds: float) -> None: ...

    def engine_restarted(self) -> None: ...


def _pace(step: StepModel) -> Pace:
    """As measured at start-up; it learns from every step."""
    return Pace(
        step.seconds(1, 0),
        1 / max(step.per_token, 1e-12),
        step.seconds(1, _CONTEXT_OF_ONE) - step.base,
    )


def _prompt(tokens: int) -> list[int]:
    """All prompts of one length are the same list: nobody changes it, and no one reads its tokens."""
    prompt = _PROMPTS.get(tokens)
    if prompt is None:
        prompt = _PROMPTS[tokens] = [1] * tokens
    return prompt


_PROMPTS: dict[int, list[int]] = {}
