from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import msgspec
import pytest

from app import logs
from app.loading import LoadingReport, layer_groups, plan_rows
from app.settings import Settings
from model_runner.core.block_layout import BlockGroup, BlockLayout
from model_runner.messages import Loading
from tests.app.fake_engine import model_info


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_the_table_says_what_fits() -> None:
    rows = dict(plan_rows(Settings(), model_info(max_model_len=2048)))
    assert rows == {
        "model": "SmolLM2-135M-Instruct (LlamaForCausalLM)",
        "weights": "2 B, float32 on cpu, 1 thread",
        "KV per token": "46,080 bytes (45 KiB)",
        "KV budget": "45 MiB",
        "blocks": "64 of 16 tokens, 720 KiB each",
        "fit at once": "0 requests of the full context (2,048 tokens), 1 request of 1,024 tokens",
    }


def test_the_figures_are_the_price_lists() -> None:
    model = model_info(max_model_len=256)
    shown = dict(plan_rows(Settings(max_num_seqs=2), model))["fit at once"]
    fitting = model.num_blocks // model.layout.request_blocks(200, 56)
    assert shown == f"{fitting} requests (--max-num-seqs lets 2 run) of the full context (256 tokens)"


def test_a_context_of_one_token_has_a_table_too() -> None:
    assert (
        "full context (1 tokens)" in dict(plan_rows(Settings(), model_info(max_model_len=1)))["fit at once"]
    )


def test_groups_of_layers_are_named_when_there_are_several() -> None:
    groups = (
        BlockGroup("full", (0, 3), 1, 8),
        BlockGroup("sliding", (1, 4), 1, 8, window=512),
        BlockGroup("sliding", (2, 5), 1, 8, window=512),
    )
    layout = BlockLayout(groups, block_size=16, element_bytes=2)
    assert layer_groups(layout) == "1 full and 2 sliding (window 512), of 2 layers each"
    model = msgspec.structs.replace(model_info(), layout=layout, headroom_blocks=8)
    rows = dict(plan_rows(Settings(), model))
    assert rows["layer groups"] == layer_groups(layout)
    assert "8 KiB aside" in rows["KV budget"]


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    stream = Terminal()
    with LoadingReport(Settings(), stream) as report:
        report.loading(Loading(epoch=1, stage="reading weights", fraction=0.5))
        report.plan(Settings(), model_info())
    shown = stream.getvalue()
    assert "reading weights" in shown
    assert "50 %" in shown
    assert "KV per token  46,080 bytes" in shown
    assert shown.endswith("\r")


def test_elsewhere_each_stage_is_a_line() -> None:
    stream = io.StringIO()
    logs.configure("info", "text", stream)
    with LoadingReport(Settings(), stream) as report:
        for fraction in (0.0, 0.5, 1.0):
            report.stage("reading weights", fraction)
        report.stage("warming up", 0.0)
    assert [line.partition("INFO ")[2] for line in stream.getvalue().splitlines()] == [
        'loading stage="reading weights"',
        'loading stage="warming up"',
    ]


def test_in_json_everything_is_a_line_of_json() -> None:
    stream = Terminal()
    logs.configure("info", "json", stream)
    settings = Settings(log_format="json")
    with LoadingReport(settings, stream) as report:
        report.stage("reading weights", 0.0)
        report.plan(settings, model_info())
    loading, planned = (json.loads(line) for line in stream.getvalue().splitlines())
    assert loading["stage"] == "reading weights"
    assert planned["table"]["KV budget"] == "45 MiB"
