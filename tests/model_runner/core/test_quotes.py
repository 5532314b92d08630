"""A quote is what the request would then get: its price, its answer, and the most it could ask for."""

from __future__ import annotations

from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from model_runner.core.admission import AdmissionController, Admitted, Queued
from model_runner.core.block_layout import BlockLayout
from model_runner.core.capacity import Device, make_plan
from model_runner.core.dispatcher import Dispatcher
from model_runner.core.lengths import Lengths
from model_runner.core.live_request import Submission
from model_runner.core.pace import Pace
from model_runner.core.policy import Predictive
from model_runner.core.quotes import price_by_group
from model_runner.core.tenants import Tenant, Tenants
from model_runner.core.weights import WeightsRead
from model_runner.errors import PlimsollError
from model_runner.messages import StepDone
from model_runner.types import ChoiceOutput, EngineObserver, FinishReason, SamplingParams, StepStats
from tests.model_runner.core.fake_runner import layout_with

LONGEST = 60


class Ignoring:
    """Listener and observer of no interest."""

    def output(self, prompt_index: int, output: ChoiceOutput) -> None: ...

    def restarted(self) -> None: ...

    def ended(self, error: Any) -> None: ...

    def decided(self, decision: str, reason: str, projected_bytes: int) -> None: ...

    def dequeued(self, queue_time_seconds: float) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float) -> None: ...

    def tokens(self, *, prompt: int, generated: int) -> None: ...

    def stepped(self, stats: Any) -> None: ...

    def released(self, tenant: str, kv_byte_seconds: float) -> None: ...

    def engine_restarted(self) -> None: ...


def door(
    layout: BlockLayout, num_blocks: int, max_num_seqs: int = 6, *, predictive: bool = False
) -> Dispatcher:
    lengths = Lengths(LONGEST) if predictive else None
    policy = lengths and Predictive(layout, lengths, num_blocks=num_blocks, overflow_risk=0.05)
    admission = AdmissionController(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_queue_requests=3,
        max_queue_seconds=30.0,
        pace=Pace(0.1, 100.0),
        policy=policy,
        lengths=lengths,
        tenants=Tenants(
            [
                Tenant("small", max_reserved_blocks=12, max_queued_requests=1),
                Tenant("shut", max_queued_requests=0),
            ]
        ),
        max_passes=2,
    )
    observer: EngineObserver = Ignoring()
    dispatcher = Dispatcher(layout, admission, observer, lambda message: None)
    dispatcher.engine_ready(1, 0.0)
    return dispatcher


def submission(prompts: list[int], max_tokens: int, n: int, tenant: str = "default") -> Submission:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return Submission("r", [[1] * length for length in prompts], params, False, tenant=tenant)


windows = st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3)
asked = st.builds(
    submission,
    st.lists(st.integers(1, 20), min_size=1, max_size=2),
    st.integers(1, 30),
    st.integers(1, 3),
    st.sampled_from(["default", "small", "shut"]),
)


@given(windows, st.integers(1, 5), st.integers(5, 80), st.lists(asked, max_size=6), asked)
def test_a_quote_is_kept(
    windows: list[int | None], block_size: int, num_blocks: int, before: list[Submission], wanted: Submission
) -> None:
    dispatcher = door(layout_with(windows, block_size), num_blocks)
    for earlier in before:
        submit(dispatcher, earlier)
    what_is_said_is_done(dispatcher, wanted, 1.0)


@given(
    windows,
    st.integers(1, 5),
    st.integers(5, 80),
    st.lists(asked | st.tuples(st.integers(0, 9), st.integers(1, 6), st.booleans()), max_size=30),
)
def test_a_quote_is_kept_where_peaks_are_foreseen(
    windows: list[int | None],
    block_size: int,
    num_blocks: int,
    events: list[Submission | tuple[int, int, bool]],
) -> None:
    """Whatever has been learned since, and however often it has been asked: some arrive, some draw tokens,
    some end or are preempted."""
    dispatcher = door(layout_with(windows, block_size), num_blocks, predictive=True)
    for event, now in zip(events, count(1.0), strict=False):
        if isinstance(event, Submission):
            what_is_said_is_done(dispatcher, event, now)
        else:
            go_on(dispatcher, *event, now)
        for before in [each for each in events[:3] if isinstance(each, Submission)]:
            dispatcher.quote(before, now, longest=LONGEST)  # as a client that asks and asks


def test_what_was_refused_a_moment_ago_is_looked_at_again_when_more_is_known() -> None:
    """A choice of another has ended early: answers are shorter than was thought. The policy, which remembers
    whom it has refused, must not answer from memory."""
    changed = 0
    for num_blocks in range(20, 60):
        dispatcher = door(layout_with([None], 2), num_blocks, predictive=True)
        running = dispatcher.submit(submission([4], 10, 3), Ignoring(), 1.0)
        wanted = submission([4], 30, 1)
        outputs = [ChoiceOutput(running.ask.parts[0].part_id, choice, [5], None, None) for choice in range(3)]
        dispatcher.step_done(StepDone(1, outputs, [], StepStats(0.1, 0, 3, 3, 0, 1, 3)), 1.0)
        before = dispatcher.quote(wanted, 1.0, longest=LONGEST).decision
        dispatcher.stop(running, 0, 0, 1, 1.0)
        dispatcher.stop(running, 0, 1, 1, 1.0)
        after = dispatcher.quote(wanted, 1.0, longest=LONGEST).decision
        changed += type(after) is not type(before)
        what_is_said_is_done(dispatcher, wanted, 1.0)
    assert changed


def go_on(dispatcher: Dispatcher, which: int, tokens: int, ends: bool, now: float) -> None:
    """One that runs draws tokens; and perhaps ends, and another is preempted."""
    running = [request for request in dispatcher.live_requests if request.running]
    if not running:
        return
    request = running[which % len(running)]
    n = request.submission.params.n
    ending = (1 if which % 2 else n) if ends else 0
    outputs = [
        ChoiceOutput(part.part_id, choice, [5] * tokens, None, FinishReason.STOP if choice < ending else None)
        for part in request.ask.parts
        for choice in range(n)
    ]
    released = [part.part_id for part in request.ask.parts] if ending == n else []
    stats = StepStats(0.1, 0, 1, 1, 0, 1, 1, preempted_requests=int(ends and which % 3 == 0))
    dispatcher.step_done(StepDone(1, outputs, released, stats), now)


def what_is_said_is_done(dispatcher: Dispatcher, wanted: Submission, now: float) -> None:
    live = dispatcher.num_live
    quote = dispatcher.quote(wanted, now, longest=LONGEST)
    assert dispatcher.num_live == live
    outcome = submit(dispatcher, wanted, now)
    if isinstance(outcome, PlimsollError):
        assert quote.error is not None
        assert (type(quote.error), quote.error.message) == (type(outcome), outcome.message)
    else:
        assert quote.error is None
        assert sum(price.blocks for price in quote.prices) * dispatcher.layout.block_bytes == outcome
        assert isinstance(quote.decision, Admitted) == (
            last(dispatcher) not in dispatcher.admission.queued_ask_ids(now)
        )
        if isinstance(quote.decision, Queued):
            request = dispatcher.live_requests[-1]
            assert request.predicted_wait_seconds == quote.decision.predicted_wait_seconds


@given(windows, st.integers(1, 5), st.integers(5, 80), st.lists(asked, max_size=4), asked, st.booleans())
def test_the_largest_max_tokens_would_fit_and_one_more_would_not(
    windows: list[int | None],
    block_size: int,
    num_blocks: int,
    before: list[Submission],
    wanted: Submission,
    predictive: bool,
) -> None:
    dispatcher = door(layout_with(windows, block_size), num_blocks, predictive=predictive)
    for earlier in before:
        submit(dispatcher, earlier)
    quote = dispatcher.quote(wanted, 1.0, longest=LONGEST)
    lengths = [len(prompt) for prompt in wanted.prompts]
    limit = LONGEST - max(lengths)

    def decision(max_tokens: int) -> Any:
        asks = submission(lengths, max_tokens, wanted.params.n, wanted.tenant)
        return dispatcher.quote(asks, 1.0, longest=LONGEST)

    now, ever = quote.largest_max_tokens_now, quote.largest_max_tokens
    assert 0 <= now <= ever <= limit
    if now:
        assert isinstance(decision(now).decision, Admitted)
    if now < limit:
        assert not isinstance(decision(now + 1).decision, Admitted)
    for tokens, fits in ((ever, True), (ever + 1, False)):
        if 0 < tokens <= limit:
            blocks = sum(price.blocks for price in decision(tokens).prices)
            assert (blocks <= dispatcher.admission.shares.most(wanted.tenant)) is fits


@given(windows, st.integers(1, 5), asked)
def test_the_groups_prices_add_up(windows: list[int | None], block_size: int, wanted: Submission) -> None:
    layout = layout_with(windows, block_size)
    lengths = [len(prompt) for prompt in wanted.prompts]
    prices = price_by_group(layout, lengths, wanted.params.max_tokens, wanted.params.n)
    assert len(prices) == len({(group.kind, group.window) for group in layout.groups})
    assert sum(price.layers for price in prices) == sum(len(group.layers) for group in layout.groups)
    whole = sum(
        layout.request_blocks(length, wanted.params.max_tokens, wanted.params.n) for length in lengths
    )
    assert sum(price.blocks for price in prices) == whole


@given(windows, st.integers(1, 5), st.integers(1, 80), st.integers(2, 60), st.data())
def test_capacity_counts_the_sequences_that_the_door_admits(
    windows: list[int | None], block_size: int, num_blocks: int, context: int, data: st.DataObject
) -> None:
    layout = layout_with(windows, block_size)
    plan = make_plan(
        layout.needs("llama"),
        layout,
        WeightsRead(1),
        Device(1),
        kv_budget_bytes=num_blocks * layout.block_bytes,
        contexts=(context,),
        batches=(1, 3),
        limit=LONGEST,
    )
    fit = plan.contexts[0].max_sequences_allocated
    assert fit is not None
    prompt = data.draw(st.integers(1, context - 1))
    dispatcher = door(layout, num_blocks, max_num_seqs=fit + 2)
    for _ in range(fit + 1):
        wanted = submission([prompt], context - prompt, 1)
        admitted = isinstance(dispatcher.quote(wanted, 1.0, longest=LONGEST).decision, Admitted)
        assert admitted is (dispatcher.num_live < fit)
        submit(dispatcher, wanted)
    for batch in plan.batches:
        longest = batch.longest_context_allocated
        assert longest is not None
        if longest:
            assert batch.sequences * layout.request_blocks(1, max(longest - 1, 1)) <= num_blocks
        if longest < LONGEST:
            assert batch.sequences * layout.request_blocks(1, max(longest, 1)) > num_blocks


def submit(dispatcher: Dispatcher, wanted: Submission, now: float = 1.0) -> int | PlimsollError:
    """The bytes that it reserves or waits for; or the refusal."""
    try:
        return dispatcher.submit(wanted, Ignoring(), now).projected_bytes
    except PlimsollError as error:
        return error


def last(dispatcher: Dispatcher) -> str:
    return dispatcher.live_requests[-1].ask.ask_id
