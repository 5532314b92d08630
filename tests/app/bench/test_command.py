from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from app.bench.client import Sample
from app.bench.command import bench
from app.bench.machine import ProcessorMeter, read_bandwidth, weights_bytes
from app.bench.options import OPTIONS, load_options
from app.bench.progress import Progress
from app.bench.prompts import make_prompt
from app.options import UsageError
from tests.app.bench.server import Server

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture
def run(server: Server, tmp_path: Path) -> Run:
    """Runs the command, which must go well, and returns its JSON report."""

    def run_bench(*argv: str) -> dict[str, Any]:
        path = tmp_path / "report.json"
        common = ["--base-url", server.url, "--output-tokens", "4", "--format", "json", "--output", str(path)]
        assert bench([*common, *argv], {}) == 0
        report: dict[str, Any] = json.loads(path.read_text())
        return report

    return run_bench


def test_a_closed_loop_keeps_so_many_clients_busy(server: Server, run: Run) -> None:
    report = run("--concurrency", "1,3", "--requests", "9", "--warmup", "1")
    one, three = report["measurements"]
    assert (one["completed"], three["completed"]) == (9, 9)
    assert (one["output_tokens"], one["prompt_tokens"]) == (36, 63)
    assert len(server.bodies) == 2 * (9 + 1)
    assert server.most_at_once == 3
    assert three["output_tokens_per_second"] > 1.5 * one["output_tokens_per_second"]
    assert one["e2e_seconds"]["p50"] >= 0.04
    assert one["generator_cpu"] > 0


def test_an_open_loop_does_not_wait_for_answers(server: Server, run: Run) -> None:
    report = run("--rate", "100", "--requests", "20", "--warmup", "0", "--seed", "3")
    (measured,) = report["measurements"]
    assert (measured["mode"], measured["completed"]) == ("rate", 20)
    assert server.most_at_once > 1
    gaps = [later - sooner for sooner, later in zip(server.arrivals, server.arrivals[1:], strict=False)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.01, rel=0.9)
    assert max(gaps) > 2 * min(gaps)


def test_what_is_asked(server: Server, run: Run) -> None:
    run("--concurrency", "1", "--requests", "2", "--warmup", "0", "--prompt-tokens", "20")
    first, second = server.bodies
    assert first["model"] == "small"
    assert first["prompt"] != second["prompt"]
    assert len(first["prompt"].split()) == 20
    assert (first["max_tokens"], first["temperature"], first["ignore_eos"]) == (4, 0, True)
    assert first["stream_options"] == {"include_usage": True}


def test_chat_and_servers_that_refuse_ignore_eos(server: Server, run: Run) -> None:
    argv = [
        "--endpoint",
        "chat",
        "--ignore-eos",
        "no",
        "--stream-usage",
        "no",
        "--concurrency",
        "1",
        "--requests",
        "1",
        "--warmup",
        "0",
    ]
    run(*argv, "--model", "mine")
    (body,) = server.bodies
    assert server.paths == ["/v1/chat/completions"]
    assert body["messages"][0]["role"] == "user"
    assert body["model"] == "mine"
    assert "ignore_eos" not in body
    assert "stream_options" not in body


def test_the_same_seed_is_the_same_load() -> None:
    assert make_prompt(1, 2, 50) == make_prompt(1, 2, 50)
    assert len({make_prompt(seed, index, 50) for seed in range(3) for index in range(3)}) == 9


def test_errors_are_counted_and_a_run_without_success_fails(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    async def full(body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"code": "queue_full"}}, 429)

    server.answer = full
    argv = ["--base-url", server.url, "--concurrency", "2", "--requests", "5", "--warmup", "0"]
    assert bench(argv, {}) == 1
    assert "errors at 2 clients: 5 × HTTP 429 queue_full" in capsys.readouterr().out
    assert len(server.bodies) == 5  # nothing is retried


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["--base-url", "http://127.0.0.1:9"], {}) == 1
    assert "Is the server up?" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_printed(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--base-url", server.url, "--concurrency", "1", "--requests", "1", "--warmup", "0"]
    with pytest.raises(UsageError, match="can't be written"):
        bench([*argv, "--output", "/no/such/folder/report"], {})
    assert "tokens/s" in capsys.readouterr().out


def test_the_roofline_uses_the_servers_weights(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.bench.command.read_bandwidth", lambda: 5e7)
    report = run("--roofline", "--concurrency", "1", "--requests", "2", "--warmup", "0")
    assert report["roofline"] == {"read_bandwidth_bytes_per_second": 5e7, "weights_bytes": 1_000_000}
    (measured,) = report["measurements"]
    assert measured["output_tokens_per_second_in_r"] == pytest.approx(
        measured["output_tokens_per_second"] / 50
    )
    server.metrics = ""
    assert weights_bytes(server.url) is None
    assert bench(["--base-url", server.url, "--roofline"], {}) == 1


def test_bandwidth_is_that_of_memory() -> None:
    """Wide bounds: slower than any server's memory, faster than any of ours."""
    assert 5e8 < read_bandwidth(1) < 2e12


def test_the_processors_of_a_local_server_are_found(server: Server) -> None:
    meter = ProcessorMeter(server.url)
    end = time.process_time() + 0.3  # processor times are told in steps of 10 ms
    while time.process_time() < end:
        pass
    shares = meter.read()
    assert shares.generator > 0
    assert shares.api == pytest.approx(shares.generator, abs=0.2)  # here both are this process
    assert shares.engine is not None
    assert ProcessorMeter("http://192.0.2.1:8000").read().api is None


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--concurrency", "1", "--rate", "2"], "write one of them"),
        (["--weights-bytes", "1GB"], "only read by --roofline"),
        (["--base-url", "localhost:8000"], "write for example http://127.0.0.1:8000"),
        (["--base-url", "http://localhost:99999"], "write for example http://127.0.0.1:8000"),
        (["--timeout", "0"], "out of range"),
        (["--concurrency", "1,x"], "'x' is not a whole number"),
        (["--rate", "0"], "out of range"),
        (["--request-rate", "1"], "here it is called --rate"),
        (["--roofline", "yes"], "unexpected 'yes'"),
    ],
)
def test_what_is_wrong_is_refused_with_what_to_write(argv: list[str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_options(argv, {})
    assert says in str(caught.value)


def test_the_key_comes_from_the_environment_and_is_never_shown() -> None:
    options = load_options([], {"OPENAI_API_KEY": "sesame"})
    assert options.api_key == "sesame"
    assert "sesame" not in repr(options)
    with pytest.raises(UsageError, match="2 times; write it once"):
        load_options(["--api-key", "sesame", "--api-key", "open"], {})
    assert load_options(["--api-key", "mine"], {"OPENAI_API_KEY": "sesame"}).api_key == "mine"


def test_the_v1_of_a_base_url_may_be_there_or_not() -> None:
    assert load_options(["--base-url", "http://h:1/v1/"], {}).base_url == "http://h:1"


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load_options(["--help"], {})
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(option.flag in shown for option in OPTIONS)


def test_progress_is_told_in_lines_where_there_is_no_terminal(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.progress._LINE_SECONDS", 0.03)
    run("--concurrency", "1", "--requests", "10", "--warmup", "4")
    lines = capsys.readouterr().err.splitlines()
    shape = re.compile(r"concurrency 1: (warm-up, )?(\d+) of (10|4) requests, \d+ s")
    told = [shape.fullmatch(line) for line in lines]
    assert lines
    assert all(told), lines
    ended = [int(each[2]) for each in told if each and not each[1]]
    assert ended
    assert ended == sorted(ended)
    assert any(each and each[1] for each in told)


def test_failures_are_told_with_the_progress() -> None:
    with Progress("rate 2", 10, 1) as progress:
        progress.warmed_up(Sample())
        progress.ended(Sample())
        progress.ended(Sample(error="timeout"))
        assert progress.line(7.4) == "rate 2: 2 of 10 requests, 1 failed, 7 s"
