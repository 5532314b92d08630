"""The documentation says what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from app.command_line import load_settings, options_table
from app.errors import FREE_BYTES, PROJECTED_BYTES, QUEUE_SECONDS
from app.metrics import Metrics
from app.protocol.admission import Admission, WaitingRequest
from app.protocol.capacity import AdmissionCheck
from app.tenant_file import digest, parse_tenants
from model_runner.core.obstacles import Obstacle
from model_runner.errors import Reason
from tests.app.fake_engine import FakeEngine

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_table_of_options_is_the_codes_own() -> None:
    assert options_table().strip() in (ROOT / "docs" / "options.md").read_text()


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(plimsoll_\w+)", page, flags=re.MULTILINE))
    metrics = Metrics(load_settings([], {}))
    metrics.attach(FakeEngine())
    suffix = {"counter": "_total", "info": "_info"}
    exist = {family.name + suffix.get(family.type, "") for family in metrics.registry.collect()}
    assert documented == {name for name in exist if name.startswith("plimsoll_")}
    for name in exist:
        if name.startswith("vllm:"):
            assert f"`{name}`" in page


def test_the_example_of_tenants_is_one() -> None:
    page = (ROOT / "docs" / "tenants.md").read_text()
    example = re.search(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    assert example
    tenants = parse_tenants(tomllib.loads(example[1]))
    assert [tenant.policy.name for tenant in tenants] == ["search", "nightly", "default"]
    assert tenants[1].key_digests == (digest(b"another key"),)


def test_what_can_be_seen_of_admission_is_documented() -> None:
    page = (ROOT / "docs" / "admission.md").read_text()
    keys = {*Admission.model_fields, *WaitingRequest.model_fields, *AdmissionCheck.model_fields}
    headers = {PROJECTED_BYTES, QUEUE_SECONDS, FREE_BYTES}
    assert {name for name in keys | headers | set(Obstacle) if f"`{name}`" not in page} == set()


def test_every_refusal_is_documented() -> None:
    readme = (ROOT / "README.md").read_text()
    for reason in Reason:
        if reason not in (Reason.INVALID_REQUEST,):
            assert f"`{reason.value}`" in readme, reason


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_named_in_backticks_exist(page: Path) -> None:
    for name in re.findall(r"`((?:app|model_runner|tests|deploy|docs)/[\w/.]+\.\w+)`", page.read_text()):
        assert (ROOT / name).exists(), name
