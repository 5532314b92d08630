"""What the person who starts the server sees until it is ready: progress, and a short table of what fits."""

from __future__ import annotations

import sys
from collections import Counter
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from app import logs
from app.settings import Settings
from app.version import plimsoll_version
from model_runner.core.block_layout import BlockLayout
from model_runner.messages import Loading, ModelInfo
from model_runner.sizes import format_size

_SHORT_REQUEST = 1024  # tokens


class LoadingReport:
    """A progress bar on a terminal; elsewhere a log line for each stage."""

    def __init__(self, settings: Settings, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._bar: Any = None
        self._stage = ""
        if settings.log_format == "text" and self._stream.isatty():
            shape = "{desc:<28} {percentage:3.0f} % |{bar:30}| {elapsed}"
            self._bar = tqdm(total=1.0, file=self._stream, leave=False, bar_format=shape)

    def __enter__(self) -> LoadingReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def loading(self, progress: Loading) -> None:
        self.stage(progress.stage, progress.fraction)

    def stage(self, stage: str, fraction: float) -> None:
        """`fraction` of the stage is done, from 0.0 to 1.0."""
        if self._bar is not None:
            self._bar.set_description_str(stage, refresh=False)
            self._bar.n = min(max(fraction, 0.0), 1.0)
            self._bar.refresh()
        elif stage != self._stage:
            logs.event("loading", stage=stage)
        self._stage = stage

    def plan(self, settings: Settings, model: ModelInfo) -> None:
        """Show what the model costs and how much of it fits."""
        rows = plan_rows(settings, model)
        if settings.log_format == "json":
            logs.event("planned", table=dict(rows))
            return
        width = max(len(name) for name, _ in rows)
        table = "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
        if self._bar is not None:
            self._bar.clear()
        print(f"\nPlimsoll {plimsoll_version()}\n{table}\n", file=self._stream, flush=True)


def plan_rows(settings: Settings, model: ModelInfo) -> list[tuple[str, str]]:
    """The start-up table: names and values, in words."""
    layout = model.layout
    threads = f", {_count(model.num_threads, 'thread')}" if model.device == "cpu" else ""
    rows = [
        ("model", f"{settings.served_model_name} ({model.architecture})"),
        ("weights", f"{format_size(model.weights_held_bytes)}, {model.dtype} on {model.device}{threads}"),
        ("KV per token", f"{layout.bytes_per_token:,} bytes ({format_size(layout.bytes_per_token)})"),
        ("KV budget", format_size(model.kv_budget_bytes) + _aside(model)),
        (
            "blocks",
            f"{model.num_blocks:,} of {layout.block_size} tokens, {format_size(layout.block_bytes)} each",
        ),
    ]
    if len(layout.groups) > 1:
        rows.append(("layer groups", layer_groups(layout)))
    context = model.max_model_len
    fitting = f"{_fitting(model, context, settings)} of the full context ({context:,} tokens)"
    if context > _SHORT_REQUEST:
        fitting += f", {_fitting(model, _SHORT_REQUEST, settings)} of {_SHORT_REQUEST:,} tokens"
    rows.append(("fit at once", fitting))
    return rows


def _aside(model: ModelInfo) -> str:
    if not model.headroom_blocks:
        return ""
    aside = format_size(model.headroom_blocks * model.layout.block_bytes)
    return f", and {aside} aside for prompts in flight through sliding windows"


def _fitting(model: ModelInfo, tokens: int, settings: Settings) -> str:
    """How many requests of `tokens` (prompt and output together) fit; the last token is never cached."""
    fitting = model.layout.max_sequences(max(tokens - 1, 1), model.num_blocks)
    words = _count(fitting, "request")
    limit = settings.max_num_seqs
    return words if fitting <= limit else f"{words} (--max-num-seqs lets {limit:,} run)"


def layer_groups(layout: BlockLayout) -> str:
    """`1 full and 11 sliding (window 512), of 2 layers each`"""
    counts = Counter((group.kind, group.window) for group in layout.groups)
    kinds = [
        f"{n} {kind}" + (f" (window {window:,})" if window else "") for (kind, window), n in counts.items()
    ]
    return f"{' and '.join(kinds)}, of {_count(layout.layers_per_group, 'layer')} each"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
