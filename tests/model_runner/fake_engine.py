"""An engine process like the real one, but for the model: its tokens are counted, not computed.

`EngineConfig.model` is a JSON object of knobs. Some prompt tokens do harm when they are run.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import msgspec

from model_runner import engine_process
from model_runner.config import EngineConfig
from model_runner.core.block_layout import BlockLayout
from model_runner.core.kv_spec import KVCacheSpec
from model_runner.core.output import RunnerOutput, SchedulerOutput
from model_runner.core.weights import WeightsRead
from model_runner.engine import EngineCore
from model_runner.engine_process import BuiltEngine, OnPlanned, OnProgress
from model_runner.errors import StartupError
from model_runner.messages import ModelInfo

KILLS, HANGS, RAISES = 901, 902, 903  # prompt tokens
FIRST_TOKEN = 1000  # the token at position p of choice c is FIRST_TOKEN + 100 * c + p


def _is_there(path: object) -> bool:
    return path is not None and Path(str(path)).exists()


class CountingRunner:
    def __init__(self, knobs: dict[str, object]) -> None:
        self.step_seconds = float(str(knobs.get("step_seconds", 0.0)))
        self._knobs = knobs

    def execute(self, scheduled: SchedulerOutput) -> RunnerOutput:
        for sequence in scheduled.sequences:
            if not _is_there(self._knobs.get("harmless_if")):
                self._harm(set(sequence.token_ids))
        time.sleep(self.step_seconds)
        tokens = [FIRST_TOKEN + 100 * sample.choice + sample.position for sample in scheduled.samples]
        return RunnerOutput(tokens, [None] * len(tokens))

    def _harm(self, token_ids: set[int]) -> None:
        if KILLS in token_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        if HANGS in token_ids:
            time.sleep(3600)
        if RAISES in token_ids:
            raise RuntimeError("the device caught fire")


def build(config: EngineConfig, on_progress: OnProgress, on_planned: OnPlanned) -> BuiltEngine:
    knobs = json.loads(config.model)
    if _is_there(knobs.get("dies_at_start_if")):
        os._exit(3)
    if _is_there(knobs.get("is_killed_at_start_if")):
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_there(knobs.get("hangs_at_start_if")):
        time.sleep(3600)
    if _is_there(knobs.get("fails_at_start_if")):
        raise StartupError("no such model")
    spec = KVCacheSpec.from_config(
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "hidden_size": 16,
            "head_dim": 8,
            "layer_types": ["full_attention"] * 2,
        },
        kv_dtype="float32",
    )
    layout = BlockLayout.from_spec(spec, block_size=config.block_size)
    assert config.kv_cache_memory_bytes is not None
    model = ModelInfo(
        architecture="Counting",
        dtype="float32",
        device="cpu",
        max_model_len=4096,
        vocab_size=2000,
        eos_token_ids=(0,),
        layout=layout,
        num_blocks=config.kv_cache_memory_bytes // layout.block_bytes,
        headroom_blocks=0,
        weights=WeightsRead(0),
        weights_held_bytes=0,
        weights_parameters=0,
        model_type="llama",
        model_context=None,
    )
    on_progress("counting", 0.5)
    on_planned(model)
    if _is_there(knobs.get("hangs_after_planning_if")):
        time.sleep(3600)
    time.sleep(float(knobs.get("load_seconds", 0.0)))
    core = EngineCore(
        layout,
        CountingRunner(knobs),
        num_blocks=model.num_blocks,
        headroom_blocks=0,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        eos_token_ids=model.eos_token_ids,
        max_model_len=model.max_model_len,
        grows=config.grows,
    )
    model = msgspec.structs.replace(model, weights_held_bytes=7)  # measured, now that they are there
    return BuiltEngine(core, model, 0.01, 10_000.0, "counting")


if __name__ == "__main__":
    engine_process.main(build)
