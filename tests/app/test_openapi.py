"""The schema tells the truth: what it allows is answered as it says, and what it forbids is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings

from app.protocol.requests import ChatCompletionRequest, CompletionRequest
from tests.app.conftest import Server

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own dependencies, while it is imported
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi import checks as openapi_checks

CHECKS = [
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
]
PATHS = {
    "/v1/completions",
    "/v1/capacity",
    "/v1/admission",
    "/v1/admission/check",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/{model_id}",
    "/healthz",
    "/readyz",
    "/health",
    "/version",
    "/metrics",
}


def test_every_route_and_every_field_is_told(server: Server) -> None:
    schema = server.http.get("/openapi.json").json()
    assert set(schema["paths"]) == PATHS
    for path, model in (
        ("/v1/completions", CompletionRequest),
        ("/v1/chat/completions", ChatCompletionRequest),
    ):
        operation = schema["paths"][path]["post"]
        body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        described = schema["components"]["schemas"][body.rsplit("/", 1)[-1]]
        assert set(described["properties"]) == set(model.model_fields)
        assert all("description" in field for field in described["properties"].values())
        assert {"200", "400", "401", "404", "413", "429", "500", "503", "504"} <= set(operation["responses"])
        assert "422" not in operation["responses"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_nothing_that_is_sent_breaks_it(server: Server, mode: GenerationMode) -> None:
    """Every answer to what the schema allows, and to what it forbids, has a status and a body that the schema
    tells.
    """
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses = set()
    for result in schema.get_all_operations():
        operation = result.ok()  # type: ignore[union-attr]
        if mode is GenerationMode.NEGATIVE and operation.method != "post":
            continue

        @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @seed(1)
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case[Any]) -> None:
            response = case.call()
            statuses.add(response.status_code)
            case.validate_response(response, checks=CHECKS)

        check()
    assert 400 in statuses
    assert max(statuses) < 500
    assert mode is GenerationMode.NEGATIVE or 200 in statuses


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
def test_the_events_of_a_stream_are_as_the_schema_tells(
    server: Server, path: str, asked: dict[str, Any]
) -> None:
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path]["POST"]
    case = operation.Case(body={**asked, "stream": True, "n": 2}, media_type="application/json")
    response = case.call()
    assert "data: [DONE]" in response.text
    case.validate_response(response)
