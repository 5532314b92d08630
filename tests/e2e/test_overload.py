"""Far more than it can do: every request has one ending, and the line is never passed."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.benchmark.open_loop import open_loop
from tests.benchmark.overload import OPTIONS, check_endings
from tests.e2e.server import Watch, eventually, serving
from tests.e2e.test_load import over_the_line


@pytest.mark.timeout(600)
def test_overload_ends_every_request_once_and_keeps_the_line() -> None:
    with serving(*OPTIONS) as server:
        with Watch(server, over_the_line) as watch:
            # Fifteen seconds of many times what any machine does with this cache.
            sent = asyncio.run(open_loop(server.url, [(15.0, 20.0)], random.Random(5)))
            eventually(server.idle, "every byte is back", 60)
        assert not watch.complaints
        metrics = server.metrics()
    check_endings(sent)
    completed = [one for one in sent if one.completed]
    refused = [one for one in sent if one.status == 429]
    assert completed
    assert refused
    assert all(one.retry_after is not None and one.retry_after > 0 for one in refused)
    decided = sum(value for key, value in metrics.items() if key.startswith("plimsoll_admissions_total{"))
    assert decided >= len(sent)
    ended = sum(value for key, value in metrics.items() if key.startswith("plimsoll_requests_ended_total{"))
    assert ended == len(sent) - len(refused)
