"""One server for the tests that only read; tests that hurt a server start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, eventually, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The real default model in float32, 64 MiB of KV cache; at the end nothing is reserved, nothing held."""
    budget = ("--kv-cache-memory", "64MiB", "--max-model-len", "auto")
    with serving("--dtype", "float32", *budget, "--max-queue-seconds", "3600s") as running:
        yield running
        eventually(running.idle, "the ledger and the block pool are empty at the end")
