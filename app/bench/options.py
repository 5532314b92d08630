"""The options of `plimsoll bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.options import UsageError, build_parser, option, options_of, read_flags
from app.sizes import parse_size
from app.values import base_url, choice, duration, integer, number, several, text, yes

_TARGET = "the server"
_LOAD = "the load"
_REPORT = "the report"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    base_url: str = option(
        "http://127.0.0.1:8000",
        group=_TARGET,
        metavar="URL",
        parse=base_url,
        help="Where the server listens.",
    )
    model: str = option(
        "",
        group=_TARGET,
        metavar="NAME",
        parse=text,
        shown="the first of /v1/models",
        help="The field `model` of the requests.",
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
    endpoint: str = option(
        "completions",
        group=_TARGET,
        metavar="KIND",
        parse=choice("completions", "chat"),
        help="completions or chat. Both stream.",
    )
    timeout: float = option(
        600.0,
        group=_TARGET,
        metavar="TIME",
        parse=duration(0.001),
        shown="10m",
        help="A request that takes longer is an error.",
    )
    concurrency: tuple[int, ...] = option(
        (),
        group=_LOAD,
        metavar="N[,N…]",
        parse=several(integer(1, 65536)),
        shown="1,8,32",
        help="Closed loop: so many clients, each sends its next request when its last has ended.",
    )
    rate: tuple[float, ...] = option(
        (),
        group=_LOAD,
        metavar="R[,R…]",
        parse=several(number(0.001, 100000)),
        shown="closed loop",
        help="Open loop instead: so many requests a second, at random moments (Poisson), whatever the "
        "server does.",
        known_as=("--request-rate",),
    )
    requests: int = option(
        0,
        group=_LOAD,
        metavar="N",
        parse=integer(1),
        shown="4 per client and at least 8; open loop: 10 s of the rate and at least 16",
        help="Requests measured for each N or R.",
        known_as=("--num-prompts", "--num-requests", "-n"),
    )
    warmup: int = option(
        2, group=_LOAD, metavar="N", parse=integer(0), help="Requests before each measurement, not counted."
    )
    prompt_tokens: int = option(
        128,
        group=_LOAD,
        metavar="N",
        parse=integer(1),
        help="About so many tokens in each prompt, of random common words. The report says how many it was.",
        known_as=("--random-input-len", "--input-len"),
    )
    output_tokens: int = option(
        64,
        group=_LOAD,
        metavar="N",
        parse=integer(1),
        help="max_tokens of each request; end-of-text is ignored, if the server can.",
        known_as=("--random-output-len", "--output-len", "--max-tokens"),
    )
    ignore_eos: bool = option(
        True,
        group=_LOAD,
        metavar="yes|no",
        parse=yes,
        shown="yes",
        help="Send ignore_eos; no, for servers that refuse it.",
    )
    stream_usage: bool = option(
        True,
        group=_LOAD,
        metavar="yes|no",
        parse=yes,
        shown="yes",
        help="Ask for the usage at the end of each stream; no, for servers that refuse stream_options. Where "
        "none is told, each text that arrives is counted as one token.",
    )
    seed: int = option(
        0, group=_LOAD, metavar="N", parse=integer(0), help="Of words and arrivals: same seed, same load."
    )
    roofline: bool = option(
        False,
        group=_REPORT,
        metavar="",
        parse=yes,
        switch=True,
        shown="off",
        help="Measure this machine's read bandwidth too, and give tokens/s in units of R = bandwidth / "
        "weights: what one sequence at a time could reach at most. For a server on this machine, on its CPU.",
    )
    weights_bytes: int = option(
        0,
        group=_REPORT,
        metavar="SIZE",
        parse=parse_size,
        shown="the server's metric plimsoll_model_weights_read_bytes",
        help="Bytes of weights that are read for each token, for --roofline.",
    )
    format: str = option(
        "table", group=_REPORT, metavar="FORMAT", parse=choice("table", "json"), help="table or json."
    )
    output: str = option(
        "",
        group=_REPORT,
        metavar="FILE",
        parse=text,
        shown="standard output",
        help="Where the report is written.",
    )


OPTIONS = options_of(BenchOptions)

_DESCRIPTION = """\
Send completions to any OpenAI-compatible server and report output tokens per second, time to first token
(TTFT), time between tokens (ITL) and end-to-end time as clients see them, and errors by kind. No retries."""

_EPILOG = """\
examples:
  plimsoll bench --concurrency 1,8,32,64 --roofline
  plimsoll bench --base-url https://llm.example.org --rate 5 --requests 200 --format json --output r.json"""


def load_options(argv: Sequence[str], environ: Mapping[str, str]) -> BenchOptions:
    """Raises UsageError, with what to write instead, for what is unknown, malformed or contradictory."""
    parser = build_parser(
        "plimsoll bench", OPTIONS, description=_DESCRIPTION, epilog=_EPILOG, env_prefix=None
    )
    given = read_flags(parser, OPTIONS, argv).values
    if "concurrency" in given and "rate" in given:
        raise UsageError("--concurrency is a closed loop and --rate an open one; write one of them.")
    if "weights_bytes" in given and "roofline" not in given:
        raise UsageError("--weights-bytes is only read by --roofline; write both, or neither.")
    if "concurrency" not in given and "rate" not in given:
        given["concurrency"] = (1, 8, 32)
    given.setdefault("api_key", environ.get("OPENAI_API_KEY", ""))
    return BenchOptions(**given)
