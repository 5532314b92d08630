from __future__ import annotations

import gzip
import shutil
import subprocess
import time
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families as parse_text

from app.metrics import REFUSALS, Metrics
from app.settings import Settings
from model_runner.async_engine import EngineState, EngineStats
from model_runner.messages import ModelInfo
from model_runner.types import Ending, EngineObserver, FinishReason, StepStats
from tests.app.fake_engine import FakeEngine, model_info

BLOCK_BYTES = model_info().layout.block_bytes


class Engine:
    """Levels that a test may set."""

    def __init__(self) -> None:
        self.state = EngineState.READY
        self.model: ModelInfo = model_info()
        self.stats: EngineStats = replace(
            FakeEngine().stats,
            reserved_bytes=20 * BLOCK_BYTES,
            used_bytes=12 * BLOCK_BYTES,
            used_blocks=12,
            running=3,
            waiting=2,
            queue_length=2,
            queued_bytes=9 * BLOCK_BYTES,
        )


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(Settings(served_model_name="smol"))


@pytest.fixture
def engine(metrics: Metrics) -> Engine:
    attached = Engine()
    metrics.attach(attached)
    return attached


def page(metrics: Metrics) -> dict[str, float]:
    text = metrics.render()[0].decode()
    return {
        f"{sample.name}{sorted(sample.labels.items()) or ''}": sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def test_it_is_an_observer_of_the_engine(metrics: Metrics) -> None:
    observer: EngineObserver = metrics
    assert observer is metrics


def test_levels_are_read_when_somebody_looks(metrics: Metrics, engine: Engine) -> None:
    now = page(metrics)
    assert now["plimsoll_kv_cache_budget_bytes"] == 64 * BLOCK_BYTES
    assert now["plimsoll_kv_cache_reserved_bytes"] == 20 * BLOCK_BYTES
    assert now["plimsoll_kv_cache_used_bytes"] == 12 * BLOCK_BYTES
    assert now["plimsoll_kv_cache_free_bytes"] == 44 * BLOCK_BYTES
    assert (now["plimsoll_kv_cache_blocks"], now["plimsoll_kv_cache_blocks_used"]) == (64, 12)
    assert now["plimsoll_kv_cache_bytes_per_token"] == 2 * 30 * 3 * 64 * 4
    assert (now["plimsoll_queue_length"], now["plimsoll_queued_bytes"]) == (2, 9 * BLOCK_BYTES)
    assert (now["plimsoll_requests_running"], now["plimsoll_requests_waiting"]) == (3, 2)
    engine.stats = replace(engine.stats, reserved_bytes=0, running=0)
    assert page(metrics)["plimsoll_kv_cache_reserved_bytes"] == 0
    assert page(metrics)["plimsoll_requests_running"] == 0


def test_exactly_one_state_holds(metrics: Metrics, engine: Engine) -> None:
    for state in EngineState:
        engine.state = state
        now = page(metrics)
        shown = {each.value: now[f"plimsoll_engine_state[('state', '{each.value}')]"] for each in EngineState}
        assert shown == {each.value: float(each is state) for each in EngineState}


def test_the_gateways_names(metrics: Metrics, engine: Engine) -> None:
    now = page(metrics)
    labels = "[('engine', '0'), ('model_name', 'smol')]"
    assert now[f"vllm:num_requests_running{labels}"] == 3
    assert now[f"vllm:num_requests_waiting{labels}"] == 2
    assert now[f"vllm:kv_cache_usage_perc{labels}"] == 20 * BLOCK_BYTES / engine.stats.kv_budget_bytes
    config = next(name for name in now if name.startswith("vllm:cache_config_info"))
    assert "('block_size', '16')" in config
    assert "('num_gpu_blocks', '64')" in config


def test_every_label_is_there_from_the_start_at_zero(metrics: Metrics) -> None:
    now = page(metrics)
    expected = [("admitted", ""), ("queued", ""), *(("rejected", reason.value) for reason in REFUSALS)]
    for decision, reason in expected:
        assert now[f"plimsoll_admissions_total[('decision', '{decision}'), ('reason', '{reason}')]"] == 0
    for finish in FinishReason:
        assert now[f"plimsoll_requests_ended_total[('reason', '{finish.value}')]"] == 0
    for cause in ("client_disconnected", "shutdown", "server_fault"):
        assert now[f"plimsoll_aborts_total[('cause', '{cause}')]"] == 0


def test_events_are_counted(metrics: Metrics) -> None:
    metrics.decided("rejected", "queue_full", 5 * BLOCK_BYTES)
    metrics.decided("admitted", "", 2 * BLOCK_BYTES)
    metrics.dequeued(0.0)
    metrics.first_token(0.2)
    metrics.inter_token(0.03)
    metrics.tokens(prompt=33, generated=1)
    metrics.tokens(prompt=0, generated=4)
    metrics.stepped(StepStats(0.04, 33, 2, 3, 0, 12, 4, context_tokens=70))
    metrics.ended(
        Ending(request_id="r", tenant="a", reason="abort", abort_cause="client_disconnected", e2e_seconds=2)
    )
    metrics.engine_restarted()
    now = page(metrics)
    assert now["plimsoll_admissions_total[('decision', 'rejected'), ('reason', 'queue_full')]"] == 1
    assert now["plimsoll_admissions_total[('decision', 'admitted'), ('reason', '')]"] == 1
    assert now["plimsoll_request_projected_bytes_sum"] == 7 * BLOCK_BYTES
    assert now["plimsoll_queue_time_seconds_count"] == 1
    assert now["plimsoll_time_to_first_token_seconds_sum"] == 0.2
    assert now["plimsoll_inter_token_latency_seconds_sum"] == 0.03
    assert (now["plimsoll_prompt_tokens_total"], now["plimsoll_generated_tokens_total"]) == (33, 5)
    assert now["plimsoll_step_duration_seconds_sum"] == 0.04
    assert now["plimsoll_batch_size_sum"] == 4
    assert (now["plimsoll_step_tokens_total"], now["plimsoll_context_tokens_total"]) == (35, 70)
    assert now["plimsoll_requests_ended_total[('reason', 'abort')]"] == 1
    assert now["plimsoll_aborts_total[('cause', 'client_disconnected')]"] == 1
    assert now["plimsoll_request_duration_seconds_sum"] == 2
    assert now["plimsoll_engine_restarts_total"] == 1


def test_two_servers_in_one_process_share_nothing() -> None:
    registry = CollectorRegistry()
    one, other = Metrics(Settings(), registry=registry), Metrics(Settings())
    one.engine_restarted()
    assert registry.get_sample_value("plimsoll_engine_restarts_total") == 1
    assert other.registry.get_sample_value("plimsoll_engine_restarts_total") == 0


def test_the_page_is_text_that_every_scraper_reads(metrics: Metrics, engine: Engine) -> None:
    text, content_type = metrics.render()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    samples = {sample.name for family in parse_text(text.decode()) for sample in family.samples}
    assert {"plimsoll_admissions_total", "plimsoll_build_info", "vllm:num_requests_running"} <= samples
    assert "process_resident_memory_bytes" in samples


def test_events_and_scrapes_are_cheap(metrics: Metrics, engine: Engine) -> None:
    """Loose bounds, an order above what is measured, so that a busy machine doesn't fail them."""
    began = time.thread_time()
    for _ in range(10_000):
        metrics.inter_token(0.03)
    assert (time.thread_time() - began) / 10_000 < 20e-6
    began = time.thread_time()
    for _ in range(10):
        text, _ = metrics.render()
    assert (time.thread_time() - began) / 10 < 0.02
    assert len(text) < 32_000
    assert len(gzip.compress(text)) < 6_000


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)
def test_promtool_complains_of_nothing_but_the_gateways_colon(metrics: Metrics, engine: Engine) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=metrics.render()[0],
        capture_output=True,
        timeout=60,
        check=False,
    )
    complaints = (done.stdout + done.stderr).decode().splitlines()
    assert len(complaints) == 4
    assert all(
        line.startswith("vllm:") and line.endswith("metric names should not contain ':'")
        for line in complaints
    )
