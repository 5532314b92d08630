"""Configurations to plan for, each described once."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.plan import command


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[[dict[str, Any]], str]:
    def write(config: dict[str, Any]) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return str(path)

    return write


DESCRIBED: dict[str, dict[str, Any]] = {}


@pytest.fixture(autouse=True)
def described_once(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The same model is not described twice: each time is a process that imports transformers."""
    describe = command.describe

    def once(model: str, cache_dir: str) -> dict[str, Any]:
        path = Path(model)
        key = path.read_text() if path.suffix == ".json" and path.exists() else model
        if key not in DESCRIBED:
            DESCRIBED[key] = describe(model, cache_dir)
        return copy.deepcopy({**DESCRIBED[key], "name": model or DESCRIBED[key]["name"]})

    if "fails" not in request.node.name:
        monkeypatch.setattr(command, "describe", once)
