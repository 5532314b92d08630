"""The options of `plimsoll calibrate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.options import build_parser, option, options_of, read_flags
from app.values import base_url, choice, duration, integer, several, text

_TARGET = "the server"
_LOAD = "what it is sent"
_ANSWER = "the answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    base_url: str = option(
        "http://127.0.0.1:8000",
        group=_TARGET,
        metavar="URL",
        parse=base_url,
        help="Where a Plimsoll server listens that has nothing else to do meanwhile.",
    )
    api_key: str = option(
        "",
        group=_TARGET,
        metavar="KEY",
        parse=text,
        secret=True,
        shown="OPENAI_API_KEY, or none",
        help="Sent as a bearer token. The environment keeps it out of the list of processes.",
    )
    timeout: float = option(
        600.0,
        group=_TARGET,
        metavar="TIME",
        parse=duration(0.001),
        shown="10m",
        help="For one request.",
    )
    batch: tuple[int, ...] = option(
        (1, 2, 4, 8, 16),
        group=_LOAD,
        metavar="N[,N…]",
        parse=several(integer(1, 65536)),
        shown="1,2,4,8,16",
        help="Requests at once.",
    )
    prompt_tokens: tuple[int, ...] = option(
        (16, 128, 512, 1024),
        group=_LOAD,
        metavar="N[,N…]",
        parse=several(integer(1)),
        shown="16,128,512,1024",
        help="Tokens of their prompts. What passes the server's context or cache is left out.",
    )
    output_tokens: int = option(
        32,
        group=_LOAD,
        metavar="N",
        parse=integer(3),
        help="Tokens of each answer. Each batch is sent with answers of 2 tokens, too.",
    )
    output: str = option(
        "step-model.json",
        group=_ANSWER,
        metavar="FILE",
        parse=text,
        help="Where the step model is written, for `plimsoll replay --step-model FILE`.",
    )
    format: str = option(
        "table", group=_ANSWER, metavar="FORMAT", parse=choice("table", "json"), help="table or json."
    )


OPTIONS = options_of(CalibrateOptions)

_DESCRIPTION = """\
Send a running Plimsoll server batches of several sizes and lengths, read from its metrics how long its steps
took, and fit what a step costs: a part for itself, one for each token computed, one for each token of context
read."""

_EPILOG = """\
examples:
  plimsoll calibrate
  plimsoll calibrate --base-url http://10.0.0.7:8000 --batch 1,8,64 --prompt-tokens 64,2048 --output h100.json
  plimsoll replay chat.csv --step-model h100.json --kv-cache-memory 40GiB"""


def load_options(argv: Sequence[str], environ: Mapping[str, str]) -> CalibrateOptions:
    """Raises UsageError, with what to write instead, for what is unknown or malformed."""
    parser = build_parser(
        "plimsoll calibrate", OPTIONS, description=_DESCRIPTION, epilog=_EPILOG, env_prefix=None
    )
    given = read_flags(parser, OPTIONS, argv).values
    given.setdefault("api_key", environ.get("OPENAI_API_KEY", ""))
    return CalibrateOptions(**given)
