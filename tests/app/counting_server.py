"""`plimsoll serve` with an engine process that counts instead of running a model. `--model` has its knobs."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import app.serve
from app.cli import main
from model_runner.async_engine import AsyncEngine
from model_runner.model_files import resolve

FAKE_ENGINE = Path(__file__).parents[1] / "model_runner" / "fake_engine.py"

if __name__ == "__main__":
    vars(app.serve)["AsyncEngine"] = functools.partial(
        AsyncEngine, command=[sys.executable, str(FAKE_ENGINE)]
    )
    vars(app.serve)["resolve"] = lambda model, *rest: resolve("", *rest)
    sys.exit(main(["serve", *sys.argv[1:]]))
