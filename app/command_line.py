"""What was written for `plimsoll serve`: on the command line, else in the environment (`PLIMSOLL_…`).
What was not has its default from app.settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.options import Given, UsageError, build_parser, markdown_table, read_environment, read_flags
from app.settings import OPTIONS, Settings
from app.tenant_file import key_name
from model_runner.core.tenants import DEFAULT_TENANT

ENV_PREFIX = "PLIMSOLL_"

_DESCRIPTION = """\
Serve a language model over the OpenAI HTTP API. Every request is priced in bytes of KV cache before it runs:
it is admitted, queued, or refused at the door with the numbers and the time to come back.

Every option can be written in the environment too, as PLIMSOLL_… (in brackets below, after the default).
The command line comes first, then the environment, then the default.
Sizes are written 512MiB, 8GiB, 1.5GB; times 30s, 5m, or plain seconds."""

_EPILOG = """\
examples:
  plimsoll serve
      the embedded model on http://127.0.0.1:8000
  plimsoll serve --model Qwen/Qwen3-0.6B --kv-cache-memory 8GiB --host 0.0.0.0 --api-key @keys.txt
      a model of the hub with 8 GiB of cache, for everybody who has a key"""


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Settings from the words after `plimsoll serve` and the environment.

    Raises UsageError, with what to write instead, for what is unknown, malformed or contradictory.
    `--help` prints and raises SystemExit(0).
    """
    parser = build_parser(
        "plimsoll serve", OPTIONS, description=_DESCRIPTION, epilog=_EPILOG, env_prefix=ENV_PREFIX
    )
    flags = read_flags(parser, OPTIONS, argv)
    env = read_environment(OPTIONS, environ, ENV_PREFIX)
    given = Given({**env.values, **flags.values}, {**env.written, **flags.written})
    settings = Settings(**given.values)
    _refuse_contradictions(settings, given.written)
    return settings


def _refuse_contradictions(settings: Settings, written: Mapping[str, str]) -> None:
    for share in ("gpu_memory_utilization", "cpu_memory_utilization"):
        if "kv_cache_memory" in written and share in written:
            both = f"{written['kv_cache_memory']} and {written[share]}"
            raise UsageError(f"{both} both size the KV cache; write one of them.")
    _refuse_unreachable_tenants(settings)
    kind = settings.device.partition(":")[0]
    for share, other in (("gpu_memory_utilization", "cpu"), ("cpu_memory_utilization", "cuda")):
        if share in written and kind == other:
            mine = "--cpu-memory-utilization" if other == "cpu" else "--gpu-memory-utilization"
            raise UsageError(
                f"{written[share]} has no meaning with {written['device']}; "
                f"write {mine}, or --kv-cache-memory SIZE."
            )
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        seqs, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
        raise UsageError(
            f"--max-num-seqs {seqs} sequences each take a token of every step, more than "
            f"--max-num-batched-tokens {tokens}; "
            f"write --max-num-seqs {tokens} or --max-num-batched-tokens {seqs}."
        )


def _refuse_unreachable_tenants(settings: Settings) -> None:
    """A tenant that nobody can be is a mistake in its file."""
    by_place = {key_name(number) for number, _ in enumerate(settings.api_keys, start=1)}
    for tenant in settings.tenants:
        name = tenant.policy.name
        if not (tenant.key_digests or settings.tenant_header or name in by_place | {DEFAULT_TENANT}):
            raise UsageError(
                f"--tenants: nobody can be tenant {name!r}; write its `keys` or `keys_sha256`, "
                "or --tenant-header NAME where a trusted gateway names tenants."
            )


def options_table() -> str:
    """The README's table of the options of `plimsoll serve`, in Markdown."""
    return markdown_table(OPTIONS, env_prefix=ENV_PREFIX)
