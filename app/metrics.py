"""What Prometheus sees. Events are counted as they happen (`Metrics` is the engine's observer); levels are
read from the engine at scrape time, so that a gauge can't go stale. One injected registry holds everything.

Beside Plimsoll's own names stand the few of vLLM's that gateways and dashboards already read (`vllm:…`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from app.settings import Settings
from app.tenancy import TenantLabels
from app.version import plimsoll_version
from model_runner.async_engine import EngineState, EngineStats
from model_runner.errors import Reason
from model_runner.messages import ModelInfo
from model_runner.types import Ending, FinishReason, StepStats

ABORT_CAUSES = ("client_disconnected", "shutdown", "server_fault")

# Refusals, before or at the door. What goes wrong later (queue_timeout, internal_error) is an ending.
REFUSALS = tuple(each for each in Reason if each not in (Reason.QUEUE_TIMEOUT, Reason.INTERNAL_ERROR))

_SECONDS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
_STEP_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    5.0,
    30.0,
)
_PROJECTED_BYTES = tuple(float(2**exponent) for exponent in range(16, 38, 2))  # 64 KiB to 64 GiB
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class EngineView(Protocol):
    """What is read of the engine at scrape time."""

    @property
    def state(self) -> EngineState: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def model(self) -> ModelInfo: ...


class Metrics:
    """The counters and histograms, and the page that shows them. Implements EngineObserver."""

    def __init__(self, settings: Settings, *, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._settings = settings
        described = (tenant.policy.name for tenant in settings.tenants)
        self.tenant_labels = TenantLabels(settings.max_tenant_labels, described)
        self._byte_seconds: dict[str, float] = {}  # by tenant label, of reservations that are over
        self._make_door_metrics()
        self._make_work_metrics()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def _make_door_metrics(self) -> None:
        self._admissions = self._counter(
            "plimsoll_admissions_total", "Requests by what the door decided.", ("decision", "reason")
        )
        self._admissions.labels("admitted", "")
        self._admissions.labels("queued", "")
        for reason in REFUSALS:
            self._admissions.labels("rejected", reason.value)
        self._projected = self._histogram(
            "plimsoll_request_projected_bytes",
            "KV cache that a request may take over its lifetime, as priced at the door.",
            _PROJECTED_BYTES,
        )
        self._queue_time = self._histogram(
            "plimsoll_queue_time_seconds",
            "How long admitted requests had waited for room.",
            (0.001, *_SECONDS),
        )
        self._ended = self._counter(
            "plimsoll_requests_ended_total", "Requests by how they ended.", ("reason",)
        )
        for finish in FinishReason:
            self._ended.labels(finish.value)
        self._aborts = self._counter("plimsoll_aborts_total", "Requests ended early, by cause.", ("cause",))
        for cause in ABORT_CAUSES:
            self._aborts.labels(cause)

    def _make_work_metrics(self) -> None:
        self._first_token = self._histogram(
            "plimsoll_time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS
        )
        self._inter_token = self._histogram(
            "plimsoll_inter_token_latency_seconds", "Between two tokens of one choice.", _STEP_SECONDS
        )
        self._duration = self._histogram(
            "plimsoll_request_duration_seconds", "From a request's arrival to its end.", _SECONDS
        )
        self._prompt_tokens = self._counter("plimsoll_prompt_tokens_total", "Prompt tokens read.")
        self._generated_tokens = self._counter("plimsoll_generated_tokens_total", "Tokens generated.")
        self._batch_size = self._histogram(
            "plimsoll_batch_size", "Sequences that ran in one step of the engine.", _BATCH_SIZES
        )
        self._step_time = self._histogram(
            "plimsoll_step_duration_seconds", "How long a step of the engine took.", _STEP_SECONDS
        )
        self._step_tokens = self._counter(
            "plimsoll_step_tokens_total", "Tokens that steps of the engine computed."
        )
        self._context_tokens = self._counter(
            "plimsoll_context_tokens_total", "Tokens of context that its steps read."
        )
        self._preemptions = self._counter(
            "plimsoll_preemptions_total",
            "Requests that had to give their KV cache back, and were computed again later.",
        )
        self._recomputed = self._counter(
            "plimsoll_recomputed_tokens_total", "Tokens that were computed again for it."
        )
        self._held = Gauge(
            "plimsoll_held_sequences",
            "Sequences that the last step left out, to leave blocks to their seniors.",
            registry=self.registry,
        )
        self._restarts = self._counter(
            "plimsoll_engine_restarts_total", "Engine processes started in place of one that died."
        )

    def _counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, help, registry=self.registry, buckets=buckets)

    def attach(self, engine: EngineView) -> None:
        """Once, when the engine has planned: from now on its levels are on the page."""
        self.registry.register(EngineCollector(engine, self._settings))

    def render(self) -> tuple[bytes, str]:
        """The page and its content type: always the text format, which every scraper reads.

        Not OpenMetrics: the library writes a colon in a name as an underscore there, and the gateways' names
        have one.
        """
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    # As EngineObserver.

    def decided(self, decision: str, reason: str, projected_bytes: int) -> None:
        self._admissions.labels(decision, reason).inc()
        if projected_bytes:
            self._projected.observe(projected_bytes)

    def dequeued(self, queue_time_seconds: float) -> None:
        self._queue_time.observe(queue_time_seconds)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def tokens(self, *, prompt: int, generated: int) -> None:
        if prompt:
            self._prompt_tokens.inc(prompt)
        if generated:
            self._generated_tokens.inc(generated)

    def stepped(self, stats: StepStats) -> None:
        self._step_time.observe(stats.step_seconds)
        self._batch_size.observe(stats.batch_sequences)
        self._step_tokens.inc(stats.prefill_tokens + stats.decode_tokens)
        self._context_tokens.inc(stats.context_tokens)
        self._held.set(stats.held_sequences)
        if stats.preempted_requests:
            self._preemptions.inc(stats.preempted_requests)
            self._recomputed.inc(stats.recomputed_tokens)

    def ended(self, ending: Ending) -> None:
        self._ended.labels(ending.reason).inc()
        if ending.abort_cause is not None:
            self._aborts.labels(ending.abort_cause).inc()
        self._duration.observe(ending.e2e_seconds)

    def released(self, tenant: str, kv_byte_seconds: float) -> None:
        label = self.tenant_labels.label(tenant)
        self._byte_seconds[label] = self._byte_seconds.get(label, 0.0) + kv_byte_seconds

    def engine_restarted(self) -> None:
        self._restarts.inc()


class EngineCollector(Collector):
    """The levels, read from the engine each time somebody looks."""

    def __init__(self, engine: EngineView, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    def collect(self) -> Iterator[Metric]:
        yield self._state()
        yield _info("plimsoll_build", "The version that runs.", {"version": plimsoll_version()})
        yield from self._cache()
        yield from self._load()
        yield from self._vllm()

    def _state(self) -> Metric:
        family = GaugeMetricFamily(
            "plimsoll_engine_state", "1 for the state that the engine is in.", labels=["state"]
        )
        for state in EngineState:
            family.add_metric([state], float(state == self._engine.state))
        return family

    def _cache(self) -> Iterator[Metric]:
        stats, model = self._engine.stats, self._engine.model
        cache = "plimsoll_kv_cache"
        yield _gauge(f"{cache}_budget_bytes", "KV cache that requests may reserve.", stats.kv_budget_bytes)
        yield _gauge(f"{cache}_reserved_bytes", "Reserved by admitted requests.", stats.reserved_bytes)
        yield _gauge(f"{cache}_used_bytes", "In blocks that sequences hold now.", stats.used_bytes)
        yield _gauge(f"{cache}_free_bytes", "Not reserved.", stats.free_bytes)
        yield _gauge(f"{cache}_blocks", "Blocks that exist.", stats.blocks_total)
        yield _gauge(f"{cache}_blocks_used", "Blocks that sequences hold now.", stats.used_blocks)
        yield _gauge(
            f"{cache}_bytes_per_token",
            "Of one token in all layers, while all grow.",
            model.layout.bytes_per_token,
        )
        held, read = model.weights_held_bytes, model.weights.step_bytes(1)
        yield _gauge("plimsoll_model_weights_bytes", "Weights, as they lie in memory.", held)
        yield _gauge("plimsoll_model_weights_read_bytes", "Of them, read for a token alone.", read)
        yield _info(
            "plimsoll_model",
            "The model that is served.",
            {
                "model": self._settings.served_model_name,
                "architecture": model.architecture,
                "dtype": model.dtype,
                "device": model.device,
                "max_model_len": str(model.max_model_len),
            },
        )

    def _load(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield _gauge("plimsoll_queue_length", "Requests that wait at the door for room.", stats.queue_length)
        yield _gauge("plimsoll_queued_bytes", "KV cache that they will reserve.", stats.queued_bytes)
        yield _gauge("plimsoll_requests_running", "Requests that the engine runs.", stats.running)
        yield _gauge("plimsoll_requests_waiting", "Requests that wait for room.", stats.waiting)

    def _vllm(self) -> Iterator[Metric]:
        stats, model = self._engine.stats, self._engine.model
        labels = {"model_name": self._settings.served_model_name, "engine": "0"}
        # What is promised, not what is filled yet: a router must not send more to a door that is shut.
        share = stats.reserved_bytes / stats.kv_budget_bytes
        yield _gauge("vllm:num_requests_running", "As in vLLM: requests running.", stats.running, labels)
        yield _gauge("vllm:num_requests_waiting", "As in vLLM: requests waiting.", stats.waiting, labels)
        yield _gauge(
            "vllm:kv_cache_usage_perc", "As in vLLM, of what is reserved: from 0 to 1.", share, labels
        )
        config = {
            "block_size": str(model.layout.block_size),
            "cache_dtype": model.dtype,
            "enable_prefix_caching": "False",
            "engine": "0",
            "gpu_memory_utilization": f"{self._settings.gpu_memory_utilization:g}",
            "num_cpu_blocks": "0",
            "num_gpu_blocks": str(stats.blocks_total),
        }
        yield _gauge("vllm:cache_config_info", "As in vLLM: the shape of the KV cache.", 1, config)


def _gauge(name: str, help: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    labels = labels or {}
    family = GaugeMetricFamily(name, help, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _info(name: str, help: str, labels: dict[str, str]) -> Metric:
    return InfoMetricFamily(name, help, value=labels)
