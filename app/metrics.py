"""What Prometheus sees. Events are counted as they happen (`Metrics` is the engine's observer); levels are
read from the engine at scrape time, so that a gauge can't go stale. One injected registry holds everything.

Beside Plimsoll's own names stand the few of vLLM's that gateways and dashboards already read (`vllm:…`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from app.levels import EngineCollector, EngineView
from app.settings import Settings
from app.tenancy import TenantLabels
from model_runner.errors import Reason
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
_WAITS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16_384)
_ERRORS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Foresight:
    """What was predicted of one request after the other, what it was, and how far off that was."""

    predicted: Histogram
    actual: Histogram
    error: Histogram

    def observe(self, predicted: float, actual: float) -> None:
        self.predicted.observe(predicted)
        self.actual.observe(actual)
        if actual > 0:
            self.error.observe(abs(predicted - actual) / actual)


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
        self._make_foresight_metrics()
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

    def _make_foresight_metrics(self) -> None:
        self._wait = Foresight(
            self._histogram(
                "plimsoll_predicted_wait_seconds",
                "How long requests that were queued, and let in, were thought to wait.",
                _WAITS,
            ),
            self._histogram("plimsoll_actual_wait_seconds", "How long the same requests did wait.", _WAITS),
            self._histogram(
                "plimsoll_wait_prediction_error_ratio",
                "Of the same: |predicted - actual| / actual.",
                _ERRORS,
            ),
        )
        self._length = Foresight(
            self._histogram(
                "plimsoll_predicted_output_tokens",
                "Tokens that requests which finished were thought to get when they came.",
                _TOKENS,
            ),
            self._histogram("plimsoll_actual_output_tokens", "Tokens that the same requests got.", _TOKENS),
            self._histogram(
                "plimsoll_length_prediction_error_ratio",
                "Of the same: |predicted - actual| / actual.",
                _ERRORS,
            ),
        )

    def _counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, help, registry=self.registry, buckets=buckets)

    def attach(self, engine: EngineView) -> None:
        """Once, when the engine has planned: from now on its levels are on the page."""
        self.registry.register(
            EngineCollector(engine, self._settings, self.tenant_labels, self._byte_seconds)
        )

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
        if ending.predicted_wait_seconds is not None and ending.was_admitted:
            self._wait.observe(ending.predicted_wait_seconds, ending.queue_seconds)
        if ending.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._length.observe(ending.predicted_tokens, ending.generated_tokens)

    def released(self, tenant: str, kv_byte_seconds: float) -> None:
        label = self.tenant_labels.label(tenant)
        self._byte_seconds[label] = self._byte_seconds.get(label, 0.0) + kv_byte_seconds

    def engine_restarted(self) -> None:
        self._restarts.inc()
