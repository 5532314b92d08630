"""What the server was asked to be: every option of `plimsoll serve`, declared once, in this table.
(app.command_line reads them.)"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from app.options import (
    option,
    options_of,
)
from app.tenant_file import DescribedTenant, read_tenants
from app.values import (
    api_keys,
    block_size,
    choice,
    device,
    duration,
    header_name,
    integer,
    memory,
    model_len,
    number,
    text,
)
from model_runner.config import EngineConfig
from model_runner.door import DoorPolicy
from model_runner.model_files import DEFAULT_MODEL_NAME, default_name

_MODEL = "the model"
_MEMORY = "memory and batching"
_DOOR = "the door (what is admitted, queued, refused)"
_SERVER = "the server"
_TENANTS = "tenants (who shares the server)"


def default_cache_dir() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "plimsoll")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes are bytes, times are seconds."""

    model: str = option(
        "",
        group=_MODEL,
        metavar="MODEL",
        parse=text,
        shown=f"the embedded {DEFAULT_MODEL_NAME}",
        help="A Hugging Face directory, a hub id (Qwen/Qwen3-0.6B), or a .gguf file.",
        known_as=("--model-id", "--model-path", "-m"),
    )
    served_model_name: str = option(
        "",
        group=_MODEL,
        metavar="NAME",
        parse=text,
        shown="the last part of --model",
        help="What clients write in the field `model`.",
        known_as=("--alias",),
    )
    dtype: str = option(
        "auto",
        group=_MODEL,
        metavar="TYPE",
        parse=choice("auto", "float32", "bfloat16", "float16"),
        help="Of weights and KV cache: auto, float32, bfloat16 or float16. auto is bfloat16 where that is "
        "fast. float32 gives the same greedy text alone and in a batch, at twice the bytes.",
    )
    device: str = option(
        "auto",
        group=_MODEL,
        metavar="DEVICE",
        parse=device,
        help="auto, cpu, cuda or cuda:N. auto takes a GPU when there is one.",
    )
    max_model_len: int | Literal["auto"] | None = option(
        None,
        group=_MODEL,
        metavar="TOKENS",
        parse=model_len,
        shown="the model's own context",
        help="Longest prompt + output of one request, in tokens; auto is the longest that fits the KV cache.",
        known_as=("--ctx-size", "-c", "--max-total-tokens", "--context-length", "--max-seq-len"),
    )
    cache_dir: str = option(
        default_factory=default_cache_dir,
        group=_MODEL,
        metavar="DIR",
        parse=text,
        shown="~/.cache/plimsoll",
        help="Where derived files are kept (dequantised weights, tokenizer, compiled kernels).",
        known_as=("--download-dir",),
    )
    num_threads: int | None = option(
        None,
        group=_MODEL,
        metavar="N",
        parse=integer(1, 1024),
        shown="chosen from the cores",
        help="Threads of the engine on a CPU.",
        known_as=("--threads", "-t"),
    )
    compile: str = option(
        "auto",
        group=_MODEL,
        metavar="MODE",
        parse=choice("auto", "off"),
        help="auto: compiled kernels, where a C++ compiler is found; off: torch's own.",
    )
    kv_cache_memory: int | None = option(
        None,
        group=_MEMORY,
        metavar="SIZE",
        parse=memory,
        shown="a share of the memory",
        help="All the memory that the KV cache may take: 512MiB, 8GiB.",
        known_as=("--kv-cache-memory-bytes", "--kv-cache-size", "--kv-memory"),
    )
    cpu_memory_utilization: float = option(
        0.4,
        group=_MEMORY,
        metavar="SHARE",
        parse=number(0.01, 0.95),
        help="On a CPU, the share of the memory that is really available (a container's limit counts) to use "
        "as KV cache when --kv-cache-memory is not given, from 0.01 to 0.95; at most what the most "
        "sequences that may run take at 512 tokens each, or four of the full context.",
    )
    gpu_memory_utilization: float = option(
        0.9,
        group=_MEMORY,
        metavar="SHARE",
        parse=number(0.01, 0.99),
        help="On a GPU, the share of its memory for everything, from 0.01 to 0.99: what the weights and a "
        "measured worst-case step leave of it becomes KV cache when --kv-cache-memory is not given.",
    )
    block_size: int = option(
        16,
        group=_MEMORY,
        metavar="TOKENS",
        parse=block_size,
        help="Tokens in a block of the KV cache, a power of two.",
        known_as=("--page-size",),
    )
    max_num_seqs: int = option(
        256,
        group=_MEMORY,
        metavar="N",
        parse=integer(1, 65536),
        help="Most sequences that run at once; a request of n choices counts n.",
        known_as=(
            "--max-concurrent-requests",
            "--max-running-requests",
            "--parallel",
            "-np",
            "--max-batch-size",
        ),
    )
    max_num_batched_tokens: int = option(
        512,
        group=_MEMORY,
        metavar="TOKENS",
        parse=integer(1, 1048576),
        help="Most tokens in one step. Longer prompts are read in chunks between the others' tokens: lower "
        "keeps the others' pace steadier, higher reads prompts sooner.",
        known_as=("--max-batch-prefill-tokens", "--chunked-prefill-size", "--batch-size", "-b"),
    )
    target_itl_ms: float = option(
        0.0,
        group=_MEMORY,
        metavar="MS",
        parse=number(0, 60000),
        shown="no target",
        help="Milliseconds that should lie between two tokens at most: prompts are read in chunks so short "
        "that a step stays under it, as far as that goes. 0: no target.",
    )
    admission: str = option(
        "predictive",
        group=_DOOR,
        metavar="MODE",
        parse=choice("predictive", "strict"),
        help="predictive: requests are let in while the foreseen peak of the cache stays under the budget; "
        "how long answers are is learned. Where more is wanted than was foreseen, the newest pause, and a "
        "few are computed again. strict: each has its whole max_tokens reserved; nothing ever pauses, and "
        "far fewer run at once.",
    )
    overflow_risk: float = option(
        0.0025,
        group=_DOOR,
        metavar="SHARE",
        parse=number(0.0001, 0.5),
        help="Of predictive admission: the share of requests that may have to be computed again, in the long "
        "run. Higher lets more in at once.",
    )
    max_queue_requests: int = option(
        1024,
        group=_DOOR,
        metavar="N",
        parse=integer(0, 1000000),
        help="Most requests that wait for room; the next one is refused with 429. 0: nothing waits.",
        known_as=("--max-waiting-requests", "--max-queued-requests"),
    )
    max_queue_seconds: float = option(
        60.0,
        group=_DOOR,
        metavar="TIME",
        parse=duration(0),
        shown="60s",
        help="Longest that a request may wait for room. One whose predicted wait is longer is refused with "
        "429 at once; one that waits past it ends with 504.",
    )
    default_max_tokens: int = option(
        512,
        group=_DOOR,
        metavar="TOKENS",
        parse=integer(1),
        help="Most tokens that a chat request gets when it names no max_tokens: it is priced for them.",
    )
    max_request_bytes: int = option(
        4 * 2**20,
        group=_DOOR,
        metavar="SIZE",
        parse=memory,
        shown="4MiB",
        help="Largest request body; a larger one is refused with 413 before it is read whole.",
        known_as=("--payload-limit",),
    )
    max_prompts: int = option(
        128,
        group=_DOOR,
        metavar="N",
        parse=integer(1, 65536),
        help="Most prompts in one completion request.",
        known_as=("--max-client-batch-size",),
    )
    max_concurrent_tokenizations: int = option(
        2,
        group=_DOOR,
        metavar="N",
        parse=integer(1, 256),
        help="Long prompts that are turned into tokens at the same time, each in a thread.",
        known_as=("--tokenization-workers", "--tokenizer-worker-num"),
    )
    host: str = option(
        "127.0.0.1",
        group=_SERVER,
        metavar="ADDRESS",
        parse=text,
        help="Address to listen on; 0.0.0.0 is every IPv4 interface.",
        known_as=("--hostname",),
    )
    port: int = option(
        8000,
        group=_SERVER,
        metavar="PORT",
        parse=integer(0, 65535),
        help="TCP port to listen on; 0 takes any free one.",
        known_as=("-p",),
    )
    max_connections: int = option(
        2048,
        group=_SERVER,
        metavar="N",
        parse=integer(1, 1000000),
        help="Most connections of clients, idle ones included. On one more, probes and /metrics are still "
        "answered, and everything else with 503.",
        known_as=("--limit-concurrency",),
    )
    api_keys: tuple[str, ...] = option(
        (),
        flag="--api-key",
        group=_SERVER,
        metavar="KEY[,KEY…]|@FILE",
        parse=api_keys,
        repeatable=True,
        secret=True,
        shown="none: everybody may ask",
        help="Keys that /v1/* asks for (not the probes, not /metrics). Can be repeated. @FILE reads one key "
        "a line; a file or the environment keeps keys out of the list of processes.",
        known_as=("--api-keys",),
    )
    tenants: tuple[DescribedTenant, ...] = option(
        (),
        group=_TENANTS,
        metavar="FILE",
        parse=read_tenants,
        shown="each key is one, of equal weight",
        help="TOML or JSON that names tenants, their keys, weights and limits (docs/tenants.md). "
        "Its keys are asked for like those of --api-key.",
    )
    tenant_header: str = option(
        "",
        group=_TENANTS,
        metavar="NAME",
        parse=header_name,
        shown="off",
        help="A request header that names the tenant, whatever the key. Only for a server that none but a "
        "trusted gateway can reach: whoever can write the header can be anybody.",
    )
    max_tenant_labels: int = option(
        32,
        group=_TENANTS,
        metavar="N",
        parse=integer(0, 1000),
        help="Most tenants that have time series of their own in /metrics; the rest are counted as `other`.",
    )
    engine_step_timeout: float = option(
        60.0,
        group=_SERVER,
        metavar="TIME",
        parse=duration(0.1),
        shown="60s",
        help="An engine whose step takes longer counts as dead, and a new one is started.",
    )
    engine_start_timeout: float = option(
        900.0,
        group=_SERVER,
        metavar="TIME",
        parse=duration(0),
        shown="15m",
        help="An engine that says nothing of its progress for so long while it starts counts as dead too. "
        "0: the first start may take as long as it likes.",
    )
    shutdown_timeout: float = option(
        25.0,
        group=_SERVER,
        metavar="TIME",
        parse=duration(0),
        shown="25s",
        help="After SIGTERM, how long running requests may take to finish. (Kubernetes kills after 30 s.)",
        known_as=("--graceful-timeout", "--timeout-graceful-shutdown"),
    )
    log_level: str = option(
        "info",
        group=_SERVER,
        metavar="LEVEL",
        parse=choice("debug", "info", "warning", "error"),
        help="debug, info, warning or error. One line for each request's ending is written at info.",
        known_as=("--uvicorn-log-level",),
    )
    log_format: str = option(
        "text",
        group=_SERVER,
        metavar="FORMAT",
        parse=choice("text", "json"),
        help="text or json, one line for each event, to standard error.",
        known_as=("--json-output",),
    )

    def __post_init__(self) -> None:
        if not self.served_model_name:
            object.__setattr__(self, "served_model_name", default_name(self.model))

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys) or any(tenant.key_digests for tenant in self.tenants)

    def engine_config(self) -> EngineConfig:
        auto = self.max_model_len == "auto"
        return EngineConfig(
            model=self.model,
            cache_dir=self.cache_dir,
            log_level=self.log_level,
            log_format=self.log_format,
            dtype=self.dtype,
            device=self.device,
            block_size=self.block_size,
            kv_cache_memory_bytes=self.kv_cache_memory,
            cpu_memory_utilization=self.cpu_memory_utilization,
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_model_len=None if isinstance(self.max_model_len, str) else self.max_model_len,
            max_model_len_auto=auto,
            grows=self.admission == "predictive",
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            target_itl_seconds=self.target_itl_ms / 1000 if self.target_itl_ms else None,
            num_threads=self.num_threads,
            compile=self.compile,
        )

    def door_policy(self) -> DoorPolicy:
        return DoorPolicy(
            predictive=self.admission == "predictive",
            overflow_risk=self.overflow_risk,
            tenants=tuple(tenant.policy for tenant in self.tenants),
            max_queue_requests=self.max_queue_requests,
            max_queue_seconds=self.max_queue_seconds,
            engine_step_timeout=self.engine_step_timeout,
            engine_start_timeout=self.engine_start_timeout,
        )


OPTIONS = options_of(Settings)
