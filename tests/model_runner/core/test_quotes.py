"""A quote is what the request would then get: its price, its answer, and the most it could ask for."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from model_runner.core.admission import AdmissionController, Admitted
from model_runner.core.block_layout import BlockLayout
from model_runner.core.capacity import Device, make_plan
from model_runner.core.dispatcher import Dispatcher
from model_runner.core.live_request import Submission
from model_runner.core.pace import Pace
from model_runner.core.quotes import price_by_group
from model_runner.core.weights import WeightsRead
from model_runner.errors import PlimsollError
from model_runner.types import ChoiceOutput, EngineObserver, SamplingParams
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


def door(layout: BlockLayout, num_blocks: int, max_num_seqs: int = 6) -> Dispatcher:
    admission = AdmissionController(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_queue_requests=3,
        max_queue_seconds=30.0,
        pace=Pace(0.1, 100.0),
    )
    observer: EngineObserver = Ignoring()
    dispatcher = Dispatcher(layout, admission, observer, lambda message: None)
    dispatcher.engine_ready(1, 0.0)
    return dispatcher


def submission(prompts: list[int], max_tokens: int, n: int) -> Submission:
    return Submission(
        "r", [[1] * length for length in prompts], SamplingParams(max_tokens=max_tokens, n=n), False
    )


windows = st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3)
asked = st.builds(
    submission, st.lists(st.integers(1, 20), min_size=1, max_size=2), st.integers(1, 30), st.integers(1, 3)
)


@given(windows, st.integers(1, 5), st.integers(5, 80), st.lists(asked, max_size=6), asked)
def test_a_quote_is_kept(
    windows: list[int | None], block_size: int, num_blocks: int, before: list[Submission], wanted: Submission
) -> None:
    dispatcher = door(layout_with(windows, block_size), num_blocks)
    for earlier in before:
        submit(dispatcher, earlier)
    live = dispatcher.num_live
    quote = dispatcher.quote(wanted, 1.0, longest=LONGEST)
    assert dispatcher.num_live == live
    outcome = submit(dispatcher, wanted)
    if isinstance(outcome, PlimsollError):
        assert quote.error is not None
        assert (type(quote.error), quote.error.message) == (type(outcome), outcome.message)
    else:
        assert quote.error is None
        assert sum(price.blocks for price in quote.prices) * dispatcher.layout.block_bytes == outcome
        assert isinstance(quote.decision, Admitted) == (
            dispatcher.admission.queued_ask_ids(0)[-1:] != [last(dispatcher)]
        )


@given(windows, st.integers(1, 5), st.integers(5, 80), st.lists(asked, max_size=4), asked)
def test_the_largest_max_tokens_would_fit_and_one_more_would_not(
    windows: list[int | None], block_size: int, num_blocks: int, before: list[Submission], wanted: Submission
) -> None:
    dispatcher = door(layout_with(windows, block_size), num_blocks)
    for earlier in before:
        submit(dispatcher, earlier)
    quote = dispatcher.quote(wanted, 1.0, longest=LONGEST)
    lengths = [len(prompt) for prompt in wanted.prompts]
    limit = LONGEST - max(lengths)

    def decision(max_tokens: int) -> Any:
        return dispatcher.quote(submission(lengths, max_tokens, wanted.params.n), 1.0, longest=LONGEST)

    now, ever = quote.largest_max_tokens_now, quote.largest_max_tokens
    assert 0 <= now <= ever <= limit
    if now:
        assert isinstance(decision(now).decision, Admitted)
    if now < limit:
        assert not isinstance(decision(now + 1).decision, Admitted)
    for tokens, fits in ((ever, True), (ever + 1, False)):
        if 0 < tokens <= limit:
            blocks = sum(price.blocks for price in decision(tokens).prices)
            assert (blocks <= num_blocks) is fits


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


def submit(dispatcher: Dispatcher, wanted: Submission) -> int | PlimsollError:
    """The bytes that it reserves or waits for; or the refusal."""
    try:
        return dispatcher.submit(wanted, Ignoring(), 1.0).projected_bytes
    except PlimsollError as error:
        return error


def last(dispatcher: Dispatcher) -> str:
    return dispatcher.live_requests[-1].ask.ask_id
