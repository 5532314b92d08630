from __future__ import annotations

import pytest

from model_runner.core.block_pool import FREED
from model_runner.core.pace import Pace
from model_runner.messages import Submit
from model_runner.types import FinishReason, SamplingParams, StepStats
from tests.model_runner.core.fake_runner import Engine, expected_tokens, next_token, tokens_by_choice


def batch_shape(engine: Engine) -> list[tuple[int, int]]:
    """(start, tokens) of every sequence of the last batch."""
    return [(sequence.start, len(sequence.token_ids)) for sequence in engine.fake.batches[-1].sequences]


# -- what runs when ------------------------------------------------------------------------------------------


def test_decodes_run_every_step_and_prompts_share_what_is_left() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.ask("a", range(3), max_tokens=20)
    engine.step()
    engine.ask("long", range(12), max_tokens=4)
    engine.ask("short", range(4), max_tokens=4)
    engine.step()
    # The short one has up to half of what is left for prompts, before the long one has the rest.
    assert batch_shape(engine) == [(3, 1), (0, 3), (0, 4)]
    engine.step()
    assert batch_shape(engine) == [(4, 1), (3, 1), (4, 6)]
    engine.step()
    assert batch_shape(engine) == [(5, 1), (4, 1), (10, 2)]
    engine.step()
    assert batch_shape(engine) == [(6, 1), (5, 1), (12, 1)]


def test_prompts_of_like_length_go_one_after_the_other() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.ask("first", range(12), max_tokens=4)
    engine.ask("second", range(11), max_tokens=4)
    engine.step()
    assert batch_shape(engine) == [(0, 8)]
    engine.step()
    assert batch_shape(engine) == [(8, 4), (0, 4)]


def test_a_long_prompt_does_not_hold_up_a_short_one_behind_another_long_one() -> None:
    engine = Engine(max_num_batched_tokens=10, num_blocks=1000)
    engine.ask("long", range(300), max_tokens=2)
    engine.ask("long too", range(300), max_tokens=2)
    engine.ask("short", range(8), max_tokens=2)
    first = []
    for _ in range(4):
        result = engine.step()
        assert result is not None
        first += [output.request_id for output in result.outputs]
    assert first == ["short", "short"]
    assert {output.request_id for output in engine.run()} == {"long", "long too"}


def test_prompts_leave_the_time_that_decodes_should_not_take_longer_than() -> None:
    engine = Engine(max_num_batched_tokens=512, block_size=4, num_blocks=2000)
    engine.aim_at(0.050, Pace(decode_step_seconds=0.020, prefill_tokens_per_second=1000.0))
    engine.ask("alone", range(100), max_tokens=50)
    engine.step()
    assert batch_shape(engine) == [(0, 100)], "nobody decodes, so nobody is kept waiting"
    engine.ask("next", range(400), max_tokens=2)
    engine.step()
    assert batch_shape(engine) == [(100, 1), (0, 30)]
    for _ in range(200):  # the machine turns out to be half as fast
        engine.observe(StepStats(0.040, 0, 1, 1, 0, 1, 1))
    engine.step()
    assert batch_shape(engine) == [(101, 1), (30, 10)]
    for _ in range(200):  # not feasible: prompts get on by a block at least
        engine.observe(StepStats(0.080, 0, 1, 1, 0, 1, 1))
    engine.step()
    assert batch_shape(engine) == [(102, 1), (40, 4)]


def test_first_come_first_served_and_choices_count_as_what_they_are() -> None:
    engine = Engine(max_num_seqs=4)
    engine.ask("a", [1], max_tokens=3)
    engine.ask("b", [2], max_tokens=3, n=4)
    engine.ask("c", [3], max_tokens=3)
    result = engine.step()
    assert result is not None
    assert (result.running_sequences, result.waiting_sequences) == (1, 5)  # c doesn't overtake b
    engine.step()
    engine.step()
    result = engine.step()
    assert result is not None
    assert (result.running_sequences, result.waiting_sequences) == (4, 1)
    assert tokens_by_choice(engine.run())["c", 0] == expected_tokens([3], 3)


def test_a_request_with_more_choices_than_sequences_runs_alone() -> None:
    engine = Engine(max_num_seqs=2, max_num_batched_tokens=2)
    engine.ask("a", [1], max_tokens=2)
    engine.ask("many", [2, 3], max_tokens=3, n=5)
    engine.ask("b", [4], max_tokens=2)
    tokens = tokens_by_choice(engine.run())
    assert {choice: tokens["many", choice] for choice in range(5)} == {
        choice: expected_tokens([2, 3], 3, choice) for choice in range(5)
    }
    together = [len(batch.sequences) for batch in engine.fake.batches]
    assert together == [1, 1, 1, 5, 5, 1, 1]


def test_a_budget_below_the_number_of_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs=9"):
        Engine(max_num_seqs=9, max_num_batched_tokens=8)


def test_sequence_ids_are_never_used_again() -> None:
    engine = Engine()
    for name in ("a", "b"):
        engine.ask(name, [1], max_tokens=1, n=3)
        engine.run()
    ids = [sample.sequence_id for batch in engine.fake.batches for sample in batch.samples]
    assert ids == list(range(6))


# -- how a choice ends ---------------------------------------------------------------------------------------


def test_the_last_token_drawn_is_never_written() -> None:
    engine = Engine()
    engine.ask("a", range(4), max_tokens=5)
    engine.run()
    written = [s.start + len(s.token_ids) for batch in engine.fake.batches for s in batch.sequences]
    assert max(written) == 4 + 5 - 1


def test_stop_tokens_end_a_choice_and_are_delivered() -> None:
    prompt = [1, 2, 3]
    free = expected_tokens(prompt, 20)
    stop = free[6]
    expected = free[: free.index(stop) + 1]
    engine = Engine(eos_token_ids=[stop])
    engine.ask("eos", prompt, max_tokens=20)
    engine.ask("ignored", prompt, max_tokens=20, ignore_eos=True)
    engine.ask("asked", prompt, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    outputs = engine.run()
    tokens = tokens_by_choice(outputs)
    assert tokens["eos", 0] == tokens["asked", 0] == expected
    assert tokens["ignored", 0] == free
    reasons = {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
    assert reasons == {"eos": FinishReason.STOP, "asked": FinishReason.STOP, "ignored": FinishReason.LENGTH}


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    prompt = [1, 2, 3]
    eos = next_token(prompt, 0)
    engine = Engine(eos_token_ids=[eos])
    engine.ask("a", prompt, max_tokens=9, min_tokens=3, stop_token_ids=(49,))
    tokens = tokens_by_choice(engine.run())["a", 0]
    assert eos not in tokens[:3]
    assert len(tokens) >= 3
    banned = [set(batch.samples[0].banned_token_ids) for batch in engine.fake.batches]
    assert banned[:3] == [{eos, 49}] * 3
    assert all(not later for later in banned[3:])


def test_the_models_context_ends_a_choice_too() -> None:
    engine = Engine(max_model_len=10)
    engine.ask("a", range(7), max_tokens=9)
    outputs = engine.run()
    assert tokens_by_choice(outputs)["a", 0] == expected_tokens(range(7), 3)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_logprobs_come_with_their_tokens() -> None:
    engine = Engine()
    engine.ask("with", [1], max_tokens=3, logprobs=0)
    engine.ask("without", [1], max_tokens=3)
    for output in engine.run():
        if output.request_id == "with":
            assert output.logprobs is not None
            assert [entry.token_id for entry in output.logprobs] == output.token_ids
        else:
            assert output.logprobs is None


@pytest.mark.parametrize("budget", [8, 5, 100])
def test_prompt_logprobs_add_up_over_chunks_and_leave_once(budget: int) -> None:
    engine = Engine(max_num_batched_tokens=budget, max_num_seqs=3)
    prompt = [7, 3, 9, 4, 1, 8, 2, 6, 5, 0, 3, 3]
    engine.ask("a", prompt, max_tokens=3, n=2, prompt_logprobs=0)
    engine.ask("b", prompt, max_tokens=3)
    carriers = [output for output in engine.run() if output.prompt_logprobs is not None]
    assert [(output.request_id, output.choice) for output in carriers] == [("a", 0)]
    entries = carriers[0].prompt_logprobs
    assert entries is not None
    assert [entry.token_id for entry in entries] == prompt[1:]


# -- n choices -----------------------------------------------------------------------------------------------


def test_choices_share_full_blocks_and_copy_the_partial_one() -> None:
    engine = Engine([None])
    price = engine.ask("a", range(10), max_tokens=6, n=3)
    assert price == 2 + 3 * 2
    engine.step()
    assert engine.scheduler.pool.used == 3  # nothing is copied before it must be
    engine.step()
    batch = engine.fake.batches[-1]
    assert len(batch.block_copies) == 2
    assert engine.scheduler.pool.used == 2 + 3
    tables = [sequence.block_tables[0] for sequence in batch.sequences]
    assert {tuple(table[:2]) for table in tables} == {tuple(tables[0][:2])}
    assert len({table[2] for table in tables}) == 3
    tokens = tokens_by_choice(engine.run())
    for choice in range(3):
        assert tokens["a", choice] == expected_tokens(range(10), 6, choice)[2:]


@pytest.mark.parametrize(("prompt", "max_tokens"), [(8, 6), (10, 1)])
def test_nothing_is_copied_without_need(prompt: int, max_tokens: int) -> None:
    engine = Engine([None])
    engine.ask("a", range(prompt), max_tokens=max_tokens, n=3)
    engine.run()
    assert not any(batch.block_copies for batch in engine.fake.batches)


def test_a_choice_that_leaves_before_the_copy_needs_none() -> None:
    engine = Engine([None, 6])
    engine.ask("a", range(10), max_tokens=6, n=3)
    engine.step()
    engine.abort("a", 0)
    engine.abort("a", 2)
    engine.step()
    assert engine.fake.batches[-1].block_copies == []
    assert tokens_by_choice(engine.run())["a", 1] == expected_tokens(range(10), 6, 1)[2:]


def test_choice_0_may_leave_while_the_prompt_is_computed() -> None:
    engine = Engine([None, 6], max_num_batched_tokens=8)
    engine.ask("a", range(20), max_tokens=6, n=2, prompt_logprobs=0)
    engine.step()
    engine.abort("a", 0)
    tokens = tokens_by_choice(engine.run())
    assert tokens == {("a", 1): expected_tokens(range(20), 6, 1)}


# -- blocks --------------------------------------------------------------------------------------------------


def test_sliding_groups_free_what_falls_out_of_the_window_each_step() -> None:
    engine = Engine([None, 6])
    engine.ask("a", range(10), max_tokens=30)
    held = []
    while (result := engine.step()) is not None:
        held.append(result.used_blocks)
        tables = [sequence.block_tables for sequence in engine.fake.batches[-1].sequences]
        if tables and tables[0][1]:
            assert sum(block != FREED for block in tables[0][1]) <= engine.layout.cap_blocks(6)
    assert held[0] == 3 + 2  # positions 5 … 9 are in sight of position 10
    assert held[-1] == 0
    assert max(engine.fake.used_blocks) == engine.layout.request_blocks(10, 30) == 10 + 3


def test_a_chunk_borrows_from_the_headroom_and_gives_back_within_the_step() -> None:
    engine = Engine([4], max_num_batched_tokens=32, num_blocks=2)
    price = engine.ask("a", range(64), max_tokens=2)
    assert price == 2
    result = engine.step()
    assert result is not None
    assert batch_shape(engine) == [(0, 32)]
    assert result.used_blocks <= price
    engine.run()


@pytest.mark.parametrize(("headroom", "chunks"), [(8, [40, 8, 8]), (4, [24, 8, 8]), (0, [8, 8, 8])])
def test_prompts_that_share_an_exhausted_headroom_run_shorter_chunks(
    headroom: int, chunks: list[int]
) -> None:
    engine = Engine([4], max_num_batched_tokens=96, headroom_blocks=headroom)
    for name in "abc":
        engine.ask(name, range(64), max_tokens=2)  # 2 blocks each are reserved
    engine.step()
    assert batch_shape(engine) == [(0, tokens) for tokens in chunks]
    assert tokens_by_choice(engine.run())["b", 0] == expected_tokens(range(64), 2)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6])
def test_every_prompt_goes_on_without_any_headroom(window: int) -> None:
    engine = Engine([window, window], headroom_blocks=0)
    for name in "abc":
        engine.ask(name, range(30), max_tokens=9, n=2)
    tokens = tokens_by_choice(engine.run())
    assert all(tokens[name, c] == expected_tokens(range(30), 9, c) for name in "abc" for c in range(2))


def test_an_ended_request_gives_back_at_once() -> None:
    engine = Engine([None, 6])
    engine.ask("a", range(10), max_tokens=1, n=2)
    engine.ask("b", range(3), max_tokens=20)
    result = engine.step()
    assert result is not None
    assert result.released == ["a"]
    assert result.used_blocks == engine.layout.sequence_blocks(3)


# -- what must never happen ----------------------------------------------------------------------------------


def test_the_doors_mistakes_assert() -> None:
    engine = Engine(num_blocks=4)
    engine.ask("a", range(4), max_tokens=5)
    with pytest.raises(AssertionError, match="already here"):
        engine.ask("a", range(4), max_tokens=5)
    with pytest.raises(AssertionError, match="more blocks are granted than there are"):
        engine.ask("b", range(12), max_tokens=1)
    engine = Engine()
    params = SamplingParams(max_tokens=5)
    with pytest.raises(AssertionError, match="reserved 1 blocks of 2"):
        engine.submit(Submit("c", [1, 2, 3, 4], params, reserved_blocks=1))
