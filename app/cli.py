"""The command `plimsoll`. Exit codes: 0 done, 1 it could not start or run, 2 it was asked wrongly."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from app.command_line import load_settings
from app.options import UsageError
from app.values import did_you_mean
from app.version import plimsoll_version
from model_runner.errors import StartupError

_USAGE = """\
usage: plimsoll COMMAND [--option VALUE …]

A language model behind the OpenAI HTTP API, with every byte of its KV cache priced, reserved and visible.

commands:
  serve      serve a model; without options, the embedded one on http://127.0.0.1:8000
  bench      measure any OpenAI-compatible server under load
  health     whether the server that runs here is well
  plan       what a model needs, and how much of it fits a device, before anything runs
  replay     what each admission policy would make of a trace of requests, in simulated time
  calibrate  what a step of a running engine costs, for replay

`plimsoll COMMAND --help` explains a command's options. `plimsoll --version` says which version this is.
"""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except UsageError as error:
        return _complain(str(error), 2)
    except StartupError as error:
        return _complain(error.message, 1)
    except KeyboardInterrupt:
        return 130


def _run(words: list[str]) -> int:
    if not words:
        print(_USAGE, end="", file=sys.stderr)
        return 2
    if words[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"plimsoll {plimsoll_version()}")
        return 0
    if words[0] not in _COMMANDS:
        guess = did_you_mean(words[0], _COMMANDS)
        raise UsageError(f"unknown command {words[0]!r}{guess} See `plimsoll --help`.")
    return _COMMANDS[words[0]](words[1:])


def _serve(words: list[str]) -> int:
    settings = load_settings(words, os.environ)
    from app.serve import serve  # the web framework takes half a second to import: not for --help

    return serve(settings)


def _bench(words: list[str]) -> int:
    from app.bench.command import bench

    return bench(words, os.environ)


def _plan(words: list[str]) -> int:
    from app.plan.command import plan

    return plan(words)


def _replay(words: list[str]) -> int:
    from app.replay.command import replay

    return replay(words)


def _calibrate(words: list[str]) -> int:
    from app.calibrate.command import calibrate

    return calibrate(words, os.environ)


def _health(words: list[str]) -> int:
    from app.health import health

    return health(words)


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": _serve,
    "bench": _bench,
    "health": _health,
    "plan": _plan,
    "replay": _replay,
    "calibrate": _calibrate,
}


def _complain(message: str, code: int) -> int:
    print(f"plimsoll: {message}", file=sys.stderr)
    return code
