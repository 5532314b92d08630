"""Engines that die, hang, misbehave and don't start, and what becomes of those they served."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from model_runner.async_engine import AsyncEngine, EngineState, Restarted
from model_runner.config import EngineConfig
from model_runner.door import DoorPolicy
from model_runner.errors import EngineDied, EngineRestarting, Starting, StartupError
from model_runner.supervisor import BackOff, Supervisor
from tests.model_runner.conftest import Harness, RecordingObserver

KILLS, HANGS, RAISES = 901, 902, 903  # as in fake_engine.py
FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


def counted(n: int) -> list[int]:
    return [1000 + position for position in range(n)]


def kill_engine(harness) -> None:
    os.kill(harness.engine.engine_pid, signal.SIGKILL)


async def state_becomes(engine: AsyncEngine, state: EngineState) -> None:
    async with asyncio.timeout(20):
        while engine.state is not state:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def nothing_reserved(harness) -> None:
    async with asyncio.timeout(5):
        while harness.engine.stats.reserved_bytes or harness.engine.stats.used_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_what_has_delivered_nothing_is_run_again_and_the_queue_is_kept(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine({"step_seconds": 0.01}, blocks=4) as harness:
            running, waiting = harness.submit([1], max_tokens=40), harness.submit([1], max_tokens=40)
            first = await anext(running)
            assert first.token_ids == counted(1)
            kill_engine(harness)
            events = [event async for event in running]
            assert events[0] == Restarted()
            assert [token for event in events[1:] for token in event.token_ids] == counted(40)
            assert await harness.collect(waiting) == {(0, 0): counted(40)}
            assert harness.engine.stats.engine_restarts == harness.observer.restarts == 1
            assert [ending.reason for ending in harness.observer.endings] == ["length", "length"]
            await nothing_reserved(harness)

    asyncio.run(scenario())


def test_what_has_delivered_gets_one_clear_ending(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine({"step_seconds": 0.01}) as harness:
            stream = harness.submit(max_tokens=400)
            await anext(stream)
            stream.delivered = True
            await asyncio.sleep(0.05)
            kill_engine(harness)
            await asyncio.sleep(0.05)
            tokens_before_the_end = await anext(stream)
            assert tokens_before_the_end.token_ids
            with pytest.raises(EngineDied):
                await anext(stream)
            (ending,) = harness.observer.endings
            assert (ending.reason, ending.code) == ("error", "internal_error")
            await state_becomes(harness.engine, EngineState.READY)
            assert await harness.collect(harness.submit(max_tokens=3)) == {(0, 0): counted(3)}
            await nothing_reserved(harness)

    asyncio.run(scenario())


def test_delivering_what_a_dead_engine_said_ends_the_request(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine({"step_seconds": 0.01}) as harness:
            stream = harness.submit(max_tokens=400)
            await anext(stream)
            kill_engine(harness)
            await state_becomes(harness.engine, EngineState.RESTARTING)
            stream.stop(0, 0, 1)  # speaks of the old run: it must not end the new one
            assert harness.observer.endings == []
            stream.delivered = True
            with pytest.raises(EngineDied):
                await anext(stream)
            await state_becomes(harness.engine, EngineState.READY)
            assert harness.engine.stats.waiting == harness.engine.stats.running == 0
            await nothing_reserved(harness)

    asyncio.run(scenario())


@pytest.mark.parametrize("poison", [KILLS, RAISES, HANGS])
def test_what_kills_two_engines_is_not_tried_a_third_time(start_engine, poison: int) -> None:
    async def scenario() -> None:
        policy = DoorPolicy(engine_step_timeout=0.4, first_back_off_seconds=0.01)
        async with start_engine(None, policy, blocks=4) as harness:
            poisoned = harness.submit([poison], max_tokens=64)
            waiting = harness.submit([1], max_tokens=3)
            with pytest.raises(EngineDied):
                await harness.collect(poisoned)
            assert await harness.collect(waiting) == {(0, 0): counted(3)}
            assert harness.engine.stats.engine_restarts == 2
            assert [ending.reason for ending in harness.observer.endings] == ["error", "length"]
            await nothing_reserved(harness)

    asyncio.run(scenario())


def test_an_engine_that_is_silent_is_stuck_and_then_dead(start_engine, tmp_path: Path) -> None:
    async def scenario() -> None:
        policy = DoorPolicy(engine_step_timeout=1.0, first_back_off_seconds=0.01)
        harmless = tmp_path / "harmless"
        async with start_engine({"harmless_if": str(harmless)}, policy) as harness:
            hanging = harness.submit([HANGS], max_tokens=2)
            await state_becomes(harness.engine, EngineState.STUCK)
            harmless.touch()
            assert await harness.collect(hanging) == {(0, 0): counted(2)}
            assert harness.engine.state is EngineState.READY
            assert harness.engine.stats.engine_restarts == 1

    asyncio.run(scenario())


def test_an_idle_engine_may_be_silent(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine(None, DoorPolicy(engine_step_timeout=0.2)) as harness:
            await asyncio.sleep(0.6)
            assert await harness.collect(harness.submit(max_tokens=3)) == {(0, 0): counted(3)}
            assert harness.engine.stats.engine_restarts == 0

    asyncio.run(scenario())


def test_while_restarting_the_door_is_closed_and_says_for_how_long(start_engine, tmp_path: Path) -> None:
    async def scenario() -> None:
        dies_if = tmp_path / "broken"
        policy = DoorPolicy(first_back_off_seconds=0.05, most_back_off_seconds=0.1)
        async with start_engine({"fails_at_start_if": str(dies_if)}, policy) as harness:
            dies_if.touch()
            kill_engine(harness)
            await state_becomes(harness.engine, EngineState.RESTARTING)
            with pytest.raises(EngineRestarting) as refused:
                harness.submit()
            assert 0 < refused.value.retry_after_seconds < 10
            async with asyncio.timeout(20):
                while harness.engine.stats.engine_restarts < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert harness.engine.state is EngineState.RESTARTING, "a failed restart is tried again"
            dies_if.unlink()
            await state_becomes(harness.engine, EngineState.READY)
            assert await harness.collect(harness.submit(max_tokens=3)) == {(0, 0): counted(3)}

    asyncio.run(scenario())


def test_a_restart_that_hangs_is_given_up_and_tried_again(start_engine, tmp_path: Path) -> None:
    async def scenario() -> None:
        hangs_if = tmp_path / "hangs"
        policy = DoorPolicy(engine_step_timeout=0.5, first_back_off_seconds=0.05)
        async with start_engine({"hangs_at_start_if": str(hangs_if)}, policy) as harness:
            hangs_if.touch()
            kill_engine(harness)
            await state_becomes(harness.engine, EngineState.RESTARTING)
            await asyncio.sleep(0.5)  # the next one has begun, and hangs
            hangs_if.unlink()
            async with asyncio.timeout(60):
                while harness.engine.state is not EngineState.READY:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert harness.engine.stats.engine_restarts == 2
            assert await harness.collect(harness.submit(max_tokens=3)) == {(0, 0): counted(3)}

    asyncio.run(scenario())


@pytest.mark.parametrize("hangs", ["hangs_at_start_if", "hangs_after_planning_if"])
def test_a_first_start_that_hangs_is_given_up_and_tried_again(
    tmp_path: Path, hangs: str, caplog: pytest.LogCaptureFixture
) -> None:
    hangs_if = tmp_path / "hangs"
    hangs_if.touch()

    async def scenario() -> None:
        knobs = json.dumps({hangs: str(hangs_if)})
        engine = AsyncEngine(
            EngineConfig(model=knobs, cache_dir="", kv_cache_memory_bytes=1 << 20),
            DoorPolicy(engine_start_timeout=2.0, first_back_off_seconds=0.01),
            (observer := RecordingObserver()),
            command=[sys.executable, str(FAKE_ENGINE)],
        )
        try:
            starting = asyncio.create_task(engine.start(lambda loading: None))
            async with asyncio.timeout(60):
                while not observer.restarts:
                    assert engine.state is EngineState.STARTING
                    await asyncio.sleep(0.01)
                hangs_if.unlink()
                await starting
                await engine.wait_ready()
            assert engine.stats.engine_restarts >= 1
            harness = Harness(engine, observer)
            assert await harness.collect(harness.submit(max_tokens=3)) == {(0, 0): counted(3)}
        finally:
            await engine.close()

    asyncio.run(scenario())
    assert "it said nothing for 2 s while it started; starting another in 0.0 s" in caplog.text


def test_a_first_start_may_take_for_ever_if_told_so() -> None:
    clock = [0.0]
    supervisors = [
        Supervisor(
            None,  # type: ignore[arg-type]
            EngineConfig(model="", cache_dir=""),
            [],
            step_timeout_seconds=60.0,
            start_timeout_seconds=seconds,
            back_off=BackOff(0.5, 30.0),
            clock=lambda: clock[0],
        )
        for seconds in (0.0, 900.0)
    ]
    clock[0] = 899.0
    assert [each._overdue() for each in supervisors] == [None, None]
    clock[0] = 1e6
    for_ever, bounded = supervisors
    assert for_ever._overdue() is None
    assert bounded._overdue() == "it said nothing for 900 s while it started"


def test_closing_while_restarting_leaves_nobody_waiting(start_engine, tmp_path: Path) -> None:
    async def scenario() -> None:
        broken = tmp_path / "broken"
        async with start_engine({"dies_at_start_if": str(broken), "step_seconds": 0.01}) as harness:
            stream = harness.submit(max_tokens=100)
            broken.touch()
            kill_engine(harness)
            await state_becomes(harness.engine, EngineState.RESTARTING)
            await harness.engine.close()
            with pytest.raises(Exception, match="shut down"):
                await harness.collect(stream)
            assert len(harness.observer.endings) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("knob", "message"),
    [
        ("fails_at_start_if", "no such model"),
        ("dies_at_start_if", "exit code 3"),
        ("is_killed_at_start_if", "memory runs out.*--kv-cache-memory"),
    ],
)
def test_a_first_start_that_fails_says_why(start_engine, tmp_path: Path, knob: str, message: str) -> None:
    async def scenario() -> None:
        with pytest.raises(StartupError, match=message):
            async with start_engine({knob: str(tmp_path)}):
                pytest.fail("it must not start")

    asyncio.run(scenario())


def test_a_command_that_cannot_be_run_says_so(start_engine) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(
            EngineConfig(model="", cache_dir=""), DoorPolicy(), observer(), command=["/no/such/python"]
        )
        with pytest.raises(StartupError, match="could not be started"):
            await engine.start(lambda loading: None)
        assert engine.state is EngineState.FAILED
        await engine.close()

    def observer():  # nothing is ever told to it
        return None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("folder", "message"), [("no/such", "TMPDIR"), ("long" * 30, "could not be started")]
)
def test_a_socket_that_can_lie_nowhere_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, message: str
) -> None:
    if "/" not in folder:
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))

    async def scenario() -> None:
        engine = AsyncEngine(
            EngineConfig(model="", cache_dir=""),
            DoorPolicy(),
            None,  # type: ignore[arg-type]
            command=[sys.executable, str(FAKE_ENGINE)],
        )
        with pytest.raises(StartupError, match=message):
            await engine.start(lambda loading: None)
        await engine.close()

    asyncio.run(scenario())


def test_an_engine_that_talks_nonsense_is_ended() -> None:
    script = (
        "import sys, zmq; s = zmq.Context().socket(zmq.PAIR); s.connect(sys.argv[2]); s.send(b'nonsense');"
        "sys.stdin.read()"
    )

    async def scenario() -> None:
        engine = AsyncEngine(
            EngineConfig(model="", cache_dir=""),
            DoorPolicy(),
            None,  # type: ignore[arg-type]
            command=[sys.executable, "-c", script],
        )
        with pytest.raises(StartupError, match="said what it must not"):
            await engine.start(lambda loading: None)
        await engine.close()

    asyncio.run(scenario())


def test_prices_are_known_before_the_engine_is_ready(start_engine) -> None:
    async def scenario() -> None:
        config = EngineConfig(model='{"load_seconds": 0.5}', cache_dir="", kv_cache_memory_bytes=1 << 20)
        stages: list[str] = []
        refused: list[str] = []

        class Observer:
            def decided(self, decision: str, reason: str, projected_bytes: int) -> None:
                refused.append(reason)

        engine = AsyncEngine(
            config,
            DoorPolicy(),
            Observer(),  # type: ignore[arg-type]
            command=[sys.executable, str(FAKE_ENGINE)],
        )
        model = await engine.start(lambda loading: stages.append(loading.stage))
        assert stages == ["counting"]
        assert engine.stats.kv_budget_bytes == model.kv_budget_bytes == 1 << 20
        assert engine.state is EngineState.STARTING
        from model_runner.async_engine import Submission
        from model_runner.types import SamplingParams

        with pytest.raises(Starting):
            engine.submit(Submission("r", [[1]], SamplingParams(max_tokens=1), streaming=False))
        assert refused == ["starting"]
        await engine.wait_ready()
        assert engine.state is EngineState.READY
        await engine.close()

    asyncio.run(scenario())


def test_signals_are_for_the_parent(start_engine) -> None:
    async def scenario() -> None:
        async with start_engine() as harness:
            pid = harness.engine.engine_pid
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid, number)
            assert os.getsid(pid) != os.getsid(0)
            assert await harness.collect(harness.submit(max_tokens=3)) == {(0, 0): counted(3)}
            await harness.engine.close()
            assert not psutil.pid_exists(pid)

    asyncio.run(scenario())


def test_back_off_doubles_and_forgets() -> None:
    back_off = BackOff(first_seconds=0.5, most_seconds=3.0)
    assert [back_off.after_death(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert back_off.after_death(61.0) == 0.5
    assert back_off.after_death(1.0) == 1.0
