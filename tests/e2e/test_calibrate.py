"""The costs of a real engine's steps, from its metrics, as a step model that a replay takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.server import Server, eventually


def run(*argv: str) -> str:
    command = [sys.executable, "-m", "app", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_replay_with_the_costs_of_a_running_engine(server: Server, tmp_path: Path) -> None:
    eventually(server.idle, "nobody else is there")
    before = server.metrics()
    file = tmp_path / "here.json"
    load = ["--batch", "1,4", "--prompt-tokens", "16,64,256", "--output-tokens", "8"]
    report = json.loads(
        run("calibrate", "--base-url", server.url, "--output", str(file), "--format", "json", *load)
    )
    after = server.metrics()
    each = 1 + 4
    # The last of each answer is drawn, and not computed. Every prompt is sent for answers of 2 and of 8.
    tokens = 16 + 7 + 2 * each * (16 + 64 + 256) + 3 * each * (1 + 7)
    assert after["plimsoll_step_tokens_total"] - before["plimsoll_step_tokens_total"] == tokens
    # Decodes alone read all of the prompt, and what they have drawn, each time.
    drawn = sum(range(1, 8))
    context = 7 * 16 + drawn + each * (16 + 64 + 256) * (1 + 7) + 3 * each * (1 + drawn)
    assert after["plimsoll_context_tokens_total"] - before["plimsoll_context_tokens_total"] > context
    assert report["base_seconds"] >= 0
    assert report["base_seconds"] + report["per_token_seconds"] > 0
    assert report["kv_bytes_per_token"] == after["plimsoll_kv_cache_bytes_per_token"]
    assert report["measurements"] >= 6

    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "0,100,20\n" * 12)
    argv = ["--step-model", str(file), "--kv-cache-memory", "64MiB", "--policy", "strict,oracle"]
    replayed = json.loads(run("replay", str(trace), *argv, "--max-tokens", "64", "--format", "json"))
    assert replayed["step_model"]["about"].startswith("measured: SmolLM2-135M-Instruct in float32 on cpu")
    for row in replayed["policies"]:
        assert row["kv_budget_tokens"] == (64 << 20) // report["kv_bytes_per_token"]
        assert row["completed_requests"] == 12
        assert row["output_tokens"] == 240
