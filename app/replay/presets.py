"""What a step costs, for some models on some cards; and the file that `plimsoll calibrate` writes.

But for `standard`, which is agreed upon, and those marked as measured, these are reckoned from data sheets:
of a card's bandwidth four fifths and of its arithmetic half are reached, and a step has a millisecond (with
several cards, two and a half) of launches and messages on top. Measure yours: `plimsoll calibrate`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from app.plan.cards import CARDS
from app.values import did_you_mean
from model_runner.replay.step_model import StepModel, standard

_REACHED_BANDWIDTH, _REACHED_ARITHMETIC = 0.8, 0.5
_OVERHEAD_ALONE, _OVERHEAD_TOGETHER = 0.001, 0.0025  # seconds a step

# bfloat16 operations a second without sparsity, from the data sheets that app.plan.cards names.
_ARITHMETIC = {"L4": 121e12, "A100-80GB": 312e12, "H100": 989e12, "H200": 989e12}


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As in the file: seconds of a step = base_seconds + per_token_seconds · tokens computed +
    per_context_token_seconds · tokens of context read."""

    base_seconds: float
    per_token_seconds: float
    per_context_token_seconds: float
    kv_bytes_per_token: int | None = None  # None: it is not known
    about: str = ""

    @property
    def model(self) -> StepModel:
        return StepModel(self.base_seconds, self.per_token_seconds, self.per_context_token_seconds)

    def check(self) -> None:
        """Raises ValueError for what no step can cost."""
        for name in ("base_seconds", "per_token_seconds", "per_context_token_seconds"):
            if not 0 <= getattr(self, name) < 1e6:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more seconds")
        if self.base_seconds + self.per_token_seconds <= 0:
            raise ValueError("a step that takes no time: base_seconds and per_token_seconds are both 0")
        if self.kv_bytes_per_token is not None and self.kv_bytes_per_token < 1:
            raise ValueError("kv_bytes_per_token must be at least 1")


def _preset(model: StepModel, kv_bytes: int, about: str) -> Preset:
    return Preset(
        base_seconds=model.base,
        per_token_seconds=model.per_token,
        per_context_token_seconds=model.per_context_token,
        kv_bytes_per_token=kv_bytes,
        about=about,
    )


def _reckon(parameters: float, kv_bytes: int, card: str, cards: int = 1) -> Preset:
    bandwidth = _REACHED_BANDWIDTH * CARDS[card].bandwidth * cards
    arithmetic = _REACHED_ARITHMETIC * _ARITHMETIC[card] * cards
    overhead = _OVERHEAD_ALONE if cards == 1 else _OVERHEAD_TOGETHER
    model = StepModel(
        2 * parameters / bandwidth + overhead, 2 * parameters / arithmetic, kv_bytes / bandwidth
    )
    about = f"reckoned: {parameters / 1e9:.2f}e9 parameters in bfloat16 on {cards} × {card}"
    return _preset(model, kv_bytes, about)


_LLAMA_8B = (8.03e9, 131_072)  # parameters; bytes of cache a token: 2 · 32 layers · 8 heads · 128 · 2
_LLAMA_70B = (70.55e9, 327_680)  # 2 · 80 · 8 · 128 · 2

PRESETS: dict[str, Preset] = {
    "standard": _preset(standard(), 131_072, "an 8B model on a data-centre GPU, agreed upon for comparisons"),
    "llama-3.1-8b-l4": _reckon(*_LLAMA_8B, "L4"),
    "llama-3.1-8b-a100": _reckon(*_LLAMA_8B, "A100-80GB"),
    "llama-3.1-8b-h100": _reckon(*_LLAMA_8B, "H100"),
    "llama-3.1-8b-h200": _reckon(*_LLAMA_8B, "H200"),
    "llama-3.1-70b-4xh100": _reckon(*_LLAMA_70B, "H100", 4),
}


class StepModelChoice(msgspec.Struct, frozen=True):
    name: str
    preset: Preset


def step_model(value: str) -> StepModelChoice:
    """A preset's name, a file, or three numbers. Raises ValueError with what to write."""
    if value in PRESETS:
        return StepModelChoice(value, PRESETS[value])
    if len(numbers := value.split(",")) == 3:
        preset = _of_numbers(value, numbers)
    elif value.endswith(".json") or Path(value).is_file():
        preset = _of_file(value)
    else:
        raise ValueError(
            f"{value!r} is no step model; write a file that `plimsoll calibrate` wrote, three numbers "
            f"(0.006,3.2e-5,4e-8), or one of {', '.join(PRESETS)}{did_you_mean(value, PRESETS)}"
        )
    preset.check()
    return StepModelChoice(value, preset)


def _of_numbers(value: str, numbers: list[str]) -> Preset:
    try:
        base, per_token, per_context = map(float, numbers)
    except ValueError:
        raise ValueError(f"{value!r} are not three numbers; write for example 0.006,3.2e-5,4e-8") from None
    return Preset(base_seconds=base, per_token_seconds=per_token, per_context_token_seconds=per_context)


def _of_file(path: str) -> Preset:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Preset)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is no step model: {error}") from None
