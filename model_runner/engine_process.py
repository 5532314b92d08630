"""The engine process: builds an engine as it is told on stdin, then steps it until it is told to leave.

It exits with 0 when asked to or when its parent has died, with 1 when it can't start as it was asked to (the
reason has been sent), and with 70 when a step has failed: after that nothing on the device can be trusted.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

import msgspec
import zmq

from model_runner import log_format
from model_runner.config import EngineConfig
from model_runner.engine import EngineCore
from model_runner.errors import StartupError
from model_runner.messages import (
    Abort,
    FromEngine,
    Loading,
    ModelInfo,
    Planned,
    Ready,
    Shutdown,
    StartFailed,
    StepDone,
    Submit,
    ToEngine,
    decode_to_engine,
    encode,
)

logger = logging.getLogger(__name__)

EXIT_START_FAILED = 1
EXIT_STEP_FAILED = 70  # EX_SOFTWARE
_PR_SET_PDEATHSIG = 1

OnProgress: TypeAlias = Callable[[str, float], None]  # stage, fraction
OnPlanned: TypeAlias = Callable[[ModelInfo], None]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that is ready to step, and what was measured while it warmed up."""

    core: EngineCore
    model: ModelInfo
    decode_step_seconds: float
    prefill_tokens_per_second: float
    execution: str


BuildEngine: TypeAlias = Callable[[EngineConfig, OnProgress, OnPlanned], BuiltEngine]


def main(build: BuildEngine, argv: Sequence[str] | None = None) -> NoReturn:
    """`build` may raise StartupError. Any other exception of it ends the process with a traceback."""
    arguments = _parse(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    config = msgspec.json.decode(_read_line(sys.stdin.fileno()), type=EngineConfig)
    log_format.configure(config.log_level, config.log_format)
    _die_with_parent()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)  # milliseconds for last words, and no longer
    socket.connect(arguments.address)
    code = _run(build, config, _Mailbox(socket, arguments.epoch))
    socket.close()
    context.term()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the watcher of stdin and the device's own threads have nothing left to tidy up.
    os._exit(code)


class _Mailbox:
    def __init__(self, socket: zmq.Socket[bytes], epoch: int) -> None:
        self._socket = socket
        self.epoch = epoch

    def send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))

    def receive(self, *, wait: bool) -> Iterator[ToEngine]:
        """All that has come; at least one message if told to wait for it."""
        if wait:
            yield decode_to_engine(self._socket.recv())
        while self._socket.poll(0):
            yield decode_to_engine(self._socket.recv())


def _run(build: BuildEngine, config: EngineConfig, mailbox: _Mailbox) -> int:
    epoch = mailbox.epoch
    try:
        built = build(
            config,
            lambda stage, fraction: mailbox.send(Loading(epoch, stage, fraction)),
            lambda model: mailbox.send(Planned(epoch, model)),
        )
    except StartupError as error:
        mailbox.send(StartFailed(epoch, error.message))
        return EXIT_START_FAILED
    mailbox.send(
        Ready(
            epoch=epoch,
            model=built.model,
            decode_step_seconds=built.decode_step_seconds,
            prefill_tokens_per_second=built.prefill_tokens_per_second,
            execution=built.execution,
        )
    )
    try:
        serve(built.core, mailbox)
    except Exception:  # whatever it was, the device's memory can't be trusted any more
        logger.exception("a step has failed, so this engine ends")
        return EXIT_STEP_FAILED
    return 0


def serve(core: EngineCore, mailbox: _Mailbox) -> None:
    """Until Shutdown: apply what has come, run one step, say what it did."""
    while True:
        for message in mailbox.receive(wait=not core.has_work):
            if isinstance(message, Submit):
                core.submit(message)
            elif isinstance(message, Abort):
                core.abort(message.request_id, message.choice)
            else:
                assert isinstance(message, Shutdown)
                return
        started_at = time.perf_counter()
        result = core.step()
        if result is not None:
            stats = result.stats(time.perf_counter() - started_at)
            core.observe(stats)
            mailbox.send(result.message(mailbox.epoch, stats))
        elif released := core.drain():
            mailbox.send(StepDone(mailbox.epoch, [], released, None))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Plimsoll's engine process. It is started by `plimsoll serve`, never by hand."
    )
    parser.add_argument("--address", required=True, help="the parent's ZeroMQ socket")
    parser.add_argument("--epoch", required=True, type=int, help="which engine of the parent's this is")
    return parser.parse_args(argv)


def _read_line(descriptor: int) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(descriptor, 1)  # one by one: nothing may be left in a buffer that no one reads
        if not chunk:
            os._exit(0)  # the parent died before it had said what it wants
        line += chunk
    return bytes(line)


def _die_with_parent() -> None:
    """The end of stdin is the parent's death, on any system. Linux can also be asked to kill."""
    threading.Thread(target=_exit_at_end, args=(sys.stdin.fileno(),), daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _exit_at_end(descriptor: int) -> None:
    # os.read, not sys.stdin.read: a thread inside a buffered reader can stop the interpreter from ending.
    while os.read(descriptor, 4096):
        pass
    os._exit(0)
