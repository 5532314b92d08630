"""The options of `plimsoll plan`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from app.options import build_parser, option, options_of, read_flags
from app.plan.cards import CARDS, Card, find_card
from app.settings import default_cache_dir
from app.sizes import parse_size
from app.values import block_size, choice, did_you_mean, integer, memory, number, picture_file, text
from model_runner.sizes import format_size

# Named here and not imported: the price list knows the same ones, and a test holds the two together.
KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "int8", "int4", "q8_0", "q4_0")

_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_MOST_TOKENS = 1 << 32  # in a context, and far past any
_MOST_SEQUENCES = 1 << 20

_MODEL = "the model"
_DEVICE = "the device"
_QUESTION = "the question"
_ANSWER = "the answer"


def _device(value: str) -> Card:
    card = find_card(value)  # or says which there are of that name
    if card is not None:
        return card
    try:
        size = memory(value)
        return Card(format_size(size), size, 0.0)
    except ValueError as error:
        guess = did_you_mean(value, CARDS)
        raise ValueError(f"{error}, or a card's name: {', '.join(CARDS)}{guess}") from None


def _bandwidth(value: str) -> float:
    size, slash, second = value.partition("/")
    if slash and second.strip() != "s":
        raise ValueError(f"{value!r} is not a bandwidth; write 3.35TB/s, 900GB/s or bytes per second")
    return float(memory(size))


def _token_counts(value: str) -> tuple[int, ...]:
    """`4096,32K,1M`: K and M are 1024 and 1024², as context lengths are named. Each once."""
    counts: dict[int, None] = {}
    for part in value.split(","):
        written = re.fullmatch(r"([0-9]+)([km]?)", part.strip().lower())
        if written is None or not written[1].strip("0"):
            raise ValueError(f"{part!r} is not a number of tokens; write for example 4096,32K,128K")
        if len(written[1]) > 12 or (count := int(written[1]) * _FACTORS[written[2]]) > _MOST_TOKENS:
            raise ValueError(
                f"{part.strip()!r} is out of range; it must be at most {_MOST_TOKENS >> 20}M tokens"
            )
        counts[count] = None
    return tuple(counts)


def _counts(value: str) -> tuple[int, ...]:
    """Each once."""
    return tuple(dict.fromkeys(integer(1, _MOST_SEQUENCES)(part) for part in value.split(",")))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    model: str = option(
        "",
        group=_MODEL,
        metavar="MODEL",
        parse=text,
        shown="the embedded model",
        help="A directory, a hub id, a config.json alone, or a .gguf file, of which only headers are read.",
    )
    dtype: str = option(
        "auto",
        group=_MODEL,
        metavar="TYPE",
        parse=choice("auto", "float32", "bfloat16", "float16", "stored"),
        help="What the weights are kept in: float32, bfloat16, float16, or stored, as the files have them. "
        "auto is stored where there are safetensors, else what the config says, packed where it tells how; a "
        ".gguf file is dequantised to bfloat16.",
    )
    kv_dtype: str = option(
        "auto",
        group=_MODEL,
        metavar="TYPE",
        parse=choice(*KV_DTYPES),
        shown="the model's",
        help=f"What the cache is kept in: {', '.join(KV_DTYPES[1:])}. Quantised ones count their scales.",
    )
    device_memory: Card | None = option(  # noqa: RUF009
        None,
        group=_DEVICE,
        metavar="SIZE|CARD",
        parse=_device,
        shown="this machine's, as the server would use it",
        help=f"A size (80GiB), or a card, whose bandwidth is then known: {', '.join(CARDS)}. (Drivers show "
        "an MI250X as two devices; this is one.)",
    )
    memory_bandwidth: float = option(
        0.0,
        group=_DEVICE,
        metavar="SIZE/s",
        parse=_bandwidth,
        shown="the card's",
        help="How fast the device reads its memory, as 3.35TB/s. Without it there is no speed in the answer.",
    )
    tensor_parallel: int = option(
        1, group=_DEVICE, metavar="N", parse=integer(1, 1024), help="Devices that share the model."
    )
    gpu_memory_utilization: float = option(
        0.9,
        group=_DEVICE,
        metavar="SHARE",
        parse=number(0.05, 1.0),
        help="The part of the memory that is used. (Of this machine's own, where it is no GPU's, the cache "
        "takes the server's --cpu-memory-utilization of what the weights leave.)",
    )
    overhead: int = option(
        1 << 30,
        group=_DEVICE,
        metavar="SIZE",
        parse=parse_size,
        shown="1GiB",
        help="Of each device, for activations and the runtime. (A server measures its own at start-up.)",
    )
    context: tuple[int, ...] = option(
        (),
        group=_QUESTION,
        metavar="N[,N…]",
        parse=_token_counts,
        shown="1K, 4K, 16K … up to the model's",
        help="Tokens of a request, prompt and answer. The last is never written to the cache.",
    )
    batch: tuple[int, ...] = option(
        (1, 8, 32, 128),
        group=_QUESTION,
        metavar="N[,N…]",
        parse=_counts,
        shown="1,8,32,128",
        help="Sequences at once.",
    )
    block_size: int = option(
        16,
        group=_QUESTION,
        metavar="N",
        parse=block_size,
        help="Tokens of a block, as the server's --block-size.",
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
        help="Draw the load line, batch against context, into FILE.png, FILE.svg or FILE.html.",
    )
    cache_dir: str = option(
        default_factory=default_cache_dir,
        group=_ANSWER,
        metavar="DIR",
        parse=text,
        shown="the server's",
        help="Where what is read of a GGUF file is kept.",
    )


OPTIONS = options_of(PlanOptions)

_DESCRIPTION = """\
What a model's KV cache needs, and how many sequences of which length fit a device beside its weights. Reads
configurations and headers; loads no weights and needs no accelerator."""

_EPILOG = """\
examples:
  plimsoll plan
  plimsoll plan --model meta-llama/Llama-3.1-70B --device-memory H100 --tensor-parallel 4 --context 8K,128K
  plimsoll plan --model ./config.json --device-memory 80GiB --memory-bandwidth 2TB/s --plot line.svg"""


def load_options(argv: Sequence[str]) -> PlanOptions:
    """Raises UsageError, with what to write instead, for what is unknown or malformed."""
    parser = build_parser("plimsoll plan", OPTIONS, description=_DESCRIPTION, epilog=_EPILOG, env_prefix=None)
    given = read_flags(parser, OPTIONS, argv).values
    return PlanOptions(**given)
