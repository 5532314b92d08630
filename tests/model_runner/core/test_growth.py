"""The pool runs short: who goes on, who is held, who is preempted; and that nobody's tokens ever change."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner.core.growth import can_all_finish
from model_runner.core.request import Request, RequestStatus
from model_runner.engine import StepResult
from tests.model_runner.core.fake_runner import Engine, expected_tokens, tokens_by_choice


def running(engine: Engine) -> list[str]:
    return [
        request.request_id
        for request in engine.scheduler._requests.values()
        if request.status is RequestStatus.RUNNING
    ]


def step(engine: Engine) -> StepResult:
    result = engine.step()
    assert result is not None
    return result


def test_a_request_is_granted_what_it_needs_next_and_no_more() -> None:
    engine = Engine(block_size=4, num_blocks=10, grows=True)
    engine.ask("a", range(6), max_tokens=20)
    grants = dict(step(engine).grants)
    assert grants == {"a": 2}
    seen = [2]
    while (result := engine.step()) is not None:
        seen += [blocks for _, blocks in result.grants]
    # Each block is granted in the step that writes its first token; the seventh in the last, which ends it.
    assert seen == [2, 3, 4, 5, 6]
    engine.check_idle()


def test_the_senior_grows_and_the_newest_is_held_until_a_block_is_back() -> None:
    # Both need an eleventh block for position 40, and there is one.
    engine = Engine(block_size=4, num_blocks=21, max_num_batched_tokens=100, grows=True)
    engine.ask("senior", range(38), max_tokens=6)
    engine.ask("junior", range(38), max_tokens=9)
    results = []
    while (result := engine.step()) is not None:
        results.append(result)
    held = [result.held_sequences for result in results]
    assert held == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert {output.request_id for output in results[4].outputs} == {"senior"}
    tokens = tokens_by_choice([output for result in results for output in result.outputs])
    assert tokens["junior", 0] == expected_tokens(range(38), 9)
    assert not any(result.preempted for result in results)


def test_nobody_is_held_where_everyone_can_run_to_the_limit() -> None:
    """The pool is their lifetimes' to the block: the last ones are taken without a thought for seniors."""
    engine = Engine(block_size=4, num_blocks=22, max_num_batched_tokens=100, grows=True)
    engine.ask("senior", range(38), max_tokens=7)
    engine.ask("junior", range(38), max_tokens=7)
    held, used = [], 0
    while (result := engine.step()) is not None:
        held.append(result.held_sequences)
        used = max(used, engine.scheduler.reserved_blocks)
    assert not any(held)
    assert used == 22


def test_the_newest_is_preempted_when_nobody_else_could_go_on_and_goes_on_from_its_tokens() -> None:
    # Both stand at a block's edge in the same step, and nothing is free: only preemption helps.
    engine = Engine(block_size=4, num_blocks=4, grows=True)
    engine.ask("senior", range(4), max_tokens=12)  # 15 tokens: all 4 blocks
    engine.ask("junior", range(10, 14), max_tokens=12)
    outputs, preempted, recomputed = [], 0, 0
    while (result := engine.step()) is not None:
        outputs += result.outputs
        preempted += len(result.preempted)
        recomputed += result.recomputed_tokens
    assert preempted >= 1
    assert recomputed >= 4
    tokens = tokens_by_choice(outputs)
    assert tokens["senior", 0] == expected_tokens(range(4), 12)
    assert tokens["junior", 0] == expected_tokens(range(10, 14), 12)
    engine.check_idle()


def test_priority_is_seniority() -> None:
    engine = Engine(block_size=4, num_blocks=4, grows=True)
    engine.ask("late but urgent", range(10, 14), max_tokens=12, priority=-1)
    engine.ask("early", range(4), max_tokens=12)
    order = [output.request_id for output in engine.run() if output.finish_reason is not None]
    assert order == ["late but urgent", "early"]


def test_nobody_new_is_started_while_someone_is_held() -> None:
    # For position 40 the senior needs one block and the two choices need two; two are free.
    engine = Engine(block_size=4, num_blocks=23, max_num_batched_tokens=100, grows=True)
    engine.ask("senior", range(39), max_tokens=4)
    engine.ask("choices", range(39), max_tokens=4, n=2)
    while not step(engine).held_sequences:
        pass
    assert engine.scheduler.growth.free_blocks == 1
    engine.ask("new", [1], max_tokens=1)
    order = [output.request_id for output in engine.run() if output.finish_reason is not None]
    assert order == ["senior", "new", "choices", "choices"]


def test_choices_that_were_preempted_catch_up_each_on_its_own() -> None:
    engine = Engine((None, 6), block_size=4, num_blocks=24, max_num_batched_tokens=8, grows=True)
    engine.ask("senior", range(5), max_tokens=36)
    price = engine.ask("choices", range(20, 30), max_tokens=14, n=3)
    assert price <= 24
    outputs, preempted = [], 0
    while (result := engine.step()) is not None:
        outputs += result.outputs
        preempted += len(result.preempted)
    assert preempted >= 1
    tokens = tokens_by_choice(outputs)
    for choice in range(3):
        assert tokens["choices", choice] == expected_tokens(range(20, 30), 14, choice)
    assert tokens["senior", 0] == expected_tokens(range(5), 36)


prompts = st.lists(st.integers(0, 49), min_size=1, max_size=25)
windows = st.sampled_from([(None,), (None, None), (5,), (None, 7), (3, None, 9)])


@given(
    windows=windows,
    asks=st.lists(
        st.tuples(prompts, st.integers(1, 30), st.integers(1, 3), st.integers(-1, 1), st.integers(0, 6)),
        min_size=1,
        max_size=9,
    ),
    spare=st.integers(0, 12),
    max_num_seqs=st.integers(3, 8),
    aborts=st.dictionaries(st.integers(1, 60), st.integers(0, 8), max_size=3),
)
@settings(deadline=None)
def test_whatever_befalls_the_others_every_token_is_the_one_it_would_be_alone(
    windows: tuple[int | None, ...],
    asks: list[tuple[list[int], int, int, int, int]],
    spare: int,
    max_num_seqs: int,
    aborts: dict[int, int],
) -> None:
    """Hostile: nothing is foreseen, all are let in as they come, and everyone runs to its limit."""
    probe = Engine(windows, block_size=4)
    prices = [probe.layout.request_blocks(len(prompt), most, n) for prompt, most, n, _, _ in asks]
    engine = Engine(
        windows, block_size=4, num_blocks=max(prices) + spare, max_num_seqs=max_num_seqs, grows=True
    )
    arriving = sorted(enumerate(asks), key=lambda pair: pair[1][4])
    outputs, grants, aborted = [], {}, set()
    preempted_at: dict[str, int] = {}
    for now in itertools.count():
        while arriving and arriving[0][1][4] <= now:
            index, (prompt, most, n, priority, _) = arriving.pop(0)
            engine.ask(str(index), prompt, most, n=n, priority=priority)
        if now in aborts:
            engine.abort(str(aborts[now]))
            aborted.add(str(aborts[now]))
        before = {r.request_id: (r.status, r.generated_tokens) for r in engine.scheduler._requests.values()}
        result = engine.step()
        if result is None:
            for released in engine.drain():
                grants.pop(released, None)
            if not arriving:
                break
            continue
        outputs += result.outputs
        grants.update(result.grants)
        for released in result.released:
            grants.pop(released, None)
        check_books(engine, grants)
        nobody_is_preempted_twice_without_progress(engine, before, preempted_at)
        someone_can_finish(engine)
        assert now < 10_000
    engine.check_idle()
    tokens = tokens_by_choice(outputs)
    for index, (prompt, most, n, _, _) in enumerate(asks):
        for choice in range(n):
            got, alone = tokens.get((str(index), choice), []), expected_tokens(prompt, most, choice)
            if str(index) in aborted:
                assert got == alone[: len(got)]
            else:
                assert got == alone


def check_books(engine: Engine, grants: dict[str, int]) -> None:
    """What the messages have told is what the engine's own books say."""
    requests = engine.scheduler._requests.values()
    assert {k: v for k, v in grants.items() if v} == {
        r.request_id: r.lease.reserved for r in requests if r.lease.reserved
    }
    granted = sum(request.lease.reserved for request in requests)
    assert granted == engine.scheduler.reserved_blocks <= engine.num_blocks


def nobody_is_preempted_twice_without_progress(
    engine: Engine, before: dict[str, tuple[RequestStatus, int]], preempted_at: dict[str, int]
) -> None:
    for request in engine.scheduler._requests.values():
        status, generated = before[request.request_id]
        if status is RequestStatus.RUNNING and request.status is RequestStatus.WAITING:
            assert preempted_at.get(request.request_id, -1) < generated
            preempted_at[request.request_id] = generated


def someone_can_finish(engine: Engine) -> None:
    """Safe in Dijkstra's sense once all who may be preempted are taken to hold nothing: those who may not are
    about to draw a token without any growth, and the most senior of the rest can have everything."""
    requests: list[Request] = [r for r in engine.scheduler._requests.values() if r.lease.reserved]
    if not requests:
        return
    senior = min(requests, key=lambda request: request.seniority)
    pinned = [r for r in requests if r.generated_tokens < r.protected_until and r is not senior]
    free = engine.num_blocks - sum(request.lease.reserved for request in [senior, *pinned])
    claims = [(request.lease.reserved, 0) for request in pinned]
    price = engine.layout.request_blocks(
        len(senior.prompt_token_ids), senior.params.max_tokens, senior.params.n
    )
    assert can_all_finish(free, [*claims, (senior.lease.reserved, max(price - senior.lease.reserved, 0))])


@given(
    free=st.integers(0, 12),
    claims=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), max_size=5),
)
def test_the_banker_finds_an_order_if_there_is_one(free: int, claims: list[tuple[int, int]]) -> None:
    def works(order: tuple[tuple[int, int], ...]) -> bool:
        left = free
        for held, claim in order:
            if claim > left:
                return False
            left += held
        return True

    assert can_all_finish(free, claims) == any(works(order) for order in itertools.permutations(claims))
