"""/v1/capacity and /v1/admission/check over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app.cli import main
from app.protocol.capacity import AdmissionCheck, Capacity
from model_runner.errors import Draining
from model_runner.tokenizer import Tokenizer
from tests.app.conftest import MODEL, Server
from tests.app.fake_engine import FakeEngine

BLOCK_BYTES = 2 * 30 * 3 * 64 * 16 * 4  # of the fake engine's model: 64 blocks, 512 tokens of context


def check(server: Server, **body: Any) -> dict[str, Any]:
    response = server.http.post("/v1/admission/check", json=body)
    assert response.status_code == 200, response.text
    AdmissionCheck.model_validate(response.json())
    answer: dict[str, Any] = response.json()
    return answer


def test_capacity_is_the_plan_of_the_running_server(server: Server) -> None:
    response = server.http.get("/v1/capacity")
    capacity = Capacity.model_validate(response.json())
    assert capacity.model == MODEL
    assert capacity.growing_bytes_per_token == 2 * 30 * 3 * 64 * 4
    assert capacity.kv_budget_bytes == 64 * BLOCK_BYTES == capacity.free_bytes
    assert capacity.max_sequences == {"512": 2}
    assert capacity.max_num_seqs == 256
    assert capacity.allocated.blocks == 64
    assert [(group.kind, group.layers) for group in capacity.groups] == [("full", 30)]
    assert [at.longest_context for at in capacity.batches] == [512, 129, 33, 9]


SERVERS_OWN = {
    *("object", "max_model_len", "max_num_seqs", "running_requests", "waiting_requests"),
    *("reserved_bytes", "used_bytes", "free_bytes"),
}


def test_a_server_and_a_plan_say_the_same_things_by_the_same_names(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capacity = server.http.get("/v1/capacity").json()
    words = ["--format", "json", "--device-memory", "2GiB", "--cache-dir", str(tmp_path)]
    assert main(["plan", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert set(capacity) - set(plan) == SERVERS_OWN
    assert set(plan) - set(capacity) == set()
    assert set(plan["allocated"]) == set(capacity["allocated"])
    for of in ("groups", "contexts", "batches"):
        assert set(plan[of][0]) == set(capacity[of][0])
    for of in ("model_type", "architecture", "weights_parameters", "weights_quantisation"):
        assert plan[of] == capacity[of]
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    assert [key for key in SERVERS_OWN if f"`{key}`" not in page] == []


def test_what_is_kept_aside_for_prefills_is_no_budget(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.model = replace(engine.model, headroom_blocks=4)
    with Server(engine, tokenizer) as server:
        capacity = Capacity.model_validate(server.http.get("/v1/capacity").json())
    assert capacity.headroom_blocks == 4
    assert capacity.kv_cache_bytes == 68 * BLOCK_BYTES
    assert capacity.kv_budget_bytes == 64 * BLOCK_BYTES
    assert capacity.allocated.blocks == 64


def test_a_completion_is_priced_and_not_run(server: Server) -> None:
    answer = check(server, prompt=[5] * 20, max_tokens=29, n=2)
    assert answer["decision"] == "admitted"
    assert answer["status"] == 200
    assert answer["prompt_tokens"] == [20]
    assert (answer["max_tokens"], answer["n"]) == (29, 2)
    blocks = 1 + 2 * 2  # one full block of the prompt, shared; two of each choice's own
    assert answer["projected_bytes"] == blocks * BLOCK_BYTES
    assert answer["groups"] == [
        {"kind": "full", "reach": None, "layers": 30, "blocks": blocks, "bytes": blocks * BLOCK_BYTES}
    ]
    assert answer["predicted_wait_seconds"] == 0.0
    assert answer["largest_max_tokens"] == answer["largest_max_tokens_now"] == 492  # the context ends there
    assert server.engine.submissions == []


def test_a_chat_is_recognised_by_its_messages(server: Server) -> None:
    answer = check(server, messages=[{"role": "user", "content": "Hello"}], max_tokens=8)
    assert answer["prompt_tokens"][0] > 10  # the template's words too
    assert answer["decision"] == "admitted"


def test_what_asks_for_nothing_decides_nothing(server: Server) -> None:
    assert check(server, prompt="Hello", messages=[], max_tokens=1)["decision"] == "admitted"
    assert check(server, prompt="Hello", messages=None, max_tokens=1)["decision"] == "admitted"


def test_what_can_never_fit_is_told_as_the_request_would_be(server: Server) -> None:
    body = {"prompt": [[5] * 400, [6] * 400, [7] * 400], "max_tokens": 100}
    answer = check(server, **body)
    assert answer["decision"] == "rejected"
    assert answer["status"] == 400
    assert answer["error"]["code"] == "kv_cache_budget_exceeded"
    assert answer["error"]["required_bytes"] == answer["projected_bytes"] == 96 * BLOCK_BYTES
    assert answer["predicted_wait_seconds"] is None
    assert answer["largest_max_tokens"] == 0  # 25 blocks of each prompt are more than 64


@pytest.mark.parametrize(
    ("body", "prompt_tokens", "max_tokens", "largest"),
    [
        ({"prompt": [5] * 20, "max_tokens": 493}, [20], 493, 492),  # one too many for 512
        ({"prompt": [[5] * 20, [5] * 30], "max_tokens": 600}, [20, 30], 600, 482),
        ({"prompt": [5] * 600}, [600], 16, 0),
        (
            {"prompt": "word " * 2000, "max_tokens": 1},
            None,
            1,
            0,
        ),  # its letters alone say that it is too long
        ({"messages": [{"role": "user", "content": "word " * 2000}], "max_tokens": 8}, None, 8, 0),
    ],
)
def test_what_passes_the_context_is_priced_and_told_as_the_request_would_be(
    server: Server, body: dict[str, Any], prompt_tokens: list[int] | None, max_tokens: int, largest: int
) -> None:
    answer = check(server, **body)
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    refused = server.http.post(route, json=body)
    assert (answer["decision"], answer["status"]) == ("rejected", refused.status_code)
    assert answer["error"]["message"] == refused.json()["error"]["message"]
    assert answer["error"]["code"] == "context_length_exceeded"
    assert (answer["predicted_wait_seconds"], answer["retry_after_seconds"]) == (None, None)
    assert prompt_tokens is None or answer["prompt_tokens"] == prompt_tokens
    assert (answer["max_tokens"], answer["largest_max_tokens"]) == (max_tokens, largest)
    blocks = sum(-(-(tokens + max_tokens - 1) // 16) for tokens in answer["prompt_tokens"])
    assert answer["projected_bytes"] == blocks * BLOCK_BYTES == sum(g["bytes"] for g in answer["groups"])


def test_a_refusal_of_the_moment_carries_when_to_come_back(server: Server) -> None:
    server.engine.refusal = Draining("The server is shutting down.", retry_after_seconds=3.0)
    answer = check(server, prompt="Hello")
    assert (answer["decision"], answer["status"]) == ("rejected", 503)
    assert answer["error"]["code"] == "draining"
    assert answer["retry_after_seconds"] == 3.0


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', 400, "messages"),
        (b"{}", 400, "prompt"),
        (b"[1]", 400, None),
        (b"not json", 400, None),
        (b"[" * 100_000, 400, None),
        (b'{"messages": []}', 400, "messages"),
        (b'{"prompt": "a", "n": 0}', 400, "n"),
        (b'{"prompt": [5], "max_tokens": 5000000000}', 400, "prompt"),
        (b'{"prompt": [5], "max_tokens": 5000, "temperature": 9}', 400, "temperature"),
        (b'{"prompt": "a", "model": "another"}', 404, "model"),
    ],
)
def test_malformed_bodies_are_refused_as_everywhere(
    server: Server, body: bytes, status: int, param: str | None
) -> None:
    response = server.http.post("/v1/admission/check", content=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


def test_what_is_too_long_to_be_priced_is_told_the_models_context(server: Server) -> None:
    response = server.http.post("/v1/admission/check", json={"prompt": [5], "max_tokens": 2**31})
    assert response.status_code == 400
    assert "maximum context length is 512 tokens" in response.json()["error"]["message"]


def test_a_check_counts_as_no_admission(server: Server) -> None:
    before = server.http.get("/metrics").text
    check(server, prompt="Hello")
    server.http.post("/v1/admission/check", content=b"{}")
    after = server.http.get("/metrics").text
    counted = [line for line in before.splitlines() if line.startswith("plimsoll_admissions_total")]
    assert counted
    assert [line for line in after.splitlines() if line.startswith("plimsoll_admissions_total")] == counted


def test_both_are_guarded_by_the_key(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    with Server(engine, tokenizer, api_keys=("secret",)) as server:
        assert server.http.get("/v1/capacity").status_code == 401
        assert server.http.post("/v1/admission/check", json={"prompt": "a"}).status_code == 401
        allowed = {"authorization": "Bearer secret"}
        assert server.http.get("/v1/capacity", headers=allowed).status_code == 200
