"""A real Prometheus scrapes a real server; promtool reads the metrics as its linter would."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server, eventually, free_port

SHIPPED = Path(__file__).parents[2] / "deploy" / "prometheus" / "prometheus.yml"

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed (Debian: apt-get install prometheus)",
)


@needs_prometheus
def test_promtool_finds_nothing_to_complain_of(server: Server) -> None:
    server.post("/v1/completions", {"prompt": "hello", "max_tokens": 4})
    text = server.get("/metrics").text
    # The gateways' names have a colon, which the linter keeps for recording rules; they are not ours.
    ours = "\n".join(line for line in text.splitlines() if "vllm:" not in line) + "\n"
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=ours, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_prometheus
def test_prometheus_sees_the_cache_fill_and_empty(server: Server, tmp_path: Path) -> None:
    port = free_port()
    config = tmp_path / "prometheus.yml"
    shipped = SHIPPED.read_text()
    assert "127.0.0.1:8000" in shipped
    config.write_text(
        shipped.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}").replace("interval: 5s", "interval: 1s")
    )
    command = ["prometheus", f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--storage.tsdb.path={tmp_path / 'data'}"], stdout=log, stderr=subprocess.STDOUT
        )
    try:

        def query(expression: str) -> list[float]:
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": expression})
            except httpx.TransportError:
                return []
            found = answer.json().get("data", {}).get("result", []) if answer.status_code == 200 else []
            return [float(row["value"][1]) for row in found]

        eventually(lambda: query("up") == [1.0], "Prometheus scrapes the server", 60)
        body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
            assert response.status_code == 200
            eventually(lambda: any(query("plimsoll_kv_cache_used_bytes > 0")), "the cache fills", 20)
            assert query("plimsoll_kv_cache_reserved_bytes <= plimsoll_kv_cache_budget_bytes")
            assert query("vllm:num_requests_running") == [1.0]
            assert query("vllm:kv_cache_usage_perc > 0")
        eventually(lambda: query("plimsoll_kv_cache_reserved_bytes") == [0.0], "the cache empties", 20)
        started = time.monotonic()
        assert query("scrape_duration_seconds")
        assert query("plimsoll_time_to_first_token_seconds_count > 0")
        assert time.monotonic() - started < 60
    finally:
        process.terminate()
        process.wait(30)
