"""What a model is, without its weights: `python -m model_runner.describe MODEL` prints it as JSON.

A process of its own, because it needs transformers, and whoever asks (the planner) should not. On an error it
prints {"error": …} and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from model_runner.errors import StartupError
from model_runner.worker.model_description import describe


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m model_runner.describe", description=__doc__)
    parser.add_argument(
        "model", help="a directory, a hub id, a config.json, a .gguf file; '' is the embedded model"
    )
    parser.add_argument("--cache-dir", required=True)
    options = parser.parse_args(argv)
    try:
        answer = describe(options.model, options.cache_dir)
    except StartupError as error:
        print(json.dumps({"error": error.message}))
        return 1
    print(json.dumps(answer, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
