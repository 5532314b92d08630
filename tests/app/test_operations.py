"""Probes, metrics, models and version."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.protocol.responses import ErrorResponse, Model, ModelList, Version
from model_runner.async_engine import EngineState
from model_runner.tokenizer import Tokenizer
from tests.app.conftest import MODEL, Server
from tests.app.fake_engine import FakeEngine

CODES = {
    EngineState.STARTING: "starting",
    EngineState.RESTARTING: "engine_restarting",
    EngineState.STUCK: "engine_restarting",
    EngineState.FAILED: "engine_restarting",
    EngineState.DRAINING: "draining",
    EngineState.STOPPED: "draining",
}


@pytest.mark.parametrize("state", EngineState)
def test_readiness_is_the_engine_s(server: Server, engine: FakeEngine, state: EngineState) -> None:
    engine.state = state
    for path in ("/readyz", "/health"):
        response = server.http.get(path)
        if state is EngineState.READY:
            assert response.status_code == 200
        else:
            assert response.status_code == 503
            assert ErrorResponse.model_validate_json(response.content).error.code == CODES[state]
            assert int(response.headers["retry-after"]) >= 1
    assert server.http.get("/healthz").status_code == 200


def test_models(server: Server) -> None:
    listed = ModelList.model_validate_json(server.http.get("/v1/models").content)
    assert [model.id for model in listed.data] == [MODEL]
    assert listed.data[0].max_model_len == 512
    one = Model.model_validate_json(server.http.get(f"/v1/models/{MODEL}").content)
    assert one == listed.data[0]
    assert server.openai.models.retrieve(MODEL).id == MODEL
    assert server.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_a_name_may_hold_slashes(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    with Server(engine, tokenizer, served_model_name="org/a-model") as server:
        assert server.http.get("/v1/models/org/a-model").json()["id"] == "org/a-model"
        assert server.complete(prompt="Hi", model="org/a-model").json()["model"] == "org/a-model"


def test_metrics_are_prometheus_s(server: Server) -> None:
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(response.text)}
    assert "plimsoll_kv_cache_budget_bytes" in names


def test_version(server: Server) -> None:
    assert Version.model_validate_json(server.http.get("/version").content).version
