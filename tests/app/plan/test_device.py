"""What a plan is made for: cards by name, sizes, and this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from app.plan import command
from app.plan.cards import CARDS, find_card
from app.plan.options import load_options
from model_runner.config import EngineConfig
from model_runner.worker import memory

GIB = 1 << 30


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["plan", "--format", "json"]) == 0
    answered: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answered


def test_contexts_and_cards_as_people_write_them() -> None:
    options = load_options(["--device-memory", "rtx 4090", "--context", "4096,32K,1M"])
    assert options.context == (4096, 32768, 1048576)
    assert options.device_memory == CARDS["RTX-4090"]
    assert find_card("a100 80gb") == CARDS["A100-80GB"]
    assert find_card("H100-80GB") == find_card("h100") == CARDS["H100"]
    assert find_card("h200 141GB") == CARDS["H200"]
    assert find_card("B100") is None
    twice = load_options(["--device-memory", "400GiB", "--context", "4K,4096,8K", "--batch", "8,1,8"])
    assert (twice.context, twice.batch) == ((4096, 8192), (8, 1))


def test_without_a_device_the_plan_is_of_this_machine_as_a_server_would_use_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"device": "cpu", "on_cpu": True, "memory_bytes": 2 * GIB, "dtype": "float32"}
    described = command.describe("", str(tmp_path))
    monkeypatch.setattr(command, "describe", lambda *_: {**described, "machine": here})
    plan = answer(capsys)
    assert (plan["device"], plan["device_memory_bytes"]) == ("this machine (cpu)", 2 * GIB)
    assert (plan["weights_dtype"], plan["kv_dtype"]) == ("float32", "float32")
    config = EngineConfig(model="", cache_dir="")
    share = memory.cpu_kv_bytes(config, 2 * GIB, plan["weights_bytes"])
    assert plan["kv_cache_bytes"] == share == int(0.4 * (2 * GIB - plan["weights_bytes"]))
    here["memory_bytes"] = 1 << 40  # more than a server takes unasked
    assert answer(capsys)["kv_cache_bytes"] == 256 * 512 * 46_080
    assert main(["plan"]) == 0
    assert "this machine (cpu): 1 TiB; available now; of what the weights leave" in capsys.readouterr().out
    assert main(["plan", "--tensor-parallel", "2"]) == 1
    assert "needs --device-memory" in capsys.readouterr().err
    here["memory_bytes"] = GIB // 4
    assert main(["plan"]) == 1
    assert "256 MiB can be used (available now)" in capsys.readouterr().err


def test_this_machine_is_described(tmp_path: Path) -> None:
    machine = command.describe("", str(tmp_path))["machine"]
    assert machine["memory_bytes"] > GIB // 4
    assert machine["dtype"] in ("float32", "bfloat16", "float16")


def test_every_card_names_its_source() -> None:
    assert all(card.source for card in CARDS.values())
