"""Published sizes of real models' caches, each to be found again from the model's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_runner.core.kv_spec import KVCacheSpec
from model_runner.worker.model_config import resolve

OWN = Path(__file__).parent / "golden_prices.json"
# A larger set that may lie beside the checkout.
BESIDE = Path(__file__).parents[4] / "shared" / "golden" / "kv_cache_bytes.json"

GIB, MIB = 1 << 30, 1 << 20


def cases(path: Path) -> list[Any]:
    if not path.exists():
        return []
    return [
        pytest.param(model["config"], check, id=f"{model['name']}, {check['what']}")
        for model in json.loads(path.read_text())["models"]
        for check in model["checks"]
    ]


def check_price(config: dict[str, Any], check: dict[str, Any]) -> None:
    kv_dtype = check.get("state_dtype", "bfloat16")
    spec = KVCacheSpec.from_config(resolve(config), kv_dtype=kv_dtype)
    match check["what"]:
        case "growing_bytes_per_token":
            assert spec.growing_bytes_per_token == check["bytes"]
            assert not check.get("latent") or {group.kind for group in spec.groups} == {"latent"}
        case "growing_bytes_per_token_if_windows_are_ignored":
            assert spec.bytes_per_token == check["bytes"]
        case "tokens_in":
            price = check["tokens"] * spec.growing_bytes_per_token
            assert check["tokens"] % check["block_size"] == 0
            assert round(price / GIB, 2) == check["gib"]
        case "sequence_bytes_about":
            assert spec.sequence_bytes(check["tokens"]) / GIB == pytest.approx(
                check["gib"], rel=check["tolerance"]
            )
        case "batch_bytes":
            price = check["sequences"] * spec.sequence_bytes(check["tokens"])
            assert round(price / GIB, 2) == check["gib"]
        case "fixed_bytes_per_sequence_about":
            assert spec.fixed_bytes_per_sequence / MIB == pytest.approx(check["mib"], rel=check["tolerance"])
            assert spec.growing_bytes_per_token == 0
        case unknown:
            pytest.fail(f"no such check: {unknown}")


@pytest.mark.parametrize(("config", "check"), cases(OWN))
def test_own_figures(config: dict[str, Any], check: dict[str, Any]) -> None:
    check_price(config, check)


@pytest.mark.skipif(not BESIDE.exists(), reason=f"the larger set is not beside the checkout ({BESIDE.name})")
@pytest.mark.parametrize(("config", "check"), cases(BESIDE) or [pytest.param({}, {}, id="absent")])
def test_the_larger_set(config: dict[str, Any], check: dict[str, Any]) -> None:
    check_price(config, check)
