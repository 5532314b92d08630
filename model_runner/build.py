"""Composition root of the engine process, and the only importer of worker/."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from model_runner import engine_process, model_files
from model_runner.config import EngineConfig
from model_runner.core.block_layout import BlockLayout
from model_runner.core.capacity import ample_kv_bytes
from model_runner.core.kv_spec import KVCacheSpec
from model_runner.core.pace import Pace
from model_runner.core.weights import WeightsRead
from model_runner.engine import EngineCore
from model_runner.engine_process import BuiltEngine
from model_runner.errors import DoesNotFit
from model_runner.messages import ModelInfo
from model_runner.sizes import format_size as size
from model_runner.worker import machine, memory, warmup
from model_runner.worker.accelerate import accelerate
from model_runner.worker.attention import PagedAttention
from model_runner.worker.kv_cache import allocate_kv_cache
from model_runner.worker.loader import Source, load_model, read_source, skeleton, weights
from model_runner.worker.memory import Plan
from model_runner.worker.model_config import resolved
from model_runner.worker.runner import ModelRunner
from model_runner.worker.sampler import Sampler
from model_runner.worker.servable import attention_modules
from model_runner.worker.weights import held_bytes, planned_bytes

logger = logging.getLogger(__name__)

_WARMUP_PREFILL_TOKENS = 256

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the machine and the model's config decide, before any weights are read."""

    source: Source
    device: torch.device
    dtype: torch.dtype
    layout: BlockLayout
    weights: WeightsRead
    weights_held_bytes: int  # foreseen
    weights_parameters: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model with its weights, made as fast as this machine can."""

    model: nn.Module
    attention_modules: list[nn.Module]
    attention: PagedAttention


def build_engine(
    config: EngineConfig, on_progress: OnProgress, on_planned: Callable[[ModelInfo], None]
) -> BuiltEngine:
    """Load the model, size and allocate its cache, and warm it up.

    `on_planned` gets the prices and the budget as soon as they are known: on a CPU, before the weights are
    read. Raises StartupError with a message for the person who started the server.
    """
    chosen = _choose(config, on_progress)
    on_cpu = chosen.device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(chosen.num_threads)
        plan = _plan_on_cpu(config, chosen)
        on_planned(_model_info(chosen, plan))
    model = load_model(chosen.source, chosen.dtype, chosen.device, on_progress)
    modules = attention_modules(model, chosen.layout)
    execution = accelerate(model, modules, cache_dir=config.cache_dir, mode=config.compile)
    loaded = _Loaded(model, modules, execution.attention)
    if not on_cpu:
        plan = _plan_on_cuda(config, chosen, loaded)
        on_planned(_model_info(chosen, plan))
    on_progress("warming up", 0.0)
    runner = _make_runner(chosen, loaded, plan.blocks_total)
    measured = {
        "decode_step_seconds": warmup.measure_decode_seconds(runner, chosen.layout, plan.blocks_total),
        "prefill_tokens_per_second": warmup.measure_prefill_rate(
            runner,
            chosen.layout,
            plan.blocks_total,
            min(config.max_num_batched_tokens, _WARMUP_PREFILL_TOKENS),
        ),
    }
    on_progress("warming up", 1.0)
    info = _model_info(chosen, plan, held_bytes(model))
    core = EngineCore(
        chosen.layout,
        runner,
        num_blocks=plan.num_blocks,
        headroom_blocks=plan.headroom_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        eos_token_ids=info.eos_token_ids,
        max_model_len=plan.max_model_len,
        grows=config.grows,
    )
    if config.target_itl_seconds is not None:
        core.aim_at(config.target_itl_seconds, Pace(**measured))
    return BuiltEngine(core=core, model=info, execution=execution.description, **measured)


def _choose(config: EngineConfig, on_progress: OnProgress) -> _Choices:
    files = model_files.resolve(config.model, config.cache_dir, on_progress)
    on_progress("reading the model's config", 0.0)
    source = read_source(files)
    device = machine.choose_device(config.device)
    dtype = machine.choose_dtype(config.dtype, device, source.config.dtype)
    spec = KVCacheSpec.from_config(resolved(source.config), kv_dtype=str(dtype).removeprefix("torch."))
    layout = BlockLayout.from_spec(spec, block_size=config.block_size)
    model = skeleton(source.config, dtype)
    read, parameters = weights(model)
    return _Choices(
        source=source,
        device=device,
        dtype=dtype,
        layout=layout,
        weights=read,
        weights_held_bytes=planned_bytes(model, dtype, device, config.compile),
        weights_parameters=parameters,
        num_threads=machine.choose_num_threads(config.num_threads),
    )


def _plan_on_cpu(config: EngineConfig, chosen: _Choices) -> Plan:
    available = machine.available_memory_bytes()
    context = chosen.source.context
    kv_bytes = config.kv_cache_memory_bytes
    if kv_bytes is None:
        share = memory.cpu_kv_bytes(config, available, chosen.weights_held_bytes)
        longest = memory.plan(config, chosen.layout, share, context).max_model_len
        ample = ample_kv_bytes(
            chosen.layout,
            longest,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        kv_bytes = min(share, ample)
    elif chosen.weights_held_bytes + kv_bytes > available:
        raise DoesNotFit(
            f"The weights ({size(chosen.weights_held_bytes)}) and --kv-cache-memory {size(kv_bytes)} "
            f"together are more than the {size(available)} of memory available."
        )
    return memory.plan(config, chosen.layout, kv_bytes, context)


def _plan_on_cuda(config: EngineConfig, chosen: _Choices, loaded: _Loaded) -> Plan:
    """Give the cache what the device has left beside the weights and a worst-case forward, which is run."""
    kv_bytes = config.kv_cache_memory_bytes
    if kv_bytes is None:
        layout, device = chosen.layout, chosen.device
        blocks = -(-config.max_num_batched_tokens // layout.block_size)
        torch.cuda.reset_peak_memory_stats(device)
        runner = _make_runner(chosen, loaded, blocks)
        warmup.run_worst_case(runner, layout, blocks, config.max_num_batched_tokens, config.max_num_seqs)
        peak = torch.cuda.max_memory_allocated(device) - blocks * layout.block_bytes
        del runner
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        kv_bytes = int(total * config.gpu_memory_utilization) - peak - others
        if kv_bytes <= 0:
            raise DoesNotFit(
                f"Nothing is left for the KV cache: of {size(total)} on {device}, --gpu-memory-utilization "
                f"{config.gpu_memory_utilization} allows {size(int(total * config.gpu_memory_utilization))}; "
                f"the weights and a forward pass take {size(peak)}, other processes {size(others)}."
            )
    return memory.plan(config, chosen.layout, kv_bytes, chosen.source.context)


def _make_runner(chosen: _Choices, loaded: _Loaded, blocks_total: int) -> ModelRunner:
    kv_cache = allocate_kv_cache(chosen.layout, blocks_total, chosen.dtype, chosen.device)
    return ModelRunner(
        loaded.model, loaded.attention_modules, chosen.layout, kv_cache, Sampler(), loaded.attention
    )


def _model_info(chosen: _Choices, plan: Plan, held: int | None = None) -> ModelInfo:
    """`held` are the bytes of the weights as they lie in memory, when that has been measured."""
    return ModelInfo(
        architecture=chosen.source.architecture,
        dtype=str(chosen.dtype).removeprefix("torch."),
        device=str(chosen.device),
        max_model_len=plan.max_model_len,
        vocab_size=chosen.source.config.vocab_size,
        eos_token_ids=chosen.source.eos_token_ids,
        layout=chosen.layout,
        num_blocks=plan.num_blocks,
        headroom_blocks=plan.headroom_blocks,
        weights=chosen.weights,
        weights_held_bytes=chosen.weights_held_bytes if held is None else held,
        weights_parameters=chosen.weights_parameters,
        model_type=chosen.source.config.model_type,
        model_context=getattr(chosen.source.config, "max_position_embeddings", None),
        num_threads=chosen.num_threads,
    )


if __name__ == "__main__":
    engine_process.main(build_engine)
