from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from app.calibrate.command import calibrate
from app.calibrate.options import OPTIONS, load_options
from app.cli import main
from app.options import UsageError
from app.replay.presets import step_model
from model_runner.errors import StartupError
from model_runner.replay.step_model import StepModel
from tests.app.bench.server import Server, stream

COST = StepModel(base=0.004, per_token=2e-5, per_context_token=3e-8)


class Engine:
    """Answers completions, and tells metrics as if each had run alone at a known cost."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.steps = self.tokens = self.context = 0
        self.running = 0
        server.answer = self.answer
        self.tell()

    async def answer(self, body: dict[str, Any]) -> Response:
        prompt, output = len(body["prompt"]), body["max_tokens"]
        self.steps += output
        self.tokens += prompt + output - 1
        self.context += sum(prompt + index for index in range(output))
        self.tell()
        return StreamingResponse(stream(body, gap=0.0), media_type="text/event-stream")

    def tell(self) -> None:
        seconds = (
            COST.base * self.steps + COST.per_token * self.tokens + COST.per_context_token * self.context
        )
        labels = 'model="small",architecture="x",dtype="float32",device="cpu",max_model_len="512"'
        self.server.metrics = f"""\
# TYPE plimsoll_step_duration_seconds histogram
plimsoll_step_duration_seconds_bucket{{le="+Inf"}} {self.steps}
plimsoll_step_duration_seconds_count {self.steps}
plimsoll_step_duration_seconds_sum {seconds!r}
# TYPE plimsoll_step_tokens counter
plimsoll_step_tokens_total {self.tokens}
# TYPE plimsoll_context_tokens counter
plimsoll_context_tokens_total {self.context}
# TYPE plimsoll_kv_cache_budget_bytes gauge
plimsoll_kv_cache_budget_bytes 2048000
# TYPE plimsoll_kv_cache_bytes_per_token gauge
plimsoll_kv_cache_bytes_per_token 1000
# TYPE plimsoll_requests_running gauge
plimsoll_requests_running {self.running}
# TYPE plimsoll_requests_waiting gauge
plimsoll_requests_waiting 0
# TYPE plimsoll_model info
plimsoll_model_info{{{labels}}} 1
"""


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Server() as server:
        yield Engine(server)


def argv(engine: Engine, output: Path) -> list[str]:
    load = ["--batch", "1,3", "--prompt-tokens", "5,60,400,2000", "--output-tokens", "6"]
    return ["--base-url", engine.server.url, "--output", str(output), *load]


def test_the_costs_are_found_and_written(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.json"
    assert calibrate([*argv(engine, file), "--format", "json"], {}) == 0
    report = json.loads(capsys.readouterr().out)
    preset = step_model(str(file)).preset
    assert preset.base_seconds == pytest.approx(COST.base, rel=1e-3)
    assert preset.per_token_seconds == pytest.approx(COST.per_token, rel=1e-3)
    assert preset.per_context_token_seconds == pytest.approx(COST.per_context_token, rel=1e-2)
    assert preset.kv_bytes_per_token == 1000
    assert preset.about.startswith("measured: small in float32 on cpu; median error 0.")
    assert report["base_seconds"] == preset.base_seconds
    assert report["largest_error"] < 0.01
    assert report["measurements"] >= 6
    page = (Path(__file__).parents[3] / "docs" / "replay.md").read_text()
    assert all(f"`{key}`" in page for key in report)


def test_what_is_sent(engine: Engine, tmp_path: Path) -> None:
    calibrate(argv(engine, tmp_path / "a.json"), {"OPENAI_API_KEY": "secret"})
    sent = [(len(body["prompt"]), body["max_tokens"]) for body in engine.server.bodies]
    # A warm-up, then all but what passes the context of 512 tokens.
    expected = [(5, 6)]
    for prompt in (5, 60, 400):
        for batch in (1, 3):
            expected += [(prompt, 2)] * batch + [(prompt, 6)] * batch
    assert sent == expected
    assert engine.server.bodies[0]["ignore_eos"] is True
    assert set(engine.server.keys) == {"Bearer secret"}


def test_what_passes_the_cache_is_left_out(engine: Engine, tmp_path: Path) -> None:
    load = ["--batch", "1,4,6", "--prompt-tokens", "100,400", "--output-tokens", "10"]
    calibrate(["--base-url", engine.server.url, "--output", str(tmp_path / "a.json"), *load], {})
    assert sum(len(body["prompt"]) == 400 for body in engine.server.bodies) == 2 * (1 + 4)


def test_the_table(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *argv(engine, tmp_path / "a.json")]) == 0
    shown = capsys.readouterr().out
    assert "seconds of a step = 0.004 + 2e-05 · tokens computed + 3e-08 · tokens of context read" in shown
    head = re.split(r"  +", shown.splitlines()[0].strip())
    assert head[:4] == ["batch", "prompt", "answer", "steps"]
    assert head[-2:] == ["ms a step", "fitted"]


def test_what_can_not_be_measured(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = argv(engine, tmp_path / "a.json")
    with pytest.raises(StartupError, match="write more --batch"):
        calibrate([*asked[:4], "--batch", "1", "--prompt-tokens", "9"], {})
    with pytest.raises(StartupError, match="Nothing of this fits the server: its context is 512 tokens"):
        calibrate([*asked[:4], "--prompt-tokens", "9000"], {})
    engine.running = 1
    engine.tell()
    with pytest.raises(StartupError, match="needs it for itself"):
        calibrate(asked, {})
    engine.server.metrics = "# TYPE other gauge\nother 1\n"
    with pytest.raises(StartupError, match="it is no Plimsoll"):
        calibrate(asked, {})
    assert main(["calibrate", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "no answer from http://127.0.0.1:9/metrics" in capsys.readouterr().err


def test_a_request_that_fails(engine: Engine, tmp_path: Path) -> None:
    async def full(body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"code": "queue_full"}}, 429)

    engine.server.answer = full
    with pytest.raises(StartupError, match=r"HTTP 429 queue_full\): 1 at once of 5 tokens"):
        calibrate(argv(engine, tmp_path / "a.json"), {})


def test_a_file_that_can_not_be_written(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="can't be written"):
        calibrate(argv(engine, Path("/nowhere/a.json")), {})
    assert "seconds of a step" in capsys.readouterr().out  # what was measured is not thrown away


def test_help_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_options(["--help"], {})
    shown = capsys.readouterr().out
    assert all(option.flag in shown for option in OPTIONS)
