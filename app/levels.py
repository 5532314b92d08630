"""What Prometheus sees of the engine and its door when it looks: levels, so that a gauge can't go stale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from app.settings import Settings
from app.tenancy import TenantLabels
from app.version import plimsoll_version
from model_runner.async_engine import EngineState, EngineStats
from model_runner.core.door_view import DoorLevels
from model_runner.messages import ModelInfo


class EngineView(Protocol):
    """What is read of the engine at scrape time."""

    @property
    def state(self) -> EngineState: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def door(self) -> DoorLevels: ...
    @property
    def model(self) -> ModelInfo: ...


class EngineCollector(Collector):
    """The levels, read from the engine each time somebody looks."""

    def __init__(
        self,
        engine: EngineView,
        settings: Settings,
        labels: TenantLabels,
        byte_seconds: Mapping[str, float],
    ) -> None:
        """`byte_seconds`: by tenant's label, of the reservations that are over."""
        self._engine = engine
        self._settings = settings
        self._labels = labels
        self._byte_seconds = byte_seconds

    def collect(self) -> Iterator[Metric]:
        yield self._state()
        yield _info("plimsoll_build", "The version that runs.", {"version": plimsoll_version()})
        yield from self._cache()
        yield from self._load()
        yield from self._door()
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

    def _door(self) -> Iterator[Metric]:
        door = self._engine.door
        yield _gauge(
            "plimsoll_kv_cache_predicted_peak_bytes",
            "The peak of use that is foreseen, and passed with no more than the risk; strict: reserved.",
            door.predicted_peak_bytes,
        )
        yield _gauge(
            "plimsoll_overflow_risk_ratio",
            "Of requests that may be preempted in the long run, as the server was told; strict: 0.",
            door.overflow_risk or 0.0,
        )
        yield _gauge(
            "plimsoll_overflow_margin_deviations",
            "Standard deviations kept from the line now, to stay within that risk; strict: 0.",
            door.margin_deviations or 0.0,
        )
        queued = GaugeMetricFamily(
            "plimsoll_tenant_queue_length", "Requests that wait for room, by tenant.", labels=["tenant"]
        )
        for label, length in self._by_label(door.queue_lengths.items()).items():
            queued.add_metric([label], length)
        yield queued
        spent = CounterMetricFamily(
            "plimsoll_tenant_kv_byte_seconds",
            "KV cache that requests have had reserved, times the seconds for which they had it, by tenant.",
            labels=["tenant"],
        )
        taken = self._by_label((*self._byte_seconds.items(), *door.byte_seconds.items()))
        for label, byte_seconds in taken.items():
            spent.add_metric([label], byte_seconds)
        yield spent

    def _by_label(self, values: Iterable[tuple[str, float]]) -> dict[str, float]:
        """Sums, of every label that has ever been given."""
        sums: dict[str, float] = {}
        for tenant, value in values:
            label = self._labels.label(tenant)
            sums[label] = sums.get(label, 0.0) + value
        return {**dict.fromkeys(self._labels.given, 0.0), **sums}

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
