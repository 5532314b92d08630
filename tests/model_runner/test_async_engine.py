"""The door, the books and the streams, over a real engine process."""

from __future__ import annotations

import asyncio

import pytest

from model_runner.async_engine import EngineState, Tokens
from model_runner.core.obstacles import Obstacle
from model_runner.door import DoorPolicy
from model_runner.errors import (
    Draining,
    InvalidRequest,
    KVCacheBudgetExceeded,
    LoadError,
    QueueFull,
    QueueTimeout,
    WaitTooLong,
)
from model_runner.types import FinishReason

FIRST_TOKEN = 1000


def counted(n: int, choice: int = 0) -> list[int]:
    return [FIRST_TOKEN + 100 * choice + position for position in range(n)]


async def nothing_reserved(harness) -> None:
    """The engine's word that the blocks are back is on its way; it comes within a step."""
    async with asyncio.timeout(5):
        while harness.engine.stats.reserved_bytes or harness.engine.stats.used_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    stats = harness.engine.stats
    assert (stats.running, stats.waiting, stats.queued_bytes) == (0, 0, 0)


def test_one_request_from_its_price_to_its_ending(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine() as harness:
            assert harness.engine.state is EngineState.READY
            stream = harness.submit([1, 2, 3], max_tokens=20)  # 22 tokens: 2 blocks
            assert stream.projected_bytes == 2 * harness.engine.model.layout.block_bytes
            assert harness.engine.stats.reserved_bytes == stream.projected_bytes
            assert await harness.collect(stream) == {(0, 0): counted(20)}
            await nothing_reserved(harness)
            (ending,) = harness.observer.endings
            assert (ending.reason, ending.prompt_tokens, ending.generated_tokens) == ("length", 3, 20)
            assert ending.reserved_bytes == stream.projected_bytes
            assert 0 <= ending.run_seconds <= ending.e2e_seconds
            observer = harness.observer
            assert (observer.prompt_tokens, observer.generated_tokens) == (3, 20)
            assert len(observer.first_tokens) == 1
            assert len(observer.inter_tokens) == 19
            assert observer.queue_times == [0.0]
            assert observer.decisions == [("admitted", "", stream.projected_bytes)]

    asyncio.run(scenario())


def test_several_prompts_and_choices_are_one_request(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine() as harness:
            stream = harness.submit([1, 2], [3], max_tokens=5, n=3)
            collected = await harness.collect(stream)
            assert collected == {(p, c): counted(5, c) for p in range(2) for c in range(3)}
            (ending,) = harness.observer.endings
            assert (ending.choices, ending.generated_tokens, ending.prompt_tokens) == (6, 30, 3)
            await nothing_reserved(harness)

    asyncio.run(scenario())


def test_more_sequences_than_places_in_the_batch_run_in_turns(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine(max_num_seqs=2) as harness:
            collected = await harness.collect(harness.submit([1], [2], [3], max_tokens=4, n=2))
            assert len(collected) == 6
            await nothing_reserved(harness)
            with pytest.raises(InvalidRequest) as refused:
                harness.submit([1], n=3)
            assert refused.value.param == "n"

    asyncio.run(scenario())


def test_what_can_never_fit_is_refused_with_the_figures(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine(blocks=4) as harness:
            with pytest.raises(KVCacheBudgetExceeded) as refused:
                harness.submit([1] * 10, max_tokens=100)
            error = refused.value
            block_bytes = harness.engine.model.layout.block_bytes
            assert (error.required_bytes, error.budget_bytes) == (7 * block_bytes, 4 * block_bytes)
            assert error.largest_max_tokens == 55  # 10 + 55 - 1 = 64 tokens: 4 blocks
            harness.submit([1] * 10, max_tokens=55).abort("client_disconnected")
            with pytest.raises(KVCacheBudgetExceeded) as refused:
                harness.submit([1] * 10, [1] * 10, max_tokens=100)
            assert refused.value.largest_max_tokens == 23  # two blocks each

    asyncio.run(scenario())


def test_a_small_one_passes_one_that_does_not_fit_yet_which_then_has_its_turn(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine({"step_seconds": 0.005}, blocks=4) as harness:
            order: list[str] = []

            async def run(name: str, tokens: int) -> None:
                stream = harness.submit([1], max_tokens=tokens)
                await harness.collect(stream)
                order.append(name)

            await asyncio.gather(run("first", 20), run("second", 64), run("third", 2))
            assert order == ["third", "first", "second"]  # the second needs all there is
            assert [decision for decision, _, _ in harness.observer.decisions] == [
                "admitted",
                "queued",
                "queued",
            ]
            await nothing_reserved(harness)

    asyncio.run(scenario())


def test_a_burst_in_one_turn_cannot_pass_the_budget(start_engine) -> None:
    async def scenario() -> None:
        policy = DoorPolicy(max_queue_requests=100)
        async with start_engine(None, policy, blocks=8) as harness:
            streams, refused = [], []
            for _ in range(1000):
                try:
                    streams.append(harness.submit([1], max_tokens=16))
                except LoadError as error:
                    refused.append(error)
                stats = harness.engine.stats
                assert stats.reserved_bytes <= stats.kv_budget_bytes
            assert (len(streams), len(refused)) == (108, 892)
            assert all(isinstance(error, QueueFull) for error in refused)
            assert all(error.retry_after_seconds > 0 for error in refused)
            results = await asyncio.gather(*map(harness.collect, streams))
            assert all(result == {(0, 0): counted(16)} for result in results)
            assert len(harness.observer.endings) == 108
            await nothing_reserved(harness)

    asyncio.run(scenario())


def test_the_door_and_the_queue_can_be_looked_at(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine({"step_seconds": 0.01}, blocks=8) as harness:
            block_bytes = harness.engine.model.layout.block_bytes
            running = harness.submit([1], max_tokens=100, request_id="runs")  # 7 of 8 blocks
            waiting = harness.submit([1], max_tokens=40, request_id="waits")
            (row,) = harness.engine.queue(most=10)
            assert (row.place, row.request_id, row.tenant) == (1, "waits", "default")
            assert row.waits_for is Obstacle.ROOM
            assert row.projected_bytes == 3 * block_bytes
            assert 0 < row.expected_in_seconds < row.deadline_in_seconds <= 60
            door = harness.engine.door
            assert (door.policy, door.queue_lengths) == ("strict", {"default": 1})
            assert door.predicted_peak_bytes == 7 * block_bytes
            running.abort("client_disconnected")
            assert await harness.collect(waiting) == {(0, 0): counted(40)}
            assert harness.engine.queue(most=10) == []
            await nothing_reserved(harness)
            assert harness.engine.door.byte_seconds == {}
            assert harness.observer.byte_seconds > 0
            left, finished = harness.observer.endings
            assert (left.predicted_wait_seconds, finished.was_admitted) == (None, True)
            assert finished.predicted_wait_seconds == pytest.approx(row.expected_in_seconds, abs=0.1)

    asyncio.run(scenario())


def test_a_wait_predicted_past_the_limit_is_refused_at_once(start_engine) -> None:
    async def scenario() -> None:
        policy = DoorPolicy(max_queue_seconds=0.9)
        async with start_engine({"step_seconds": 0.05}, policy, blocks=8) as harness:
            # Both need all blocks; the first has them for 128 steps of 10 ms at most.
            running = harness.submit([1], max_tokens=128)
            with pytest.raises(WaitTooLong) as refused:
                harness.submit([1], max_tokens=128)
            assert 0.9 < refused.value.retry_after_seconds <= 1.28 * 1.1 + 0.01
            assert "32 KiB" in refused.value.message
            running.abort("client_disconnected")
            await nothing_reserved(harness)

    asyncio.run(scenario())


def test_a_deadline_in_the_queue(start_engine) -> None:
    async def scenario() -> None:
        policy = DoorPolicy(max_queue_seconds=0.5)
        async with start_engine({"step_seconds": 0.05}, policy, blocks=4) as harness:
            running = harness.submit([1], max_tokens=49)  # promised for 0.49 s, takes 2.5
            waiting = harness.submit([1] * 7, max_tokens=1)
            with pytest.raises(QueueTimeout) as timed_out:
                await anext(waiting)
            assert "waited 0.5 seconds" in timed_out.value.message
            (ending,) = harness.observer.endings
            assert (ending.reason, ending.code, ending.reserved_bytes) == ("timeout", "queue_timeout", 0)
            running.abort("client_disconnected")
            await nothing_reserved(harness)
            assert sum(stats.prefill_tokens for stats in harness.observer.steps) == 1, (
                "it was never prefilled"
            )

    asyncio.run(scenario())


def test_abort_while_running_and_while_waiting(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine({"step_seconds": 0.01}, blocks=4) as harness:
            running = harness.submit([1], max_tokens=64)
            waiting = harness.submit([1], max_tokens=64)
            after = harness.submit([1], max_tokens=3)
            await anext(running)
            waiting.abort("client_disconnected")
            assert harness.engine.stats.waiting == 1
            running.abort("client_disconnected")
            running.abort("client_disconnected")
            assert harness.engine.stats.reserved_bytes > 0, "only the engine's word gives bytes back"
            assert await harness.collect(after) == {(0, 0): counted(3)}
            assert [event async for event in waiting] == []
            causes = [(ending.reason, ending.abort_cause) for ending in harness.observer.endings]
            assert causes == [("abort", "client_disconnected")] * 2 + [("length", None)]
            await nothing_reserved(harness)

    asyncio.run(scenario())


def test_a_cancelled_reader_is_a_client_that_left(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine({"step_seconds": 0.01}) as harness:
            reader = asyncio.create_task(harness.collect(harness.submit(max_tokens=500)))
            await asyncio.sleep(0.05)
            reader.cancel()
            await asyncio.wait({reader})
            (ending,) = harness.observer.endings
            assert ending.abort_cause == "client_disconnected"
            await nothing_reserved(harness)

    asyncio.run(scenario())


def test_a_stop_string_ends_one_choice_and_then_all(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine({"step_seconds": 0.005}) as harness:
            stream = harness.submit([1], max_tokens=200, n=2)
            seen = {0: 0, 1: 0}
            async for event in stream:
                assert isinstance(event, Tokens)
                assert not (event.choice == 0 and seen[0] >= 5), "nothing comes after the stop"
                seen[event.choice] += len(event.token_ids)
                if seen[event.choice] >= (5 if event.choice == 0 else 9):
                    stream.stop(0, event.choice, 4 + event.choice)
            (ending,) = harness.observer.endings
            assert (ending.reason, ending.generated_tokens) == ("stop", 4 + 5)
            await nothing_reserved(harness)

    asyncio.run(scenario())


def test_a_slow_reader_gets_its_tokens_in_fewer_events(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine() as harness:
            stream = harness.submit(max_tokens=50)
            await nothing_reserved(harness)
            events = [event async for event in stream]
            assert len(events) == 1
            assert events[0].token_ids == counted(50)
            assert events[0].finish_reason is FinishReason.LENGTH

    asyncio.run(scenario())


def test_the_same_request_id_twice_at_once(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine() as harness:
            streams = [harness.submit(request_id="mine", max_tokens=5) for _ in range(2)]
            for collected in await asyncio.gather(*map(harness.collect, streams)):
                assert collected == {(0, 0): counted(5)}
            assert [ending.request_id for ending in harness.observer.endings] == ["mine", "mine"]

    asyncio.run(scenario())


def test_drain_finishes_what_it_has_and_takes_nothing_new(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine({"step_seconds": 0.005}, blocks=4) as harness:
            running, waiting = harness.submit([1], max_tokens=40), harness.submit([1], max_tokens=40)
            draining = asyncio.create_task(harness.engine.drain(10))
            await asyncio.sleep(0)
            assert harness.engine.state is EngineState.DRAINING
            with pytest.raises(Draining):
                harness.submit()
            assert harness.observer.decisions[-1][:2] == ("rejected", "draining")
            await draining
            for stream in (running, waiting):
                assert await harness.collect(stream) == {(0, 0): counted(40)}
            await harness.engine.close()
            assert harness.engine.state is EngineState.STOPPED

    asyncio.run(scenario())


def test_drain_ends_what_takes_too_long(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine({"step_seconds": 0.01}) as harness:
            stream = harness.submit(max_tokens=500)
            await harness.engine.drain(0.1)
            with pytest.raises(Draining):
                await harness.collect(stream)
            (ending,) = harness.observer.endings
            assert (ending.reason, ending.abort_cause, ending.code) == ("abort", "shutdown", "draining")
            await nothing_reserved(harness)

    asyncio.run(scenario())


def test_a_crowd_that_is_shut_out_may_come_back_soon(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine({"step_seconds": 0.01}, blocks=4) as harness:
            streams = [harness.submit([1], max_tokens=64) for _ in range(60)]
            await harness.engine.drain(0.0)
            for stream in streams:
                with pytest.raises(Draining) as refused:
                    await harness.collect(stream)
                assert 1.0 <= refused.value.retry_after_seconds <= 1.1
            await nothing_reserved(harness)

    asyncio.run(scenario())


def test_what_was_measured_takes_the_place_of_what_was_planned(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine() as harness:
            assert harness.engine.model.weights_held_bytes == 7

    asyncio.run(scenario())
