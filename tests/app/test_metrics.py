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
from model_runner.core.door_view import DoorLevels
from model_runner.messages import ModelInfo
from model_runner.types import Ending, EngineObserver, FinishReason, StepStats
from tests.app.fake_engine import FakeEngine, model_info

BLOCK_BYTES = model_info().layout.block_bytes


class Engine:
    """Levels that a test may set."""

    def __init__(self) -> None:
        self.state = EngineState.READY
        self.model: ModelInfo = model_info()
        self.door: DoorLevels = FakeEngine().door
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


def test_what_was_foreseen_stands_beside_what_it_was(metrics: Metrics) -> None:
    def ended(reason: str, *, admitted: bool = True, queued: bool = True, code: str | None = None) -> None:
        metrics.ended(
            Ending(
                request_id="r",
                tenant="a",
                reason=reason,
                code=code,
                reserved_bytes=4096 if admitted else 0,
                predicted_wait_seconds=3.0 if queued else None,
                queue_seconds=4.0,
                predicted_tokens=120.0,
                generated_tokens=100,
            )
        )

    ended("stop")
    ended("length", queued=False)
    ended("timeout", admitted=False, code="queue_timeout")
    ended("abort")
    now = page(metrics)
    assert now["plimsoll_predicted_wait_seconds_sum"] == 6, "of the one that stopped and the one that left"
    assert now["plimsoll_actual_wait_seconds_sum"] == 8
    assert now["plimsoll_wait_prediction_error_ratio_sum"] == 0.5
    assert now["plimsoll_predicted_output_tokens_sum"] == 240
    assert now["plimsoll_actual_output_tokens_sum"] == 200
    assert now["plimsoll_length_prediction_error_ratio_sum"] == pytest.approx(0.4)


def test_the_doors_levels(metrics: Metrics, engine: Engine) -> None:
    now = page(metrics)
    assert (now["plimsoll_overflow_risk_ratio"], now["plimsoll_overflow_margin_deviations"]) == (0, 0)
    engine.door = replace(
        engine.door,
        policy="predictive",
        predicted_peak_bytes=61.5 * BLOCK_BYTES,
        overflow_risk=0.004,
        margin_deviations=1.75,
    )
    now = page(metrics)
    assert now["plimsoll_kv_cache_predicted_peak_bytes"] == 61.5 * BLOCK_BYTES
    assert now["plimsoll_overflow_risk_ratio"] == 0.004
    assert now["plimsoll_overflow_margin_deviations"] == 1.75


def test_tenants_are_bounded_in_number_and_never_counted_back() -> None:
    metrics, engine = Metrics(Settings(max_tenant_labels=2)), Engine()
    metrics.attach(engine)
    engine.door = replace(
        engine.door,
        queue_lengths={"a": 3, "b": 1, "c": 2, "d": 4},
        byte_seconds={"a": 10.0, "c": 5.0, "d": 7.0},
    )

    def shown(name: str) -> dict[str, float]:
        return {
            label: page(metrics)[f"{name}[('tenant', '{label}')]"]
            for label in ("a", "b", "other")
            if f"{name}[('tenant', '{label}')]" in page(metrics)
        }

    assert shown("plimsoll_tenant_queue_length") == {"a": 3, "b": 1, "other": 6}
    assert shown("plimsoll_tenant_kv_byte_seconds_total") == {"a": 10, "b": 0, "other": 12}
    metrics.released("a", 11.0)
    metrics.released("d", 8.0)
    engine.door = replace(engine.door, queue_lengths={}, byte_seconds={"c": 6.0})
    assert shown("plimsoll_tenant_queue_length") == {"a": 0, "b": 0}
    assert shown("plimsoll_tenant_kv_byte_seconds_total") == {"a": 11, "b": 0, "other": 14}


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
