"""The dispatcher, the door, the queue and the engine that serve, with simulated time and a simulated model.

Nothing here decides anything: arrivals, steps and deadlines are handed to the same objects that stand behind
the sockets, and what becomes of every request is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from model_runner.core.admission import AdmissionController
from model_runner.core.block_layout import BlockGroup, BlockLayout
from model_runner.core.dispatcher import Dispatcher
from model_runner.core.lengths import LengthModel
from model_runner.core.live_request import LiveRequest, Submission
from model_runner.core.pace import Pace
from model_runner.core.policy import Policy, Predictive, Strict
from model_runner.engine import EngineCore
from model_runner.errors import ClientError, PlimsollError
from model_runner.messages import Abort, StepDone, Submit, ToEngine
from model_runner.replay.rivals import Greedy, Oracle
from model_runner.replay.step_model import SimulatedRunner, StepModel
from model_runner.types import ChoiceOutput, Ending, SamplingParams, StepStats

_NEVER = float("inf")
_NO_BOUND = 10**9
POLICIES = ("strict", "predictive", "greedy", "oracle")


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace. Seconds from the trace's beginning, and tokens."""

    arrives_at: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all policies of a replay have in common. Times are seconds."""

    step_model: StepModel
    kv_budget_tokens: int
    max_tokens: int | None  # of every request; None: as much as the context leaves
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 1024
    block_size: int = 16
    max_queue_seconds: float = _NEVER
    max_queue_requests: int = _NO_BOUND
    overflow_risk: float


@dataclass(slots=True, eq=False)
class Record:
    """What became of one request. Times are seconds on the replay's clock."""

    row: Row
    refused: bool = False
    predicted_wait_seconds: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    longest_gap_seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    preemptions: int = 0
    ended_at: float | None = None
    error: PlimsollError | None = None


@dataclass(slots=True)
class Course:
    """What a replay of one policy gave."""

    policy: str
    records: list[Record]
    seconds: float = 0.0
    steps: int = 0
    held_sequence_steps: int = 0
    recomputed_tokens: int = 0
    used_block_seconds: float = 0.0
    num_blocks: int = 0
    # (seconds, blocks granted, blocks foreseen at the peak), now and then.
    levels: list[tuple[float, int, float]] = field(default_factory=list)


class Simulation:
    """One policy over one trace."""

    def __init__(self, rows: Sequence[Row], setting: Setting, policy: str) -> None:
        self.setting = setting
        self.now = 0.0
        self._rows = sorted(rows, key=lambda row: row.arrives_at)
        self._layout = BlockLayout((BlockGroup("full", (0,), 1, 1),), setting.block_size, 1)
        self._num_blocks = setting.kv_budget_tokens // setting.block_size
        self._runner = SimulatedRunner(setting.step_model)
        lengths = LengthModel(setting.max_model_len)
        self._policy = self._make_policy(policy, lengths)
        bounded = policy not in ("greedy", "oracle")
        step = setting.step_model
        admission = AdmissionController(
            num_blocks=self._num_blocks,
            max_num_seqs=setting.max_num_seqs,
            max_queue_requests=setting.max_queue_requests if bounded else _NO_BOUND,
            max_queue_seconds=setting.max_queue_seconds if bounded else _NEVER,
            pace=Pace(step.seconds(1, 0), 1 / step.per_token),
            policy=self._policy,
            lengths=lengths,
        )
        self._engine = EngineCore(
            self._layout,
            self._runner,
            num_blocks=self._num_blocks,
            headroom_blocks=0,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            eos_token_ids=(SimulatedRunner.end_token_id,),
            max_model_len=setting.max_model_len,
            grows=self._policy.grows,
            patient=policy != "greedy",
        )
        self._dispatcher = Dispatcher(self._layout, admission, _Unobserved(), self._to_engine)
        self._by_part: dict[str, Record] = {}
        self.course = Course(policy, [Record(row) for row in self._rows], num_blocks=self._num_blocks)

    def run(self, on_progress: Callable[[int], None] = lambda ended: None) -> Course:
        """To the last ending. `on_progress` is told how many requests are through, now and then."""
        self._dispatcher.engine_ready(1, 0.0)
        arrived = 0
        rows, dispatcher = self._rows, self._dispatcher
        while arrived < len(rows) or dispatcher.num_live:
            if not self._engine.has_work:
                # Nothing runs, so nobody waits: the head of the queue always fits an empty house.
                assert not dispatcher.num_live, "requests wait before an idle engine"
                self.now = max(self.now, rows[arrived].arrives_at)
            while arrived < len(rows) and rows[arrived].arrives_at <= self.now:
                self._arrive(self.course.records[arrived], rows[arrived].arrives_at)
                arrived += 1
            if not self._engine.has_work:
                continue
            result = self._engine.step()
            assert result is not None
            seconds = self._runner.step_seconds
            ends_at = self.now + seconds
            while arrived < len(rows) and rows[arrived].arrives_at < ends_at:
                self._arrive(self.course.records[arrived], rows[arrived].arrives_at)
                arrived += 1
            self.now = ends_at
            for part_id in result.preempted:
                self._by_part[part_id].preemptions += 1
            course = self.course
            course.steps += 1
            course.held_sequence_steps += result.held_sequences
            course.recomputed_tokens += result.recomputed_tokens
            course.used_block_seconds += result.used_blocks * seconds
            stats = result.stats(seconds)
            dispatcher.step_done(StepDone(1, result.outputs, result.released, stats, result.grants), self.now)
            if course.steps % 64 == 0:
                on_progress(arrived - dispatcher.num_live)
                course.levels.append((self.now, self._engine.scheduler.reserved_blocks, 0.0))
        self._engine.check_idle()
        self.course.seconds = self.now
        on_progress(arrived)
        return self.course

    def _make_policy(self, name: str, lengths: LengthModel) -> Policy:
        layout, blocks = self._layout, self._num_blocks
        if name == "strict":
            return Strict()
        if name == "predictive":
            risk = self.setting.overflow_risk
            return Predictive(layout, lengths, num_blocks=blocks, overflow_risk=risk)
        if name == "greedy":
            return Greedy(blocks, layout.block_size, len(layout.groups))
        assert name == "oracle", name
        answers = [row.output_tokens for row in self._rows]
        return Oracle(blocks, layout.block_size, len(layout.groups), answers)

    def _arrive(self, record: Record, now: float) -> None:
        row, most = record.row, self.setting.max_tokens
        limit = self.setting.max_model_len - row.prompt_tokens
        params = SamplingParams(
            max_tokens=limit if most is None else min(most, limit), seed=row.output_tokens
        )
        submission = Submission("replay", [_prompt(row.prompt_tokens)], params, True)
        listener = _Listener(self, record)
        self._dispatcher.expire(now)
        try:
            request = self._dispatcher.submit(submission, listener, now)
        except PlimsollError as error:
            record.refused, record.error = True, error
            return
        listener.request = request
        record.predicted_wait_seconds = request.predicted_wait_seconds
        self._by_part[request.ask.parts[0].part_id] = record

    def _to_engine(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._engine.submit(message)
        else:
            assert isinstance(message, Abort)
            self._engine.abort(message.request_id, message.choice)


class _Listener:
    """Writes down when each token came."""

    request: LiveRequest

    def __init__(self, simulation: Simulation, record: Record) -> None:
        self._simulation = simulation
        self._record = record

    def output(self, prompt_index: int, output: ChoiceOutput) -> None:
        record, now = self._record, self._simulation.now
        if record.last_token_at is None:
            record.first_token_at = now
        else:
            gap = now - record.last_token_at
            record.gaps.append(gap)
            record.longest_gap_seconds = max(record.longest_gap_seconds, gap)
        record.last_token_at = now
        record.tokens += len(output.token_ids)

    def restarted(self) -> None:
        raise AssertionError("no engine dies in a replay")

    def ended(self, error: PlimsollError | None) -> None:
        assert not isinstance(error, ClientError)
        self._record.ended_at, self._record.error = self._simulation.now, error
        self._record.admitted_at = self.request.admitted_at


class _Unobserved:
    """A replay looks at what became of the requests, not at the metrics."""

    def decided(self, decision: str, reason: str, projected_bytes: int) -> None: ...

    def dequeued(self, queue_time_seconds: float) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float) -> None: ...

    def tokens(self, *, prompt: int, generated: int) -> None: ...

    def stepped(self, stats: StepStats) -> None: ...

    def ended(self, ending: Ending) -> None: ...

    def engine_restarted(self) -> None: ...


def _prompt(tokens: int) -> list[int]:
    """All prompts of one length are the same list: nobody changes it, and no one reads its tokens."""
    prompt = _PROMPTS.get(tokens)
    if prompt is None:
        prompt = _PROMPTS[tokens] = [1] * tokens
    return prompt


_PROMPTS: dict[int, list[int]] = {}
