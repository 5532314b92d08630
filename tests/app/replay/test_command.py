from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from app.options import UsageError
from app.replay import standard
from app.replay.command import replay
from app.replay.jobs import Job, run_all
from app.replay.options import OPTIONS, load_options
from app.replay.presets import PRESETS, step_model
from model_runner.replay.figures import Slo
from model_runner.replay.simulation import Row, Setting, Simulation

DOCS = Path(__file__).parents[3] / "docs" / "replay.md"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = random.Random(4)
    path = tmp_path_factory.mktemp("traces") / "small.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens,team"]
    for index in range(60):
        prompt, output = rng.randint(20, 1500), 1 + int(rng.expovariate(1 / 120))
        lines.append(f"{index * 0.2:.3f},{prompt},{min(output, 900)},{'red' if index % 3 else 'blue'}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert replay([*argv, "--format", "json", "--jobs", "1"]) == 0
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def test_one_row_for_each_policy(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = answer(capsys, trace, "--arrivals", "backlog", "--kv-budget-tokens", "8000")
    assert [row["policy"] for row in report["policies"]] == ["strict", "predictive", "greedy", "oracle"]
    strict, _, greedy, oracle = report["policies"]
    assert strict["output_tokens_per_second"] < oracle["output_tokens_per_second"]
    assert strict["output_tokens_per_second_to_oracle"] == pytest.approx(
        strict["output_tokens_per_second"] / oracle["output_tokens_per_second"]
    )
    assert oracle["output_tokens_per_second_to_oracle"] == oracle["goodput_to_oracle"] == 1
    assert greedy["preempted_requests_ratio"] > strict["preempted_requests_ratio"] == 0
    assert strict["wait_prediction_error"] is not None
    assert (report["rows"], strict["requests"], strict["arrivals"]) == (60, 60, "backlog")
    assert (strict["slo_ttft_seconds"], strict["offered_requests_per_second"]) == (60.0, None)


def test_every_key_is_documented_and_every_documented_key_exists(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = answer(capsys, trace, "--limit", "20", "--tenants", "team", "--policy", "strict,oracle")
    row = report["policies"][0]
    told = {*report, *row, *report["step_model"], *row["tenants"]["red"], *row["ttft_seconds"]}
    page = DOCS.read_text().split("## JSON", 1)[1].split("\n## ", 1)[0]
    documented: set[str] = set()
    for line in page.splitlines():
        if line.startswith("| `"):
            documented.update(re.findall(r"`(\w+)`", line.split("|")[1]))
    assert told == documented


def test_the_same_seed_gives_the_same_answer(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (trace, "--tenants", "3", "--seed", "7", "--policy", "predictive", "--kv-budget-tokens", "4000")
    assert answer(capsys, *argv) == answer(capsys, *argv)


def test_processes_give_the_same_answer_in_order(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (trace, "--limit", "30", "--policy", "oracle,strict")
    alone = answer(capsys, *argv)
    assert replay([*argv, "--format", "json", "--jobs", "2"]) == 0
    assert json.loads(capsys.readouterr().out) == alone


def test_what_a_process_raises_is_raised(trace: str) -> None:
    setting = Setting(
        step_model=PRESETS["standard"].model, kv_budget_tokens=64, max_tokens=1, overflow_risk=0.01
    )
    job = Job(
        name="none",
        policy="none",
        rows=(Row(0.0, 1, 1),),
        setting=setting,
        slo=Slo(ttft=1, itl=1),
        arrivals="trace",
        rate_scale=1.0,
    )
    with pytest.raises(AssertionError, match="none"):
        run_all([job, job], 2, "nothing")


def test_faster_arrivals_are_harder(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (trace, "--policy", "strict", "--kv-budget-tokens", "4000")
    slow, fast = (answer(capsys, *argv, "--rate-scale", rate)["policies"][0] for rate in ("0.2", "5"))
    assert fast["offered_requests_per_second"] == pytest.approx(25 * slow["offered_requests_per_second"])
    assert fast["queue_seconds"]["p99"] > slow["queue_seconds"]["p99"]


def test_a_deadline_in_the_queue_refuses(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (trace, "--policy", "strict,oracle", "--kv-budget-tokens", "4000", "--rate-scale", "5")
    free, bounded = (
        answer(capsys, *argv, "--max-queue-seconds", patience)["policies"] for patience in ("none", "500ms")
    )
    assert (free[0]["rejected_ratio"], free[0]["max_queue_seconds"]) == (0, None)
    assert bounded[0]["rejected_ratio"] > 0
    assert bounded[0]["max_queue_seconds"] == 0.5
    assert bounded[0]["queue_seconds"]["p99"] <= 0.6
    assert bounded[1]["rejected_ratio"] == 0


def test_the_cache_may_be_sized_in_bytes(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = (trace, "--limit", "5", "--policy", "strict")
    assert answer(capsys, *argv, "--kv-cache-memory", "1GiB")["policies"][0]["kv_budget_tokens"] == 8192
    each = (*argv, "--kv-cache-memory", "1GiB", "--kv-bytes-per-token", "64KiB")
    assert answer(capsys, *each)["policies"][0]["kv_budget_tokens"] == 16384
    numbers = (*argv, "--step-model", "0.01,1e-5,0")
    assert answer(capsys, *numbers)["step_model"]["base_seconds"] == 0.01
    with pytest.raises(UsageError, match="write --kv-bytes-per-token too"):
        load_options([*numbers, "--kv-cache-memory", "1GiB"])
    file = tmp_path / "mine.json"
    file.write_text('{"base_seconds": 1, "per_token_seconds": 0, "per_context_token_seconds": 0}')
    slow = answer(capsys, *argv, "--step-model", str(file))["policies"][0]
    assert slow["seconds"] / slow["steps"] == pytest.approx(1.0, abs=0.2)


def test_a_target_for_the_gaps_between_tokens(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (trace, "--policy", "strict", "--rate-scale", "3")
    free, aimed = (answer(capsys, *argv, "--target-itl-ms", each)["policies"][0] for each in ("0", "15"))
    assert (free["target_itl_seconds"], aimed["target_itl_seconds"]) == (None, 0.015)
    assert free["itl_seconds"]["p99"] > 0.03
    assert aimed["itl_seconds"]["p99"] < 0.02


def test_several_servers(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (trace, "--arrivals", "backlog", "--policy", "strict", "--kv-budget-tokens", "4000")
    one = answer(capsys, *argv)["policies"][0]
    two = answer(capsys, *argv, "--replicas", "2", "--routing", "cache-aware")["policies"][0]
    assert (two["replicas"], two["routing"]) == (2, "cache-aware")
    assert two["output_tokens_per_second"] > one["output_tokens_per_second"]


def test_the_table(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, "--limit", "20", "--tenants", "2", "--policy", "strict,oracle"]) == 0
    shown = capsys.readouterr().out
    assert "20 requests" in shown
    assert "arrivals, 5.26 requests/s; 24,000 tokens of cache, max_tokens 1,000" in shown
    assert re.search(r"\n +oracle +[\d,]+ +1\.000 +[\d.]+ +1\.000 ", shown)
    assert "strict, by tenant" in shown
    assert "tenant-2" in shown


@pytest.mark.parametrize(
    ("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!doctype html>")]
)
def test_the_picture(trace: str, tmp_path: Path, suffix: str, begins: bytes) -> None:
    path = tmp_path / f"cache.{suffix}"
    argv = [trace, "--limit", "30", "--arrivals", "backlog", "--policy", "strict,predictive", "--jobs", "1"]
    assert replay([*argv, "--plot", str(path)]) == 0
    drawn = path.read_bytes()
    assert drawn.startswith(begins)
    if suffix == "html":
        page = drawn.decode()
        assert "predictive" in page
        assert not re.search(r'(?:src|href)="(?!#)', page)  # nothing to fetch


def test_a_picture_that_can_not_be_written(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["replay", trace, "--limit", "5", "--policy", "strict", "--plot", "/nowhere/cache.png"]
    assert main(argv) == 2
    assert "--plot /nowhere/cache.png can't be written" in capsys.readouterr().err


def test_progress_is_told_in_lines_where_there_is_no_terminal(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.progress._LINE_SECONDS", 0.01)
    assert replay([trace, "--policy", "strict,oracle", "--jobs", "1"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("replay:")]
    assert lines
    told = [re.fullmatch(r"replay: (\d+) of 120 requests, \d+ s", line) for line in lines]
    assert all(told)
    through = [int(each[1]) for each in told if each]
    assert through == sorted(through)


def test_the_standard_replay(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = answer(capsys, "--standard", trace, "--limit", "25")
    rows = report["policies"]
    backlog = [row for row in rows if row["arrivals"] == "backlog"]
    assert {(row["kv_budget_tokens"], row["max_tokens"]) for row in backlog} == {
        (budget, most) for budget in standard.BUDGETS for most in standard.MAX_TOKENS
    }
    assert [row["policy"] for row in backlog[:4]] == ["oracle", "predictive", "strict", "greedy"]
    assert {row["slo_ttft_seconds"] for row in backlog} == {60.0}
    timed = [row for row in rows if row["arrivals"] == "trace"]
    assert len(timed) == 2 * 4 * 6
    assert {row["kv_budget_tokens"] for row in timed} == {24_000}
    assert {row["slo_ttft_seconds"] for row in timed} == {2.0}
    sustained = next(
        row["requests_per_second"]
        for row in backlog
        if (row["policy"], row["kv_budget_tokens"], row["max_tokens"]) == ("oracle", 24_000, None)
    )
    for row in timed:
        assert (row["max_queue_seconds"] == 1.5) == (row["policy"] in ("predictive", "strict"))
        if row["max_tokens"] is None:
            assert row["offered_requests_per_second"] == pytest.approx(row["load"] * sustained)
    assert {row["load"] for row in timed} == {0.5, 1.0, 2.0, 4.0}


def test_the_standard_replay_with_all_budgets(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = answer(capsys, trace, "--standard", "--full", "--limit", "3")["policies"]
    timed = [row for row in rows if row["arrivals"] == "trace"]
    assert {row["kv_budget_tokens"] for row in timed} == set(standard.BUDGETS)


def test_the_standard_trace(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[3].parent / "shared" / "traces" / "azure_llm_2023_conv.csv"
    if not path.exists():
        pytest.skip(f"there is no {path}")
    argv = (str(path), "--arrivals", "backlog", "--limit", "200", "--policy", "strict,oracle")
    strict, oracle = answer(capsys, *argv)["policies"]
    assert strict["completed_requests"] == oracle["completed_requests"] == 200
    assert strict["output_tokens"] == oracle["output_tokens"]
    assert 0.6 < strict["output_tokens_per_second_to_oracle"] < 0.8


def test_help_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load_options(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(option.flag in shown for option in OPTIONS)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "which trace?"),
        (["a.csv", "b.csv"], "--trace is given 2 times"),
        (["a.csv", "--polcy", "strict"], "unknown option --polcy; did you mean --policy?"),
        (["a.csv", "--policy", "strict,lucky"], "'lucky' is not one of strict, predictive, greedy, oracle"),
        (["a.csv", "--kv-budget-tokens", "5"], "5 tokens are less than a block of 16"),
        (["a.csv", "--standard", "--max-tokens", "5"], "--max-tokens 5: --standard sets that itself"),
        (["a.csv", "--full"], "write --standard too"),
        (["a.csv", "--arrivals", "backlog", "--rate-scale", "2"], "everything arrives at once"),
        (["a.csv", "--routing", "least-loaded"], "write --replicas N too"),
        (["a.csv", "--kv-cache-memory", "1GiB", "--kv-budget-tokens", "99"], "both size the cache"),
        (["a.csv", "--max-num-batched-tokens", "8"], "more than --max-num-batched-tokens 8"),
        (["a.csv", "--step-model", "llama"], "'llama' is no step model"),
        (["a.csv", "--step-model", "none.json"], "none.json can't be read"),
        (["a.csv", "--step-model", "1,2,x"], "are not three numbers"),
        (["a.csv", "--step-model", "0,0,1"], "a step that takes no time"),
        (["a.csv", "--step-model=-1,0,1"], "base_seconds is -1.0"),
        (["a.csv", "--plot", "a.gif"], "is not a picture"),
    ],
)
def test_what_is_asked_wrongly(argv: list[str], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        load_options(argv)
    assert says in str(raised.value)


def test_a_file_that_is_no_step_model(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text('{"base_seconds": 1}')
    with pytest.raises(ValueError, match="missing required field"):
        step_model(str(file))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_step_models(name: str) -> None:
    preset = step_model(name).preset
    preset.check()
    assert preset.kv_bytes_per_token
    course = Simulation(
        [Row(0.0, 100, 10)],
        Setting(step_model=preset.model, kv_budget_tokens=1024, max_tokens=50, overflow_risk=0.01),
        "strict",
    ).run()
    assert course.seconds == pytest.approx(
        10 * preset.base_seconds + 109 * preset.per_token_seconds + preset.per_context_token_seconds * 1045,
        rel=1e-6,
    )
