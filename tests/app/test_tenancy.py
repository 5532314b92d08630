"""Who asks, and what that changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from app.tenancy import Tenancy, TenantLabels
from app.tenant_file import digest, parse_tenants, read_tenants
from model_runner.core.tenants import TenantPolicy
from model_runner.errors import InvalidRequest, Reason, TenantRateLimited
from model_runner.tokenizer import Tokenizer
from tests.app.conftest import Server
from tests.app.fake_engine import FakeEngine

FILE = Path(__file__).with_name("tenants.toml")


# The file


def test_the_file_says_who_they_are() -> None:
    search, nightly, default = read_tenants(str(FILE))
    assert search.policy == TenantPolicy(
        "search",
        weight=2.0,
        max_reserved_bytes=2**20,
        max_queued_requests=3,
        requests_per_second=0.01,
        burst_requests=2,
    )
    assert search.key_digests == (digest(b"open sesame"), digest(b"older sesame"))
    assert nightly.policy == TenantPolicy("nightly", weight=0.5)
    assert nightly.key_digests == (digest(b"moonshine"),)
    assert default.policy == TenantPolicy("default", requests_per_second=100.0)
    assert search.policy.in_blocks(1000).max_reserved_blocks == 2**20 // 1000
    assert nightly.policy.in_blocks(1000).max_reserved_blocks is None


def test_it_may_be_json_whatever_it_is_called(tmp_path: Path) -> None:
    content = json.dumps({"tenants": [{"name": "a", "keys": ["k"], "max_reserved": 4096}]})
    for name in ("tenants.json", "tenants"):
        (tmp_path / name).write_text(content)
        (tenant,) = read_tenants(str(tmp_path / name))
        assert (tenant.policy.max_reserved_bytes, tenant.key_digests) == (4096, (digest(b"k"),))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "a file of tenants is a list named `tenants`"),
        ({"tenants": {}}, "a file of tenants is a list named `tenants`"),
        ({"tenants": [], "more": 1}, "a file of tenants is a list named `tenants`"),
        ({"tenants": []}, "describes no tenant"),
        ({"tenants": ["a"]}, "tenant 1 must be a table"),
        ({"tenants": [{"name": "a"}, {"weight": 1}]}, "tenant 2 needs a `name`"),
        ({"tenants": [{"name": "a b"}]}, "tenant 1 needs a `name` of 1 to 64"),
        ({"tenants": [{"name": "a" * 65}]}, "tenant 1 needs a `name` of 1 to 64"),
        ({"tenants": [{"name": "other"}]}, "can't be named 'other'"),
        ({"tenants": [{"name": "a"}, {"name": "a"}]}, "two tenants named 'a'"),
        ({"tenants": [{"name": "a", "weigth": 1}]}, "unknown field `weigth`; did you mean weight?"),
        (
            {"tenants": [{"name": "a", "keys": ["k"]}, {"name": "b", "keys_sha256": [digest(b"k").hex()]}]},
            "tenants 'a' and 'b' have a key in common",
        ),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(content: Any, says: str) -> None:
    with pytest.raises(ValueError, match="^" + says.replace("?", r"\?") + "|" + says.replace("?", r"\?")):
        parse_tenants(content)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("keys", value) for value in ("sesame", [1], [""], [" sesame"], {"sesame": 1})),
        *(("keys_sha256", value) for value in (["sesame"], ["ab" * 31], ["zz" * 32], "ab" * 32)),
        *(("weight", value) for value in (0, -1, "1", True, None, float("nan"))),
        *(("max_reserved", value) for value in (0, 1.5, "8G", True, -1, "")),
        *(("max_queued", value) for value in (-1, 1.0, "1", True)),
        *(("requests_per_second", value) for value in (0, -0.5, "1", False)),
        *(("burst", value) for value in (0, 1.5, True)),
    ],
)
def test_a_value_that_is_out_of_range_is_named_and_never_shown(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^`{field}` of tenant 'a' must be ") as caught:
        parse_tenants({"tenants": [{"name": "a", field: value}]})
    assert "sesame" not in str(caught.value)


def test_what_json_calls_a_number_may_still_be_none() -> None:
    with pytest.raises(ValueError, match="tenant 'a': weight must be above 0, not inf"):
        parse_tenants(json.loads('{"tenants": [{"name": "a", "weight": Infinity}]}'))


@pytest.mark.parametrize(
    "text", ['[[tenants]]\nkeys = ["sesame', '{"tenants": [{"keys": ["sesame"', "sesame"]
)
def test_a_file_that_cant_be_parsed_says_where_and_not_what(tmp_path: Path, text: str) -> None:
    (tmp_path / "tenants").write_text(text)
    with pytest.raises(ValueError, match=r"is neither TOML nor JSON: .*line 1|at end of document") as caught:
        read_tenants(str(tmp_path / "tenants"))
    assert "sesame" not in str(caught.value)


def test_nothing_shows_a_key_or_its_digest() -> None:
    assert digest(b"moonshine").hex() not in repr(read_tenants(str(FILE)))
    assert "key_digests" not in repr(read_tenants(str(FILE)))


# Keys and headers


def bearer(key: str) -> str:
    return f"Bearer {key}"


def test_each_key_is_a_tenant() -> None:
    tenancy = Tenancy(api_keys=("a", "b", "a", "c"))
    assert [tenancy.holder(bearer(key)) for key in "abcd"] == ["key-1", "key-2", "key-3", None]
    assert not Tenancy().has_keys


def test_the_file_names_the_holder_of_a_key_wherever_it_is_written() -> None:
    tenancy = Tenancy(api_keys=("moonshine", "mine"), described=read_tenants(str(FILE)))
    keys = ("open sesame", "older sesame", "moonshine", "mine", "sesame")
    names = [tenancy.holder(bearer(key)) for key in keys]
    assert names == ["search", "search", "nightly", "key-2", None]


def test_the_gateways_header_comes_before_the_key_and_that_before_the_default() -> None:
    tenancy = Tenancy(header="x-tenant")
    assert tenancy.tenant_of("key-1", Headers({"x-tenant": "acme"})) == "acme"
    assert tenancy.tenant_of("key-1", Headers({})) == "key-1"
    assert tenancy.tenant_of(None, Headers({})) == "default"
    assert Tenancy().tenant_of(None, Headers({"x-tenant": "acme"})) == "default"  # off unless asked for


@pytest.mark.parametrize("raw", [[b""], [b"a b"], [b"a", b"b"], [b"x" * 65], ["ä".encode()], [b"a\x7f"]])
def test_a_header_that_is_no_name_is_refused(raw: list[bytes]) -> None:
    headers = Headers(raw=[(b"x-tenant", each) for each in raw])
    with pytest.raises(InvalidRequest, match="`x-tenant` must be one tenant's name") as caught:
        Tenancy(header="x-tenant").tenant_of(None, headers)
    assert caught.value.param == "x-tenant"


def test_each_tenant_is_held_to_its_own_rate_or_that_of_others() -> None:
    now = 0.0
    tenancy = Tenancy(described=read_tenants(str(FILE)), clock=lambda: now)
    for _ in range(2):
        tenancy.check_rate("search")
        tenancy.count_request("search")
    for refuse in (tenancy.check_rate, tenancy.count_request):
        with pytest.raises(TenantRateLimited) as caught:
            refuse("search")
        assert caught.value.retry_after_seconds == pytest.approx(100.0)
    now = 100.0
    tenancy.count_request("search")
    for _ in range(1000):
        tenancy.count_request("nightly")
    for _ in range(100):
        tenancy.count_request("somebody")
        tenancy.count_request("somebody else")
    with pytest.raises(TenantRateLimited):
        tenancy.count_request("somebody")


# Labels


def test_labels_are_bounded_and_those_described_come_first() -> None:
    labels = TenantLabels(3, ["search", "nightly"])
    assert labels.label("first") == "first"
    assert {labels.label(f"tenant-{serial}") for serial in range(1000)} == {"other"}
    assert [labels.label(name) for name in ("nightly", "first", "search")] == ["nightly", "first", "search"]


def test_with_no_labels_all_are_other() -> None:
    assert TenantLabels(0, ["search"]).label("search") == "other"


def test_a_tenant_of_a_gateway_that_is_called_other_takes_no_label() -> None:
    labels = TenantLabels(1)
    assert [labels.label("other"), labels.label("a")] == ["other", "a"]


# The server


@pytest.fixture
def shared(engine: FakeEngine, tokenizer: Tokenizer) -> Iterator[Server]:
    tenants = read_tenants(str(FILE))
    with Server(engine, tokenizer, api_keys=("mine",), tenants=tenants, tenant_header="x-tenant") as running:
        yield running


def ask(server: Server, key: str, path: str = "/v1/completions", **headers: str) -> Any:
    sent = {"authorization": bearer(key), **headers}
    return server.http.post(path, json={"prompt": "Hi"}, headers=sent)


def test_the_door_is_told_who_asks(shared: Server, engine: FakeEngine) -> None:
    for key in ("mine", "open sesame", "moonshine"):
        assert ask(shared, key).status_code == 200
    assert ask(shared, "mine", **{"X-Tenant": "acme"}).status_code == 200
    assert ask(shared, "wrong", **{"X-Tenant": "acme"}).status_code == 401
    assert [each.tenant for each in engine.submissions] == ["key-1", "search", "nightly", "acme"]


def test_without_keys_there_is_one_tenant(server: Server, engine: FakeEngine) -> None:
    headers = {"authorization": bearer("any"), "x-tenant": "acme"}
    assert server.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers).status_code == 200
    assert engine.submissions[0].tenant == "default"


def test_a_rate_is_held_before_the_body_is_read(
    shared: Server, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "plimsoll")
    for key in ("open sesame", "older sesame"):  # two keys of one tenant
        assert ask(shared, key).status_code == 200
    assert ask(shared, "open sesame", "/v1/admission/check").json()["decision"] == "rejected"
    response = ask(shared, "open sesame")
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "tenant_rate_limited"
    assert 90 < int(response.headers["retry-after"]) <= 100
    assert shared.rejections(Reason.TENANT_RATE_LIMITED) == 1
    assert len(engine.submissions) == 2
    assert ask(shared, "moonshine").status_code == 200
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    assert [each["tenant"] for each in fields if each.get("code") == "tenant_rate_limited"] == ["search"]
    assert "sesame" not in caplog.text + str(fields)


def test_a_check_counts_nothing_and_says_what_would_become_of_it(shared: Server) -> None:
    for _ in range(5):
        checked = ask(shared, "open sesame", "/v1/admission/check").json()
        assert checked["decision"] == "admitted"
    for _ in range(2):
        assert ask(shared, "open sesame").status_code == 200
    checked = ask(shared, "open sesame", "/v1/admission/check").json()
    assert (checked["decision"], checked["status"]) == ("rejected", 429)
    assert checked["error"]["code"] == "tenant_rate_limited"
    assert checked["retry_after_seconds"] == pytest.approx(100, abs=10)


def test_a_gateway_that_names_nobody_rightly_is_told(shared: Server) -> None:
    for path in ("/v1/completions", "/v1/admission/check"):
        response = ask(shared, "mine", path, **{"x-tenant": "no such name"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "x-tenant"


# Priority and time


@pytest.mark.parametrize(
    ("given", "becomes"), [(None, 0), (0, 0), (-3, -3), (10, 10), (11, 10), (-(10**30), -10)]
)
def test_priority_is_an_integer_within_a_range(
    server: Server, engine: FakeEngine, given: int | None, becomes: int
) -> None:
    assert server.complete(prompt="Hi", priority=given).status_code == 200
    assert server.chat(messages=[{"role": "user", "content": "Hi"}], priority=given).status_code == 200
    assert [each.priority for each in engine.submissions] == [becomes, becomes]


@pytest.mark.parametrize("given", [1.5, "1", True, [1], {}])
def test_priority_that_is_no_integer_is_refused(server: Server, given: Any) -> None:
    response = server.complete(prompt="Hi", priority=given)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "priority"
    assert error["message"].startswith("`priority` must be an integer")


@pytest.mark.parametrize(
    ("given", "becomes"),
    [("5", 5.0), ("0.25", 0.25), (".5", 0.5), ("1e1", 10.0), ("61", 60.0), ("1e999", 60.0)],
)
def test_the_header_says_how_long_a_request_would_wait(
    server: Server, engine: FakeEngine, given: str, becomes: float
) -> None:
    headers = {"x-request-timeout-seconds": given}
    for path in ("/v1/completions", "/v1/admission/check"):
        assert server.http.post(path, json={"prompt": "Hi"}, headers=headers).status_code == 200
    assert server.complete(prompt="Hi").status_code == 200
    assert [each.timeout_seconds for each in engine.submissions] == [becomes, None]


@pytest.mark.parametrize(
    "given", ["", "0", "0.0", "-1", "soon", "nan", "inf", "5s", "1_0", "٣", "1e-9999", "1e-999", "5, 6"]
)
def test_a_time_that_is_none_is_refused_by_the_headers_name(server: Server, given: str) -> None:
    headers = {"x-request-timeout-seconds": given.encode()}
    response = server.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "x-request-timeout-seconds"
    assert error["message"].startswith("`x-request-timeout-seconds` must be a number of seconds above 0")
    assert server.rejections(Reason.INVALID_REQUEST) == 1
