"""`plimsoll plan`: describe the model in a process of its own, do the arithmetic here, print or draw it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from app.plan.options import PlanOptions, load_options
from app.plan.report import Report, as_json, as_table
from app.sizes import format_size
from model_runner.core.block_layout import BlockLayout
from model_runner.core.capacity import Device, WeightsRead, make_plan
from model_runner.core.kv_dtypes import KV_DTYPES
from model_runner.core.kv_spec import KVCacheSpec
from model_runner.errors import DoesNotFit, ModelNotServable, StartupError

_DESCRIBE_SECONDS = 300.0
_SHORTEST_CONTEXT = 1024
_UNKNOWN_CONTEXT = 131_072  # where the configuration names no longest context


def plan(argv: Sequence[str]) -> int:
    """Returns the exit code. Raises UsageError for what was asked wrongly, StartupError for what can't be
    planned."""
    options = load_options(argv)
    report = make_report(options, describe(options.model, options.cache_dir))
    print(as_json(report) if options.format == "json" else as_table(report))
    if options.plot:
        from app.plan.plot import draw  # matplotlib takes a second to import

        draw(report, options.plot)
        print(f"drawn: {options.plot}", file=sys.stderr)
    return 0


def describe(model: str, cache_dir: str) -> dict[str, Any]:
    """What the model is, from a process that may import transformers. Raises StartupError with its reason."""
    command = [sys.executable, "-m", "model_runner.describe", model, "--cache-dir", cache_dir]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DESCRIBE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise StartupError(f"The model could not be read within {_DESCRIBE_SECONDS:.0f} s.") from error
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise StartupError(f"The model could not be read: {reason[0]}") from error
    if "error" in answer:
        raise StartupError(answer["error"])
    return answer


def make_report(options: PlanOptions, model: dict[str, Any]) -> Report:
    """Raises ModelNotPriced, and DoesNotFit when nothing is left for the cache."""
    config, card, ranks = model["config"], options.device_memory, options.tensor_parallel
    assert card is not None, "load_options refuses a plan without a device"
    dtype = _weights_dtype(options, config)
    kv_dtype = dtype if options.kv_dtype == "auto" else options.kv_dtype
    spec = KVCacheSpec.from_config(config, kv_dtype=kv_dtype, model_dtype=dtype, tensor_parallel=ranks)
    weights = _weights(model["weights"], config, options, dtype)
    budget = int(card.memory_bytes * options.gpu_memory_utilization) - options.overhead - weights.total_bytes
    if budget <= 0:
        raise DoesNotFit(_no_room(options, weights))
    layout, why_not = _layout(spec, options.block_size)
    limit = int(config.get("max_position_embeddings") or _UNKNOWN_CONTEXT)
    bandwidth = options.memory_bandwidth or card.bandwidth or None
    made = make_plan(
        spec,
        layout,
        weights,
        Device(card.memory_bytes, bandwidth),
        kv_budget_bytes=budget,
        contexts=options.context or _contexts(limit),
        batches=options.batch,
        limit=limit,
    )
    return Report(model["name"], card.name, model["weights"], dtype, limit, made, why_not, options)


def _weights_dtype(options: PlanOptions, config: dict[str, Any]) -> str:
    """What the model runs in; weights that are read as stored still give activations of some type."""
    if options.dtype != "stored":
        return options.dtype
    declared = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return declared if declared in KV_DTYPES and not KV_DTYPES[declared].quantised else "bfloat16"


def _weights(
    described: dict[str, Any], config: dict[str, Any], options: PlanOptions, dtype: str
) -> WeightsRead:
    """Of one device, which holds an equal share of every tensor."""
    element_bytes = KV_DTYPES[dtype].bits / 8
    if options.dtype == "stored" and described["stored_bytes"]:
        element_bytes = described["stored_bytes"] / described["parameters"]
    names = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
    experts = next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)
    used = next(
        (
            int(config[n])
            for n in ("num_experts_per_tok", "moe_topk", "moe_k")
            if isinstance(config.get(n), int)
        ),
        0,
    )
    return WeightsRead(
        total_bytes=-(-int(described["parameters"] * element_bytes) // options.tensor_parallel),
        expert_bytes=int(described["expert_parameters"] * element_bytes) // options.tensor_parallel,
        experts=experts if used else 0,
        experts_per_token=used,
    )


def _layout(spec: KVCacheSpec, block_size: int) -> tuple[BlockLayout | None, str]:
    try:
        return BlockLayout.from_spec(spec, block_size=block_size), ""
    except ModelNotServable as error:
        return None, error.message


def _no_room(options: PlanOptions, weights: WeightsRead) -> str:
    card, ranks = options.device_memory, options.tensor_parallel
    assert card is not None
    usable = int(card.memory_bytes * options.gpu_memory_utilization) - options.overhead
    whole = weights.total_bytes * ranks
    message = (
        f"Nothing is left for the KV cache: the weights take {format_size(weights.total_bytes)} of each "
        f"device, and {format_size(max(usable, 0))} can be used ({options.gpu_memory_utilization:.0%} of "
        f"{format_size(card.memory_bytes)}, less {format_size(options.overhead)} of overhead)."
    )
    if usable <= 0:
        return message
    enough = 1
    while whole / enough >= usable:
        enough *= 2
    return f"{message} They would fit {enough} such devices: --tensor-parallel {enough}."


def _contexts(limit: int) -> tuple[int, ...]:
    """1K, 4K, 16K … and the model's own."""
    contexts = []
    context = _SHORTEST_CONTEXT
    while context < limit:
        contexts.append(context)
        context *= 4
    return (*contexts, limit)
