"""GET /v1/admission, and what the headers of an answer say of its admission."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from app.protocol.admission import Admission, WaitingRequest
from model_runner.async_engine import EngineState
from model_runner.core.door_view import DoorLevels, QueueRow
from model_runner.core.obstacles import Obstacle
from model_runner.tokenizer import Tokenizer
from tests.app.conftest import Server
from tests.app.fake_engine import NOBODY, FakeEngine


def row(place: int, tenant: str = "default", waits_for: Obstacle = Obstacle.ROOM) -> QueueRow:
    return QueueRow(
        place=place,
        request_id=f"r-{place}",
        tenant=tenant,
        priority=0,
        waited_seconds=1.23456,
        projected_bytes=4096 * place,
        waits_for=waits_for,
        expected_in_seconds=2.0 * place,
        deadline_in_seconds=58.76544,
    )


def looked_at(server: Server, **headers: str) -> Admission:
    response = server.http.get("/v1/admission", headers=headers)
    assert response.status_code == 200, response.text
    return Admission.model_validate(response.json())


def test_the_queue_as_it_stands(server: Server, engine: FakeEngine) -> None:
    engine.rows = [row(1), row(2, waits_for=Obstacle.OTHERS)]
    engine.door = DoorLevels(
        policy="predictive",
        predicted_peak_bytes=1234.6,
        overflow_risk=0.004,
        margin_deviations=1.75,
        queue_lengths={"default": 2},
        byte_seconds={},
    )
    engine.state = EngineState.RESTARTING
    answer = looked_at(server)
    assert (answer.policy, answer.state) == ("predictive", "restarting")
    assert answer.kv_budget_bytes == answer.free_bytes == engine.model.kv_budget_bytes
    assert (answer.predicted_peak_bytes, answer.overflow_risk) == (1235, 0.004)
    assert answer.margin_deviations == 1.75
    assert (answer.running_requests, answer.waiting_requests) == (0, 2)
    assert (answer.more, answer.others) == (0, 0)
    assert answer.waiting == [
        WaitingRequest(
            place=place,
            request_id=f"r-{place}",
            tenant="default",
            priority=0,
            waited_seconds=1.235,
            projected_bytes=4096 * place,
            waits_for=cast(Any, why),
            expected_in_seconds=2.0 * place,
            deadline_in_seconds=58.765,
        )
        for place, why in ((1, "no_room_in_cache"), (2, "behind_others"))
    ]


def test_every_reason_is_in_the_schema() -> None:
    allowed = WaitingRequest.model_json_schema()["properties"]["waits_for"]["enum"]
    assert set(allowed) == {each.value for each in Obstacle}


def test_a_hundred_are_shown_and_the_rest_counted(server: Server, engine: FakeEngine) -> None:
    engine.rows = [row(place) for place in range(1, 131)]
    engine.door = replace(NOBODY, queue_lengths={"default": 130})
    answer = looked_at(server)
    assert [each.place for each in answer.waiting] == list(range(1, 101))
    assert (answer.waiting_requests, answer.more, answer.others) == (130, 30, 0)
    assert (answer.overflow_risk, answer.margin_deviations) == (None, None)


def test_a_tenant_sees_its_own_and_how_many_others(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.rows = [row(1, "key-1"), row(2, "key-2"), row(3, "key-1")]
    engine.door = replace(NOBODY, queue_lengths={"key-1": 2, "key-2": 1})
    with Server(engine, tokenizer, api_keys=("one", "two", "three")) as server:
        assert server.http.get("/v1/admission").status_code == 401
        for key, places, others in (("one", [1, 3], 1), ("two", [2], 2), ("three", [], 3)):
            answer = looked_at(server, authorization=f"Bearer {key}")
            assert [each.place for each in answer.waiting] == places
            assert (answer.more, answer.others, answer.waiting_requests) == (0, others, 3)


def test_a_gateways_tenant_is_the_one_it_names(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.rows = [row(1, "a"), row(2, "b")]
    engine.door = replace(NOBODY, queue_lengths={"a": 1, "b": 1})
    with Server(engine, tokenizer, tenant_header="x-tenant") as server:
        assert [each.place for each in looked_at(server, **{"x-tenant": "b"}).waiting] == [2]
        assert looked_at(server).waiting == []
        assert server.http.get("/v1/admission", headers={"x-tenant": "a b"}).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_what_it_was_priced_at_and_how_long_it_waited(server: Server, stream: bool) -> None:
    for response in (
        server.complete(prompt="Hi", stream=stream),
        server.chat(messages=[{"role": "user", "content": "Hi"}], stream=stream),
    ):
        assert response.status_code == 200
        assert response.headers["x-plimsoll-projected-bytes"] == "123456"
        assert response.headers["x-plimsoll-queue-seconds"] == "0.250"
