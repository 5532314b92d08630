"""`plimsoll plan`: describe the model in a process of its own, do the arithmetic here, print or draw it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from app.capacity import About
from app.plan.memory import Memory, find_memory
from app.plan.options import PlanOptions, load_options
from app.plan.report import Report, as_json, as_table, quantisation_note
from app.settings import Settings
from model_runner.core.block_layout import BlockLayout
from model_runner.core.capacity import Device, fewest_devices, make_plan
from model_runner.core.kv_dtypes import KV_DTYPES
from model_runner.core.kv_spec import KVCacheSpec
from model_runner.core.weights import WeightsRead, read_experts
from model_runner.errors import DoesNotFit, ModelNotPriced, ModelNotServable, StartupError
from model_runner.sizes import format_size

_DESCRIBE_SECONDS = 300.0
_SHORTEST_CONTEXT = 1024
_UNKNOWN_CONTEXT = 131_072  # where the configuration names no longest context
_PARTS = ("", "expert_", "unread_")  # of the weights: all, and two that are not read at each step


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
    config, ranks = model["config"], options.tensor_parallel
    memory = find_memory(options, model["machine"])
    card = memory.card
    dtype = _runs_in(options, model)
    kept_in = _kept_in(options, model["weights"], dtype)
    kv_dtype = dtype if options.kv_dtype == "auto" else options.kv_dtype
    spec = _price(config, kv_dtype, dtype, ranks)
    weights = _weights(model["weights"], config, kept_in, dtype, ranks)
    limit = _longest_context(config)
    served_limit = model["served_context"] or limit
    contexts = options.context or _contexts(limit)
    usable = memory.usable_bytes
    if usable <= weights.total_bytes:
        whole = _weights(model["weights"], config, kept_in, dtype, 1).total_bytes
        price = partial(_price, config, kv_dtype, dtype)
        enough = fewest_devices(whole, usable, min(contexts), price)
        message = _no_room(memory, weights.total_bytes, min(contexts), enough)
        assumed = quantisation_note(model["weights"], kept_in)
        raise DoesNotFit(f"{message} {assumed}".strip())
    layout, why_not = _layout(model, spec, options.block_size)
    headroom = layout.headroom_blocks(Settings().max_num_batched_tokens) if layout else 0
    bandwidth = options.memory_bandwidth or card.bandwidth or None
    made = make_plan(
        spec,
        layout,
        weights,
        Device(card.memory_bytes, bandwidth),
        kv_budget_bytes=memory.kv_bytes(weights.total_bytes, layout, served_limit),
        contexts=contexts,
        batches=options.batch,
        limit=limit,
        served_limit=served_limit,
        headroom_blocks=headroom,
    )
    described = model["weights"]
    about = About(
        model=model["name"],
        architecture=model["architecture"],
        model_context=config.get("max_position_embeddings"),
        device=card.name,
        device_memory_bytes=card.memory_bytes,
        weights_parameters=described["parameters"],
        weights_counted_from=described["source"],
        weights_dtype=kept_in,
        weights_quantisation=described["quantisation"],
        weights_packing=described["packing"] if kept_in == "packed" else None,
        weights_uncounted=tuple(described["uncounted"]),
    )
    silent = _is_dtype_assumed(options, model)
    return Report(about, described, limit, served_limit, made, why_not, memory.how_used, silent, options)


def _price(config: dict[str, Any], kv_dtype: str, dtype: str, ranks: int) -> KVCacheSpec:
    return KVCacheSpec.from_config(config, kv_dtype=kv_dtype, model_dtype=dtype, tensor_parallel=ranks)


def _runs_in(options: PlanOptions, model: dict[str, Any]) -> str:
    """What the model computes in; weights that are read as stored still give activations of some type."""
    if options.dtype not in ("auto", "stored"):
        return options.dtype
    if _as_served_here(options, model["weights"]):
        return str(model["machine"]["dtype"])
    if model["weights"]["source"] == "gguf":
        return "bfloat16"
    return _declared_dtype(model["config"]) or "bfloat16"


def _declared_dtype(config: dict[str, Any]) -> str | None:
    """What the configuration says that the model runs in, if it is a type that one can run in."""
    declared = str(config.get("dtype") or "")
    return declared if declared in KV_DTYPES and not KV_DTYPES[declared].quantised else None


def _is_dtype_assumed(options: PlanOptions, model: dict[str, Any]) -> bool:
    return (
        options.dtype in ("auto", "stored")
        and not _as_served_here(options, model["weights"])
        and model["weights"]["source"] != "gguf"
        and _declared_dtype(model["config"]) is None
    )


def _kept_in(options: PlanOptions, described: dict[str, Any], dtype: str) -> str:
    """An element type; `stored`: the bytes that the files have; or `packed`: as the configuration tells."""
    stored = described["stored_bytes"] is not None
    if options.dtype == "stored":
        if not stored:
            raise StartupError("--dtype stored: there are no files that say how the weights are stored.")
        return "stored"
    if options.dtype != "auto" or _as_served_here(options, described):
        return dtype
    if described["packing"] and not stored:
        return "packed"
    return "stored" if stored and described["source"] != "gguf" else dtype


def _weights(
    described: dict[str, Any], config: dict[str, Any], kept_in: str, dtype: str, ranks: int
) -> WeightsRead:
    """Of one device, which holds an equal share of every tensor. What is not packed is kept in `dtype`."""
    numbers = [described[f"{part}parameters"] for part in _PARTS]
    if kept_in == "stored":
        total = described["stored_bytes"]
        # An index tells the total alone: the parts are then in proportion to their numbers.
        sizes = [
            total * number // max(numbers[0], 1) if size is None else size
            for number, size in zip(
                numbers, (described[f"stored_{part}bytes"] for part in _PARTS), strict=True
            )
        ]
    elif kept_in == "packed":
        element_bits = KV_DTYPES[dtype].bits
        sizes = [
            described[f"packed_{part}bytes"]
            + (number - described[f"packed_{part}parameters"]) * element_bits // 8
            for number, part in zip(numbers, _PARTS, strict=True)
        ]
    else:
        sizes = [number * KV_DTYPES[kept_in].bits // 8 for number in numbers]
    experts, used = read_experts(config)
    return WeightsRead(
        total_bytes=-(-sizes[0] // ranks),
        expert_bytes=sizes[1] // ranks,
        experts=experts,
        experts_per_token=used,
        unread_bytes=sizes[2] // ranks,
    )


def _layout(model: dict[str, Any], spec: KVCacheSpec, block_size: int) -> tuple[BlockLayout | None, str]:
    """What Plimsoll would allocate, or why it does not serve the model."""
    try:
        layout = BlockLayout.from_spec(spec, block_size=block_size)
    except ModelNotServable as error:
        return None, error.message
    if not model["has_decoder"]:
        return None, (
            f"Plimsoll does not serve the model type {spec.model_type!r} yet, because transformers has no "
            "model of that decoder alone, without what reads pictures or sound."
        )
    if method := model["weights"]["quantisation"]:
        return None, f"Plimsoll does not serve these weights yet, because they are quantised ({method})."
    return layout, ""


def _as_served_here(options: PlanOptions, described: dict[str, Any]) -> bool:
    """Whether the plan is of what a server would do on this machine: it loads weights in one type."""
    return options.device_memory is None and described["quantisation"] is None


def _no_room(memory: Memory, weights_bytes: int, context: int, enough: int | None) -> str:
    message = (
        f"Nothing is left for the KV cache: the weights take {format_size(weights_bytes)} of each "
        f"device, and {format_size(max(memory.usable_bytes, 0))} can be used ({memory.how_limited})."
    )
    if memory.server_share is not None:
        return f"{message} Name another device with --device-memory."
    if enough is None:
        return f"{message} No number of such devices would do."
    return (
        f"{message} The fewest such devices that would do, with one sequence of {context} tokens beside the "
        f"weights: --tensor-parallel {enough}."
    )


def _contexts(limit: int) -> tuple[int, ...]:
    """1K, 4K, 16K … and the model's own."""
    contexts = []
    context = _SHORTEST_CONTEXT
    while context < limit:
        contexts.append(context)
        context *= 4
    return (*contexts, limit)


def _longest_context(config: dict[str, Any]) -> int:
    """The model's own, in tokens. Raises ModelNotPriced for what is no number of tokens."""
    stated = config.get("max_position_embeddings")
    if stated is None:
        return _UNKNOWN_CONTEXT
    if isinstance(stated, bool) or not isinstance(stated, int) or stated < 1:
        raise ModelNotPriced(
            f"The context of model type {config.get('model_type')!r} can't be told from its "
            f"max_position_embeddings: it is {stated!r}, not one positive number."
        )
    return stated
