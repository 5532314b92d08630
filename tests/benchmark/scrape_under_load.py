"""How long /metrics takes while the engine is busy. `python tests/benchmark/scrape_under_load.py URL`

Sixty-four clients are kept busy by `plimsoll bench`; the page is read five times a second beside them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import httpx


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    command = [sys.executable, "-m", "app", "bench", "--base-url", url, "--concurrency", "64"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as load:
        milliseconds = []
        with httpx.Client(timeout=30) as client:
            while load.poll() is None:
                began = time.perf_counter()
                page = client.get(url + "/metrics")
                milliseconds.append((time.perf_counter() - began) * 1e3)
                page.raise_for_status()
                time.sleep(0.2)
    assert load.returncode == 0, "the load failed"
    ranked = sorted(milliseconds)
    print(
        f"{len(ranked)} scrapes of {len(page.content):,} bytes: median {statistics.median(ranked):.1f} ms, "
        f"p99 {ranked[int(0.99 * (len(ranked) - 1))]:.1f} ms, longest {ranked[-1]:.1f} ms"
    )


if __name__ == "__main__":
    main()
