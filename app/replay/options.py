"""The options of `plimsoll replay`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from app.options import Given, UsageError, build_parser, option, options_of, read_flags
from app.replay.presets import PRESETS, StepModelChoice, step_model
from app.settings import Settings
from app.values import (
    block_size,
    choice,
    duration,
    integer,
    memory,
    number,
    or_none,
    picture_file,
    several,
    text,
    yes,
)
from model_runner.replay.routing import ROUTINGS
from model_runner.replay.simulation import POLICIES

_TRACE = "the trace"
_SERVER = "the server"
_CLUSTER = "several servers"
_STANDARD = "the standard replay"
_GOAL = "what is good"
_ANSWER = "the answer"

# What the standard replay sets itself.
_SET_BY_STANDARD = (
    "kv_budget_tokens",
    "kv_cache_memory",
    "kv_bytes_per_token",
    "step_model",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "target_itl_ms",
    "max_model_len",
    "max_tokens",
    "arrivals",
    "rate_scale",
    "tenants",
    "replicas",
    "routing",
    "slo_ttft",
    "slo_itl",
    "policy",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    trace: str = option(
        "",
        group=_TRACE,
        metavar="FILE",
        parse=text,
        positional=True,
        shown="required",
        help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens, or JSON lines with timestamp (ms), "
        "input_length, output_length. The flag may be left out.",
    )
    limit: int | None = option(
        None,
        group=_TRACE,
        metavar="N",
        parse=integer(1),
        shown="all; --standard: 2000",
        help="Only the first N rows of those that fit --max-model-len.",
    )
    arrivals: str = option(
        "trace",
        group=_TRACE,
        metavar="KIND",
        parse=choice("trace", "backlog"),
        help="trace: as they came. backlog: all at the start.",
    )
    rate_scale: float = option(
        1.0,
        group=_TRACE,
        metavar="X",
        parse=number(0.0001, 1e6),
        help="So many times as many requests a second as in the trace.",
    )
    max_tokens: int | None = option(
        1000,
        group=_TRACE,
        metavar="N|none",
        parse=or_none(integer(1)),
        help="What each request asks for: N, or less where the context leaves less; none: all it leaves.",
    )
    tenants: str = option(
        "",
        group=_TRACE,
        metavar="COLUMN|N",
        parse=text,
        shown="the column tenant where there is one, else one tenant",
        help="The column (of JSON lines: the key) that names a row's tenant; or a number of tenants among "
        "whom the rows are dealt at random.",
    )
    policy: tuple[str, ...] = option(
        POLICIES,
        group=_SERVER,
        metavar="NAME[,NAME…]",
        parse=several(choice(*POLICIES)),
        shown=",".join(POLICIES),
        help="strict and predictive are on offer (--admission); greedy doesn't look ahead, and oracle knows "
        "every answer's length: they are to compare with.",
    )
    kv_budget_tokens: int = option(
        24_000,
        group=_SERVER,
        metavar="N",
        parse=integer(1, 10**9),
        help="Tokens of cache that requests may hold, on each server.",
    )
    kv_cache_memory: int | None = option(
        None,
        group=_SERVER,
        metavar="SIZE",
        parse=memory,
        shown="by --kv-budget-tokens",
        help="The same in bytes: divided by --kv-bytes-per-token.",
    )
    kv_bytes_per_token: int | None = option(
        None,
        group=_SERVER,
        metavar="SIZE",
        parse=memory,
        shown="the step model's",
        help="Of all layers together.",
    )
    step_model: StepModelChoice = option(  # noqa: RUF009
        StepModelChoice("standard", PRESETS["standard"]),
        group=_SERVER,
        metavar="NAME|FILE|B,T,C",
        parse=step_model,
        shown="standard",
        help=f"What a step costs: {', '.join(PRESETS)}; a file of `plimsoll calibrate`; or seconds of "
        "a step, of each token computed and of each token of context read, as 0.006,3.2e-5,4e-8.",
    )
    overflow_risk: float = option(
        Settings().overflow_risk,
        group=_SERVER,
        metavar="SHARE",
        parse=number(0.00001, 0.5),
        help="Of predictive admission: the share of requests that may have to be computed again.",
    )
    max_queue_seconds: float | None = option(
        None,
        group=_SERVER,
        metavar="TIME|none",
        parse=or_none(duration(0.001)),
        shown="none; --standard: 1.5s",
        help="Whoever would wait longer is refused, and whoever has waited longer is dropped. (greedy and "
        "oracle have no such bound.)",
    )
    max_num_seqs: int = option(
        256, group=_SERVER, metavar="N", parse=integer(1, 65536), help="Sequences in one step, at most."
    )
    max_num_batched_tokens: int = option(
        1024, group=_SERVER, metavar="N", parse=integer(1, 10**6), help="Tokens in one step, at most."
    )
    target_itl_ms: float = option(
        0.0,
        group=_SERVER,
        metavar="MS",
        parse=number(0, 60000),
        shown="no target",
        help="Prompts are read in chunks so short that a step stays under it, as the server's.",
    )
    block_size: int = option(16, group=_SERVER, metavar="N", parse=block_size, help="Tokens of a block.")
    max_model_len: int = option(
        8192,
        group=_SERVER,
        metavar="N",
        parse=integer(2, 10**6),
        help="The context. Rows whose prompt and answer together are longer are left out, and counted.",
    )
    replicas: int = option(
        1,
        group=_CLUSTER,
        metavar="N",
        parse=integer(1, 256),
        help="Servers side by side, each with the whole budget.",
    )
    routing: str = option(
        "round-robin",
        group=_CLUSTER,
        metavar="NAME",
        parse=choice(*ROUTINGS),
        help="round-robin; least-loaded: the fewest requests; cache-aware: the most room under the line, "
        "prompts that begin alike (hash_ids) together while there is room.",
    )
    slo_ttft: float | None = option(
        None,
        group=_GOAL,
        metavar="TIME",
        parse=duration(0.001),
        shown="2s; of a backlog 60s",
        help="Time to first token, at most, of a request that counts in goodput.",
    )
    slo_itl: float = option(
        0.5,
        group=_GOAL,
        metavar="TIME",
        parse=duration(0.001),
        shown="500ms",
        help="And the longest gap between two of its tokens.",
    )
    standard: bool = option(
        False,
        group=_STANDARD,
        metavar="",
        parse=yes,
        switch=True,
        shown="off",
        help="The replay by which figures are compared: backlogs with 12,000, 24,000 and 96,000 tokens of "
        "cache, max_tokens 1000 and none; then, with 24,000, arrivals at 0.5, 1, 2 and 4 times what the "
        "oracle sustains.",
    )
    full: bool = option(
        False,
        group=_STANDARD,
        metavar="",
        parse=yes,
        switch=True,
        shown="off",
        help="With --standard: the timed part with all three budgets.",
    )
    seed: int = option(
        0,
        group=_ANSWER,
        metavar="N",
        parse=integer(0),
        help="Of what is drawn (tenants): same seed, same answer.",
    )
    format: str = option(
        "table", group=_ANSWER, metavar="FORMAT", parse=choice("table", "json"), help="table or json."
    )
    plot: str = option(
        "",
        group=_ANSWER,
        metavar="FILE",
        parse=picture_file,
        shown="none",
        help="Draw the cache's use against the line over time into FILE.png, FILE.svg or FILE.html.",
    )
    jobs: int = option(
        0,
        group=_ANSWER,
        metavar="N",
        parse=integer(1, 1024),
        shown="one for each core",
        help="Replays side by side.",
    )

    @property
    def tenant_column(self) -> str | None:
        return self.tenants if self.tenants and not self.tenants.isdecimal() else None

    @property
    def workers(self) -> int:
        return self.jobs or len(os.sched_getaffinity(0))

    @property
    def budget_tokens(self) -> int:
        """Raises UsageError for a size without the bytes of a token, and for less than a block."""
        if self.kv_cache_memory is None:
            tokens, written = self.kv_budget_tokens, "--kv-budget-tokens"
        else:
            each = self.kv_bytes_per_token or self.step_model.preset.kv_bytes_per_token
            if each is None:
                raise UsageError(
                    "--kv-cache-memory: write --kv-bytes-per-token too; the step model tells none."
                )
            tokens, written = self.kv_cache_memory // each, "--kv-cache-memory"
        if tokens < self.block_size:
            raise UsageError(f"{written}: {tokens} tokens are less than a block of {self.block_size}.")
        return tokens


OPTIONS = options_of(ReplayOptions)

_DESCRIPTION = """\
Play a trace of arrivals and lengths through the code that serves, in simulated time, with a formula in the
place of the model: what each policy would make of it. No model, no device, no waiting."""

_EPILOG = """\
examples:
  plimsoll replay chat.csv --kv-budget-tokens 24000 --rate-scale 2
  plimsoll replay chat.csv --arrivals backlog --policy strict,predictive --limit 400 --plot cache.html
  plimsoll replay chat.jsonl --replicas 4 --routing cache-aware --step-model llama-3.1-8b-h100 \\
      --kv-cache-memory 48GiB --slo-ttft 1s --format json
  plimsoll replay --standard chat.csv"""


def load_options(argv: Sequence[str]) -> ReplayOptions:
    """Raises UsageError, with what to write instead, for what is unknown, malformed or contradictory."""
    parser = build_parser(
        "plimsoll replay", OPTIONS, description=_DESCRIPTION, epilog=_EPILOG, env_prefix=None
    )
    given = read_flags(parser, OPTIONS, argv)
    options = ReplayOptions(**given.values)
    _refuse_contradictions(options, given)
    return options


def _refuse_contradictions(options: ReplayOptions, given: Given) -> None:
    written = given.written
    if not options.trace:
        raise UsageError("which trace? Write plimsoll replay FILE. See `plimsoll replay --help`.")
    if options.standard:
        for name in _SET_BY_STANDARD:
            if name in written:
                raise UsageError(f"{written[name]}: --standard sets that itself; write one of them.")
    elif options.full:
        raise UsageError("--full is of the standard replay; write --standard too.")
    if "kv_cache_memory" in written and "kv_budget_tokens" in written:
        raise UsageError("--kv-cache-memory and --kv-budget-tokens both size the cache; write one of them.")
    if options.arrivals == "backlog" and "rate_scale" in written:
        raise UsageError("--rate-scale: in a backlog everything arrives at once; write one of them.")
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise UsageError(
            f"--max-num-seqs {options.max_num_seqs} sequences each take a token of every step, more than "
            f"--max-num-batched-tokens {options.max_num_batched_tokens}."
        )
    if "routing" in written and options.replicas == 1:
        raise UsageError("--routing is between several servers; write --replicas N too.")
    options.budget_tokens  # noqa: B018 - raises what is wrong with it
