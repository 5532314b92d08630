from __future__ import annotations

import json

import pytest

from app.bench.client import Sample
from app.bench.machine import Shares
from app.bench.report import Roofline, as_json, as_table, measure

ABOUT = {"model": "small", "base_url": "http://x", "endpoint": "chat"}
SHARES = Shares(generator=0.05, api=0.25, engine=1.5)


def sample(started: float, ended: float, tokens: int, error: str | None = None) -> Sample:
    return Sample(started, ended, 0.1, [0.02] * (tokens - 1), 7, tokens, error, usage_told=True)


def test_speed_counts_completed_tokens_over_the_whole_time() -> None:
    samples = [sample(0, 2, 10), sample(1, 4, 10), sample(0, 5, 3, "timeout"), sample(0, 1, 2, "timeout")]
    roofline = Roofline(read_bandwidth_bytes_per_second=20e9, weights_bytes=2 * 10**9)
    measured = measure("concurrency", 2, samples, SHARES, roofline)
    assert measured.elapsed_seconds == 5
    assert measured.output_tokens_per_second == 20 / 5
    assert measured.output_tokens_per_second_in_r == pytest.approx(4 / 10)
    assert (measured.requests, measured.completed, measured.errors) == (4, 2, {"timeout": 2})
    assert measured.e2e_seconds is not None
    assert (measured.e2e_seconds.p50, measured.e2e_seconds.p99) == (2, 3)


def test_the_table_shows_figures_and_errors() -> None:
    samples = [sample(0, 2, 10), sample(0, 1, 1, "HTTP 429 queue_full")]
    roofline = Roofline(read_bandwidth_bytes_per_second=20e9, weights_bytes=2 * 10**9)
    table = as_table(ABOUT, [measure("concurrency", 8, samples, SHARES, roofline)], roofline)
    lines = table.splitlines()
    assert lines[0] == "small at http://x, chat: 7 prompt and 10 output tokens a request"
    assert lines[1].split()[:3] == ["load", "done", "tokens/s"]
    assert lines[2].split()[:5] == ["8", "clients", "1/2", "5.0", "0.50"]
    assert "100 / 100 / 100" in lines[2]
    assert "R = 20.0 GB/s / 1.86 GiB of weights = 10.0 tokens/s" in table
    assert "errors at 8 clients: 1 × HTTP 429 queue_full" in table


def test_a_level_where_nothing_was_completed_is_shown_too() -> None:
    failed = measure("rate", 0.5, [sample(0, 1, 1, "timeout")], Shares(0.1, None, None), None)
    table = as_table(ABOUT, [failed], None)
    assert "0.5/s" in table
    assert "0/1" in table
    assert "errors at 0.5/s: 1 × timeout" in table


def test_tokens_that_the_server_did_not_tell_are_owned_up_to() -> None:
    silent = Sample(0, 2, 0.1, [0.02], output_tokens=2)
    measured = measure("concurrency", 1, [sample(0, 2, 10), silent], SHARES, None)
    assert (measured.output_tokens, measured.without_usage) == (12, 1)
    assert "at 1 client the server told no usage of 1 requests" in as_table(ABOUT, [measured], None)


def test_json_has_the_same_figures_with_units_in_the_names() -> None:
    report = json.loads(as_json(ABOUT, [measure("concurrency", 1, [sample(0, 2, 10)], SHARES, None)], None))
    assert report["model"] == "small"
    assert report["roofline"] is None
    (measured,) = report["measurements"]
    assert measured["output_tokens_per_second"] == 5
    assert measured["inter_token_seconds"]["p90"] == 0.02
    assert measured["generator_cpu"] == 0.05
