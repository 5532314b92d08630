"""The engine core as its caller sees it, and a state machine that asks, steps and aborts in any order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from model_runner.core.output import RunnerOutput, SchedulerOutput
from model_runner.engine import StepResult
from model_runner.messages import Submit
from model_runner.types import FinishReason, SamplingParams
from tests.model_runner.core.fake_runner import VOCABULARY, Engine, expected_tokens, tokens_by_choice

EOS = 7


def test_a_step_tells_what_it_did() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.ask("a", range(3), max_tokens=2)
    engine.ask("b", range(20), max_tokens=2)
    result = engine.step()
    assert result is not None
    assert [output.request_id for output in result.outputs] == ["a"]
    stats = result.stats(step_seconds=0.5)
    assert (stats.step_seconds, stats.prefill_tokens, stats.decode_tokens) == (0.5, 8, 0)
    assert (stats.running_sequences, stats.waiting_sequences, stats.used_blocks) == (2, 0, 1 + 2)
    result = engine.step()
    assert result is not None
    assert (result.prefill_tokens, result.decode_tokens, result.released) == (7, 1, ["a"])


def test_without_work_there_is_no_step() -> None:
    engine = Engine()
    assert not engine.has_work
    assert engine.step() is None
    assert engine.drain() == []
    engine.check_idle()


def test_an_abort_without_work_is_drained_once() -> None:
    engine = Engine()
    engine.ask("waiting", [1], n=2)
    engine.abort("waiting")
    assert not engine.has_work
    assert engine.drain() == ["waiting"]
    assert engine.drain() == []
    engine.check_idle()


def test_what_was_aborted_between_steps_is_released_with_the_next() -> None:
    engine = Engine()
    engine.ask("a", range(5), max_tokens=9)
    engine.ask("b", range(5), max_tokens=9)
    engine.step()
    engine.abort("a")
    result = engine.step()
    assert result is not None
    assert result.released == ["a"]
    assert {output.request_id for output in result.outputs} == {"b"}


def test_aborts_that_cross_an_ending_are_ignored() -> None:
    engine = Engine()
    engine.ask("a", [1], max_tokens=2, n=2)
    engine.abort("nobody")
    engine.abort("a", choice=5)
    engine.abort("a", choice=1)
    engine.abort("a", choice=1)
    outputs = engine.run()
    assert tokens_by_choice(outputs) == {("a", 0): expected_tokens([1], 2)}
    engine.abort("a")
    engine.abort("a", choice=0)
    assert engine.drain() == []


def test_the_last_choice_to_leave_releases_the_request() -> None:
    engine = Engine([None, 6])
    engine.ask("a", range(9), max_tokens=50, n=2)
    engine.step()
    engine.step()
    engine.abort("a", choice=0)
    assert engine.drain() == []
    assert engine.scheduler.reserved_blocks > 0
    engine.abort("a", choice=1)
    assert engine.drain() == ["a"]
    engine.check_idle()


def test_a_fault_of_the_runner_ends_the_step() -> None:
    class Broken:
        def execute(self, scheduled: SchedulerOutput) -> RunnerOutput:
            raise RuntimeError("device lost")

    engine = Engine()
    engine.runner = Broken()
    engine.ask("a", [1])
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()


def test_check_idle_finds_what_was_left_behind() -> None:
    engine = Engine()
    engine.scheduler.pool.allocate()
    with pytest.raises(AssertionError, match="idle, but"):
        engine.check_idle()


def test_books_that_disagree_end_the_step() -> None:
    engine = Engine()
    engine.ask("a", [1], max_tokens=9)
    engine.scheduler.pool.allocate()
    with pytest.raises(AssertionError, match="the pool has given"):
        engine.step()


class AnyOrder(RuleBasedStateMachine):
    """Arrivals, steps and aborts in any order. The fake runner checks every key that is attended to."""

    asked = Bundle("asked")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.params: dict[str, SamplingParams] = {}
        self.prompts: dict[str, list[int]] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], FinishReason] = {}
        self.released: Counter[str] = Counter()
        self.reserved: dict[str, int] = {}  # the door's ledger: credited on release only

    @initialize(
        windows=st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 12),
        headroom=st.none() | st.integers(0, 4),
    )
    def build(
        self,
        windows: list[int | None],
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        headroom: int | None,
    ) -> None:
        self.engine = Engine(
            windows,
            block_size=block_size,
            num_blocks=120,
            headroom_blocks=headroom,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            eos_token_ids=[EOS],
        )

    @rule(
        target=asked,
        prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=24),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 4),
        ignore_eos=st.booleans(),
        echo=st.booleans(),
    )
    def ask(self, prompt: list[int], max_tokens: int, n: int, ignore_eos: bool, echo: bool) -> str:
        request_id = f"r{self.count}"
        self.count += 1
        price = self.engine.layout.request_blocks(len(prompt), max_tokens, n)
        if sum(self.reserved.values()) + price > self.engine.num_blocks:
            return "refused"
        params = SamplingParams(
            max_tokens=max_tokens, n=n, ignore_eos=ignore_eos, prompt_logprobs=0 if echo else None
        )
        self.reserved[request_id] = price
        self.params[request_id], self.prompts[request_id] = params, prompt
        self.engine.submit(Submit(request_id, prompt, params, price))
        return request_id

    @rule(request_id=consumes(asked))
    def abort(self, request_id: str) -> None:
        self._mark_aborted(request_id, range(4))
        self.engine.abort(request_id)

    @rule(request_id=asked, choice=st.integers(0, 3))
    def abort_choice(self, request_id: str, choice: int) -> None:
        self._mark_aborted(request_id, [choice])
        self.engine.abort(request_id, choice)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            had_work = self.engine.has_work
            result = self.engine.step()
            assert (result is not None) == had_work
            if result is not None:
                self._take(result)

    @rule()
    def drain(self) -> None:
        self._release(self.engine.drain())

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        requests = scheduler._requests.values()
        held = {request.request_id: request.lease.held for request in requests}
        assert all(request.lease.borrowed == 0 for request in requests)
        assert scheduler.pool.used == sum(held.values())
        assert all(held[request_id] <= self.reserved[request_id] for request_id in held)
        assert scheduler.reserved_blocks <= sum(self.reserved.values()) <= self.engine.num_blocks
        if self.engine.fake.used_blocks:
            assert max(self.engine.fake.used_blocks) <= scheduler.pool.size

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while (result := self.engine.step()) is not None:
            self._take(result)
        self._release(self.engine.drain())
        self.engine.check_idle()
        assert self.reserved == {}
        assert self.released == Counter(self.params.keys())
        for request_id, params in self.params.items():
            for choice in range(params.n):
                self._check_choice(request_id, choice)

    def _check_choice(self, request_id: str, choice: int) -> None:
        params, key = self.params[request_id], (request_id, choice)
        stops = () if params.ignore_eos else (EOS,)
        alone = expected_tokens(self.prompts[request_id], params.max_tokens, choice, stops)
        got = self.tokens.get(key, [])
        if key in self.finished:
            assert got == alone
            stopped = alone[-1] in stops
            assert self.finished[key] is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        else:
            assert key in self.aborted
            assert got == alone[: len(got)]

    def _mark_aborted(self, request_id: str, choices: range | list[int]) -> None:
        keys = {(request_id, choice) for choice in choices}
        self.aborted |= keys - self.finished.keys()

    def _take(self, result: StepResult) -> None:
        for output in result.outputs:
            key = (output.request_id, output.choice)
            assert key not in self.finished, "a token after the end"
            assert key not in self.aborted, "a token after the abort"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.finished[key] = output.finish_reason
            if output.prompt_logprobs is not None:
                expected = self.prompts[output.request_id][1:]
                assert [entry.token_id for entry in output.prompt_logprobs] == expected
        self._release(result.released)

    def _release(self, released: list[str]) -> None:
        for request_id in released:
            self.released[request_id] += 1
            del self.reserved[request_id]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
