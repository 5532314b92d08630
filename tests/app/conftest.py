"""A real HTTP server in a thread, over a scripted engine and the real tokenizer of the default model."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import httpx
import openai
import pytest
import uvicorn

from app.connection import Connection
from app.main import create_app
from app.metrics import Metrics
from app.settings import Settings
from model_runner.async_engine import AsyncEngine
from model_runner.model_files import resolve
from model_runner.tokenizer import Tokenizer, load_tokenizer
from tests.app.fake_engine import FakeEngine

MODEL = "SmolLM2-135M-Instruct"


class Server:
    """The application on an ephemeral port."""

    def __init__(self, engine: FakeEngine, tokenizer: Tokenizer, **settings: Any) -> None:
        self.engine = engine
        asked = Settings(**settings)
        self.metrics = Metrics(asked)
        engine_part = cast(AsyncEngine, engine)
        self.metrics.attach(engine_part)
        self.app = create_app(engine=engine_part, tokenizer=tokenizer, settings=asked, metrics=self.metrics)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            self.app,
            http=Connection,
            log_level="error",
            ws="none",
            timeout_graceful_shutdown=2,
            limit_concurrency=asked.max_connections,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    def __enter__(self) -> Server:
        self._thread.start()
        self.until(lambda: self._server.started)
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=20)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.openai.close()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=body)

    def chat(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=body)

    def rejections(self, reason: str) -> float:
        labels = {"decision": "rejected", "reason": reason}
        return self.metrics.registry.get_sample_value("plimsoll_admissions_total", labels) or 0.0

    @staticmethod
    def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, "it did not come true in time"
            time.sleep(0.005)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(resolve("", str(tmp_path_factory.mktemp("cache"))))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def server(engine: FakeEngine, tokenizer: Tokenizer) -> Iterator[Server]:
    with Server(engine, tokenizer) as running:
        yield running
