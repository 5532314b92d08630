"""What the dispatcher says and counts. (That its books are right is held by the state machine.)"""

from __future__ import annotations

import pytest

from model_runner.core.admission import AdmissionController
from model_runner.core.block_layout import BlockLayout
from model_runner.core.dispatcher import Dispatcher
from model_runner.core.kv_spec import KVCacheSpec
from model_runner.core.live_request import LiveRequest, Submission
from model_runner.core.pace import Pace
from model_runner.errors import (
    KVCacheBudgetExceeded,
    PlimsollError,
    QueueFull,
    QueueTimeout,
    Shortage,
    WaitTooLong,
)
from model_runner.messages import Abort, StepDone, Submit, ToEngine
from model_runner.types import ChoiceOutput, Ending, FinishReason, SamplingParams, StepStats

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 128, "head_dim": 64}
# Blocks of 32 KiB.
SPEC = BlockLayout.from_spec(KVCacheSpec.from_config(CONFIG, kv_dtype="float32"), block_size=16)


class Recorder:
    """Observer and listener in one."""

    def __init__(self) -> None:
        self.endings: list[Ending] = []
        self.errors: list[PlimsollError | None] = []
        self.seconds: list[float] = []
        self.counted = (0, 0)
        self.byte_seconds: dict[str, float] = {}

    def decided(self, decision: str, reason: str, projected_bytes: int) -> None: ...

    def dequeued(self, queue_time_seconds: float) -> None: ...

    def first_token(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def inter_token(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def tokens(self, *, prompt: int, generated: int) -> None:
        self.counted = (self.counted[0] + prompt, self.counted[1] + generated)

    def stepped(self, stats: StepStats) -> None: ...

    def released(self, tenant: str, kv_byte_seconds: float) -> None:
        self.byte_seconds[tenant] = self.byte_seconds.get(tenant, 0.0) + kv_byte_seconds

    def engine_restarted(self) -> None: ...

    def output(self, prompt_index: int, output: ChoiceOutput) -> None: ...

    def restarted(self) -> None: ...

    def ended(self, what: Ending | PlimsollError | None) -> None:
        if isinstance(what, Ending):
            self.endings.append(what)
        else:
            self.errors.append(what)


class House:
    def __init__(
        self, num_blocks: int = 8, max_queue_requests: int = 2, max_queue_seconds: float = 5.0
    ) -> None:
        self.told, self.sent = Recorder(), list[ToEngine]()
        admission = AdmissionController(
            num_blocks=num_blocks,
            max_num_seqs=8,
            max_queue_requests=max_queue_requests,
            max_queue_seconds=max_queue_seconds,
            pace=Pace(0.01, 1000.0),
        )
        self.dispatcher = Dispatcher(SPEC, admission, self.told, self.sent.append)
        self.dispatcher.engine_ready(1, 0.0)

    def submit(self, blocks: int, now: float = 0.0) -> LiveRequest:
        params = SamplingParams(max_tokens=16 * blocks)
        return self.dispatcher.submit(Submission("r", [[7]], params, False), self.told, now)

    def started(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, Submit)]


def test_refusals_name_their_numbers() -> None:
    house = House()
    with pytest.raises(KVCacheBudgetExceeded, match=r"needs 288 KiB .*\(294912 bytes\).*256 KiB") as never:
        house.submit(9)
    assert "largest max_tokens that would fit is 128" in never.value.message
    house.submit(6)
    house.submit(8)
    house.submit(8)
    with pytest.raises(QueueFull, match=r"needs 96 KiB of KV cache; 64 KiB of 256 KiB is free") as full:
        house.submit(3)
    # 96 tokens, then 128 twice, at 10 ms each; and a millisecond for each prompt.
    assert full.value.retry_after_seconds == pytest.approx(3.523)
    assert full.value.shortage == Shortage(96 << 10, 64 << 10, full.value.retry_after_seconds)
    patient, hasty = House(max_queue_seconds=1.0), House(max_queue_seconds=0.5)
    for house in (patient, hasty):
        house.submit(6)
    patient.submit(8)
    with pytest.raises(WaitTooLong, match=r"wait of 1\.0 seconds is over the limit of 0\.5") as long:
        hasty.submit(8)
    assert long.value.shortage == Shortage(256 << 10, 64 << 10, long.value.retry_after_seconds)


def test_nobody_who_is_late_is_let_in_by_anothers_going() -> None:
    house = House()
    running, head, late = house.submit(6), house.submit(8), house.submit(2, now=1.0)
    house.dispatcher.abort(head, "client_disconnected", now=7.0)  # the clock's tick is late itself
    assert house.started() == [running.ask.parts[0].part_id]
    assert late.ended
    assert [type(error) for error in house.told.errors] == [QueueTimeout, QueueTimeout]
    assert [ending.reason for ending in house.told.endings] == ["timeout", "timeout"]


def test_an_abort_sends_the_wish_and_waits_for_the_word() -> None:
    house = House()
    request, waiting = house.submit(6), house.submit(8)
    part_id = request.ask.parts[0].part_id
    house.dispatcher.abort(request, "client_disconnected", 1.0)
    assert house.sent[-1] == Abort(part_id)
    assert house.dispatcher.admission.reserved_blocks == 6
    house.dispatcher.used_blocks = 1
    house.dispatcher.step_done(StepDone(1, [], [part_id], None), 1.1)
    assert waiting.running
    assert house.dispatcher.used_blocks == 0, "an engine that has run no step holds nothing"


def test_times_and_tokens_are_counted() -> None:
    house = House()
    request = house.submit(1)
    part_id = request.ask.parts[0].part_id

    def step(tokens: list[int], now: float, finish: FinishReason | None = None) -> None:
        released = [part_id] if finish else []
        outputs = [ChoiceOutput(part_id, 0, tokens, None, finish)]
        house.dispatcher.step_done(StepDone(1, outputs, released, StepStats(0.01, 0, 1, 1, 0, 1, 1)), now)

    step([1], 0.5)
    step([2, 3], 0.7)
    step([4], 1.0, FinishReason.STOP)
    assert house.told.seconds == [0.5, pytest.approx(0.1), pytest.approx(0.3)]
    assert house.told.counted == (1, 4)
    (ending,) = house.told.endings
    assert (ending.reason, ending.generated_tokens, ending.e2e_seconds) == ("stop", 4, 1.0)
    assert house.told.errors == [None]


def test_an_ending_says_what_had_been_foreseen_and_what_befell_it() -> None:
    house = House()
    first, second = house.submit(6), house.submit(8)
    (part,) = first.ask.parts
    stats = StepStats(0.01, 0, 1, 1, 0, 1, 1, preempted_requests=1)
    steps = [
        StepDone(1, [], [], stats, preempted=[part.part_id, "of somebody who has left"]),
        StepDone(1, [], [], stats, preempted=[part.part_id]),
        StepDone(1, [ChoiceOutput(part.part_id, 0, [5], None, FinishReason.STOP)], [part.part_id], stats),
    ]
    for now, step in enumerate(steps, start=1):
        house.dispatcher.step_done(step, float(now))
    house.dispatcher.abort(second, "client_disconnected", 4.0)
    done, left = house.told.endings
    assert (done.tenant, done.preemptions, done.predicted_wait_seconds) == ("default", 2, None)
    assert done.predicted_tokens == 96, "without any learned lengths: its max_tokens"
    assert left.predicted_wait_seconds == pytest.approx(0.961)
    assert (left.queue_seconds, left.preemptions) == (3.0, 0)
    block = SPEC.block_bytes
    assert house.told.byte_seconds == {"default": 3.0 * 6 * block}
    house.dispatcher.engine_died(5.0)
    assert house.told.byte_seconds == {"default": 3.0 * 6 * block + 2.0 * 8 * block}


@pytest.mark.parametrize("how", ["stop string", "hang-up"])
def test_who_has_left_is_forecast_to_give_its_blocks_back_at_once(how: str) -> None:
    """The wait is a step, not what max_tokens would have taken: the next one is queued, not turned away."""
    house = House(num_blocks=200, max_queue_seconds=1.0)
    request = house.submit(200)  # 3,200 tokens at 10 ms each
    with pytest.raises(WaitTooLong):
        house.submit(1)
    part_id = request.ask.parts[0].part_id
    output = ChoiceOutput(part_id, 0, [5], None, None)
    house.dispatcher.step_done(StepDone(1, [output], [], StepStats(0.01, 1, 0, 1, 0, 1, 1)), 0.1)
    if how == "hang-up":
        house.dispatcher.abort(request, "client_disconnected", 0.1)
    else:
        house.dispatcher.stop(request, 0, 0, 1, 0.1)
    assert request.ended
    after = house.submit(1, now=0.1)
    assert not after.running
    house.dispatcher.step_done(StepDone(1, [], [part_id], None), 0.2)
    assert after.running


@pytest.mark.parametrize("found", [True, False])
def test_an_ending_waits_for_what_is_read_in_the_last_tokens(found: bool) -> None:
    """The engine says `length`; a stop string in that very output makes it `stop`, and shorter."""
    house = House()
    submission = Submission("r", [[7]], SamplingParams(max_tokens=16), False, stop_strings=True)
    request = house.dispatcher.submit(submission, house.told, 0.0)
    part_id = request.ask.parts[0].part_id
    output = ChoiceOutput(part_id, 0, [5] * 16, None, FinishReason.LENGTH)
    house.dispatcher.step_done(StepDone(1, [output], [part_id], StepStats(0.01, 1, 0, 1, 0, 1, 1)), 0.5)
    assert request.ended
    assert house.dispatcher.num_live == house.dispatcher.admission.reserved_blocks == 0
    assert house.told.errors == [None]
    assert house.told.endings == []
    sent = len(house.sent)
    if found:
        house.dispatcher.stop(request, 0, 0, 9, 0.7)
    house.dispatcher.read_to_end(request)
    house.dispatcher.abort(request, "server_fault", 0.8)
    (ending,) = house.told.endings
    assert (ending.reason, ending.generated_tokens) == (("stop", 9) if found else ("length", 16))
    assert ending.e2e_seconds == 0.5, "when the engine was done, not when it was read"
    assert len(house.sent) == sent, "the engine has nothing left to abort"


def test_a_prompts_last_choice_must_have_left() -> None:
    house = House(num_blocks=20, max_queue_seconds=0.5)
    params = SamplingParams(max_tokens=160, n=2)
    request = house.dispatcher.submit(Submission("r", [[7]], params, False), house.told, 0.0)
    assert request.ask.blocks == 20
    house.dispatcher.stop(request, 0, 1, 1, 0.1)
    with pytest.raises(WaitTooLong):
        house.submit(1, now=0.1)
    house.dispatcher.stop(request, 0, 0, 1, 0.1)
    assert not house.submit(1, now=0.1).running
