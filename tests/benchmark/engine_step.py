"""Times the engine's steps, without HTTP. `python tests/benchmark/engine_step.py --batch 1 8 32 64`

Prints the least and the median time of a decode step at each batch size and of one prefill chunk. The machine
should be quiet.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from typing import Any

from model_runner.build import build_engine
from model_runner.config import EngineConfig
from model_runner.core.block_layout import BlockLayout
from model_runner.core.output import Runner, SampleRow, ScheduledSequence, SchedulerOutput
from model_runner.types import SamplingParams


def make_step(layout: BlockLayout, sequences: int, cached: int, new: int, **params: Any) -> SchedulerOutput:
    """`sequences` of `cached` tokens in the cache, each to run `new` more, with blocks of its own."""
    sampling = SamplingParams(max_tokens=64, **{"temperature": 0.0, **params})
    count = -(-(cached + new) // layout.block_size)
    scheduled = []
    for i in range(sequences):
        first = i * count * len(layout.groups)
        tables = [list(range(first + g * count, first + (g + 1) * count)) for g in range(len(layout.groups))]
        scheduled.append(ScheduledSequence(i, [100 + i] * new, cached, tables))
    samples = [SampleRow(i, i, 0, 0, sampling, [1], []) for i in range(sequences)]
    return SchedulerOutput(scheduled, samples)


def times(runner: Runner, step: SchedulerOutput, repeats: int) -> list[float]:
    """Seconds of each repetition, after one that does not count."""
    result = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        runner.execute(step)
        result.append(time.perf_counter() - started)
    return result[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", default="auto", choices=["auto", "off"])
    parser.add_argument("--cache-dir", default=tempfile.gettempdir() + "/plimsoll-benchmark")
    parser.add_argument("--context", type=int, default=160, help="tokens cached before a decode step")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    config = EngineConfig(
        model=options.model,
        cache_dir=options.cache_dir,
        dtype=options.dtype,
        compile=options.compile,
        kv_cache_memory_bytes=512 << 20,
    )
    built = build_engine(config, lambda stage, fraction: None, lambda model: None)
    layout, runner = built.model.layout, built.core.runner
    print(f"{built.execution}; {built.model.dtype}, {built.model.num_threads} threads")
    for batch in options.batch:
        seconds = times(runner, make_step(layout, batch, options.context, 1), options.repeats)
        least, median = min(seconds), statistics.median(seconds)
        print(
            f"decode, batch {batch:3}: {least * 1e3:6.1f} ms least, {median * 1e3:6.1f} ms median, "
            f"{batch / median:6.0f} tokens/s"
        )
    seconds = times(runner, make_step(layout, 1, 0, config.max_num_batched_tokens), 5)
    print(f"prefill: {config.max_num_batched_tokens / min(seconds):.0f} tokens/s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    rest = peak - built.model.weights_held_bytes - 512 * (1 << 20)
    print(f"memory: {peak >> 20} MiB at its peak, {rest >> 20} MiB beside weights and cache")


if __name__ == "__main__":
    main()
