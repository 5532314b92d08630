"""A real server in a real process, for tests that look at it only from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 180.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def eventually(holds: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Wait until `holds()`, or fail saying what did not come true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}")


class Server:
    """`plimsoll serve` with the given options. Its output is kept in `log`.

    Admission is strict unless a test says otherwise: then what is reserved follows from the request alone.
    """

    def __init__(self, *options: str, env: dict[str, str] | None = None) -> None:
        if "--admission" not in options and "PLIMSOLL_ADMISSION" not in (env or {}):
            options = (*options, "--admission", "strict")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "app", "serve", "--port", str(self.port), *options]
        self._log_file = tempfile.NamedTemporaryFile(prefix="plimsoll-e2e-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        return Path(self._log_file.name).read_text(errors="replace")

    def get(self, path: str, **kwargs: object) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **kwargs)  # type: ignore[arg-type]

    def post(self, path: str, body: object, timeout: float = 300, **kwargs: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout, **kwargs)  # type: ignore[arg-type]

    def ready(self) -> bool:
        try:
            return self.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        def ready_or_dead() -> bool:
            assert self.process.poll() is None, f"the server exited: {self.log}"
            return self.ready()

        eventually(ready_or_dead, "the server is ready", seconds)

    def metrics(self) -> dict[str, float]:
        """Every sample without labels, and labelled ones as `name{a="b"}`."""
        return parse_metrics(self.get("/metrics").text)

    def engine(self) -> psutil.Process:
        """The engine process: the only child that runs model_runner.build."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        engines = [c for c in children if "model_runner.build" in " ".join(c.cmdline())]
        assert len(engines) == 1, f"engine processes: {engines}"
        return engines[0]

    def idle(self) -> bool:
        """Nothing reserved, nothing held, nobody running or waiting."""
        now = self.metrics()
        return all(
            now[name] == 0
            for name in (
                "plimsoll_kv_cache_reserved_bytes",
                "plimsoll_kv_cache_used_bytes",
                "plimsoll_requests_running",
                "plimsoll_requests_waiting",
            )
        )

    def terminate(self, seconds: float = 60) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self._log_file.close()


def parse_metrics(text: str) -> dict[str, float]:
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


@contextlib.contextmanager
def serving(*options: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    server = Server(*options, env=env)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


class Watch:
    """Reads /metrics again and again in a thread, and keeps what `check` complains of."""

    def __init__(self, server: Server, check: Callable[[dict[str, float]], str | None]) -> None:
        self.complaints: list[str] = []
        self.scrapes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(server, check))

    def _run(self, server: Server, check: Callable[[dict[str, float]], str | None]) -> None:
        with httpx.Client(timeout=30) as client:
            while not self._stop.wait(0.1):
                complaint = check(parse_metrics(client.get(server.url + "/metrics").text))
                self.scrapes += 1
                if complaint:
                    self.complaints.append(complaint)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
