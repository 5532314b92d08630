"""The messages between the API process and the engine process, and their encoding.

Both ways they travel as MessagePack over a pair of ZeroMQ sockets. Every message from the engine carries the
`epoch` it was born with, so that a dead engine's last words can be told from its successor's and ignored.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from model_runner.core.block_layout import BlockLayout
from model_runner.core.weights import WeightsRead
from model_runner.types import ChoiceOutput, SamplingParams, StepStats


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Run one prompt (with its n choices). It has been admitted: its blocks are reserved, or the engine is to
    grant them as it grows (`reserved_blocks` is 0 then)."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    reserved_blocks: int
    priority: int = 0  # the smaller goes first


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request, or one choice of it, before the next step. An unknown or finished id is ignored:
    an abort may cross the finish on the way."""

    request_id: str
    choice: int | None = None


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave at once, with exit code 0."""


ToEngine: TypeAlias = Submit | Abort | Shutdown


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine derived from the model and the machine. The API process needs no torch to use it."""

    architecture: str
    dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    layout: BlockLayout
    num_blocks: int  # that requests may reserve
    headroom_blocks: int  # kept aside, once per engine, for sliding layers' prefill chunk in flight
    weights: WeightsRead  # each counted once
    weights_held_bytes: int  # as they lie in memory, copies in another layout included
    weights_parameters: int
    model_type: str
    model_context: int | None  # tokens, as the model's configuration states
    num_threads: int = 1

    @property
    def weights_bytes(self) -> int:
        return self.weights.total_bytes

    @property
    def kv_budget_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    epoch: int
    stage: str  # a few words: "reading weights"
    fraction: float  # 0.0 to 1.0


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """Prices and budget are known (weights may still be loading)."""

    epoch: int
    model: ModelInfo


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The tensors are allocated, checked against the price list, and warm."""

    epoch: int
    model: ModelInfo
    decode_step_seconds: float  # measured at warm-up, batch 1
    prefill_tokens_per_second: float
    execution: str  # a few words for the log: "torch.compile, native attention", "eager, torch attention"


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """A StartupError's message. The engine exits after it; trying again would fail the same way."""

    epoch: int
    message: str


class StepDone(msgspec.Struct, frozen=True, tag="step"):
    """One per step. `released` names requests all of whose blocks are back in the pool: only now may the
    ledger have their bytes again. It also answers aborts, when no step was run (stats is None then)."""

    epoch: int
    outputs: list[ChoiceOutput]
    released: list[str]
    stats: StepStats | None
    # (request id, blocks it may hold from now on) where that has changed; of engines that grant as they go.
    grants: list[tuple[str, int]] = []
    preempted: list[str] = []  # request ids, in this step


FromEngine: TypeAlias = Loading | Planned | Ready | StartFailed | StepDone

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises msgspec.DecodeError on anything that is not a message for the engine."""
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises msgspec.DecodeError on anything that is not a message from an engine."""
    return _from_engine.decode(data)
