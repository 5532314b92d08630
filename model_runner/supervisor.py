"""Keeps one engine process alive: starts it, watches it, notices its death, starts the next."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from model_runner.config import EngineConfig
from model_runner.errors import StartupError
from model_runner.messages import (
    FromEngine,
    Ready,
    Shutdown,
    StartFailed,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)

logger = logging.getLogger(__name__)

# OpenMP's threads spin between two kernels, which come microseconds apart. For long is too long when a core
# is shared: the spinning thread takes the time that the one it waits for needs, hundreds of times a step.
# Measured on two cores with 0, 2,000 and 200,000 turns: a decode step on a quiet machine took 21, 15 to 21
# and 15 ms; 64 tokens beside a process that kept one core busy took 1.5 to 3.7, 3.3 to 4.1 and 12 to 50 s.
_ENGINE_ENVIRONMENT = {"GOMP_SPINCOUNT": "2000"}
_GRACE_SECONDS = 5.0  # for an engine that was asked to leave
_STARTUP_PATIENCE = 10.0  # times the last start's length: a silent start of so long is stuck
_HEALTHY_SECONDS = 60.0  # an engine that lived so long since it was ready clears the record


class EngineMisbehaved(Exception):
    """The engine said what it must not: it is ended and another is started."""


@dataclass(slots=True)
class BackOff:
    """How long to wait before the next start: doubles with every death, forgets after a healthy life."""

    first_seconds: float
    most_seconds: float
    _next: float = 0.0

    def after_death(self, healthy_seconds: float) -> float:
        if self._next == 0.0 or healthy_seconds >= _HEALTHY_SECONDS:
            self._next = self.first_seconds
        delay = self._next
        self._next = min(delay * 2, self.most_seconds)
        return delay


class EngineProcess:
    """One engine process and the socket to it, from birth to death."""

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, path: str) -> None:
        self._process = process
        self._socket = socket
        self._path = path

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        config: EngineConfig,
        *,
        epoch: int,
        context: zmq.asyncio.Context,
        directory: str,
    ) -> EngineProcess:
        """Raises OSError when the command can't be run, ZMQError when the socket can't be made."""
        path = os.path.join(directory, str(epoch))
        socket = context.socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(f"ipc://{path}")
            process = await asyncio.create_subprocess_exec(
                *command,
                "--address",
                f"ipc://{path}",
                "--epoch",
                str(epoch),
                stdin=asyncio.subprocess.PIPE,
                env={**_ENGINE_ENVIRONMENT, **os.environ},
                start_new_session=True,  # a Ctrl-C in the terminal is for the parent, which decides
            )
        except BaseException:
            socket.close()
            raise
        assert process.stdin is not None
        process.stdin.write(
            msgspec.json.encode(config) + b"\n"
        )  # and it stays open: its end tells of our death
        return cls(process, socket, path)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Returns at once; the socket keeps what the engine has not taken yet, in order."""
        self._socket.send(encode(message))

    async def receive(self) -> FromEngine:
        """Raises msgspec.DecodeError."""
        return decode_from_engine(await self._socket.recv())

    async def has_mail(self, timeout_seconds: float = 0.0) -> bool:
        return bool(await self._socket.poll(int(timeout_seconds * 1000)))

    async def exited(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """Kills what still lives, and returns when it is gone."""
        self.kill()
        await self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.wait_closed()
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class Owner(Protocol):
    """Whose engine it is."""

    def received(self, message: FromEngine) -> None:
        """Raises EngineMisbehaved to have the engine ended."""

    def engine_died(self) -> None: ...

    @property
    def engine_has_work(self) -> bool: ...


class Supervisor:
    """`run` lives as long as the server. An engine is `up` from its Ready to its death."""

    def __init__(
        self,
        owner: Owner,
        config: EngineConfig,
        command: Sequence[str],
        *,
        step_timeout_seconds: float,
        start_timeout_seconds: float,
        back_off: BackOff,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.epoch = 0
        self.restarts = 0
        self.up = False
        self.pid: int | None = None
        self._owner = owner
        self._command = command
        self._step_timeout = step_timeout_seconds
        self._start_timeout = start_timeout_seconds or math.inf
        self._back_off = back_off
        self._clock = clock
        self._process: EngineProcess | None = None
        self._closing = False
        self._hung = False  # what ended the last engine was our patience
        self._busy = False  # there is work that the engine owes a word about
        self._heard_at = clock()  # its last word, or when it was given work after it had none
        self._ready_at: float | None = None
        self._starts_at = clock()  # when this life's start began, or the next one's will
        self._startup_seconds: float | None = None

    @property
    def silent_seconds(self) -> float:
        """For how long the engine has had work and said nothing."""
        return self._clock() - self._heard_at if self._busy else 0.0

    def seconds_until_up(self, fallback: float) -> float:
        """From the back-off that is left and the last start that succeeded."""
        startup = fallback if self._startup_seconds is None else self._startup_seconds
        return max(self._starts_at + startup - self._clock(), 0.5)

    def send(self, message: ToEngine) -> None:
        """What is sent to no one is lost: the owner sends only to an engine that is up."""
        if self._process is not None:
            if isinstance(message, Submit) and not self._busy:
                self._busy = True
                self._heard_at = self._clock()
            self._process.send(message)

    async def run(self) -> None:
        """Raises StartupError when the first engine fails to become ready; when it hangs, another is tried.
        Returns after `close`."""
        try:
            directory = tempfile.mkdtemp(prefix="plimsoll-")
        except OSError as error:
            raise StartupError(
                f"The socket to the engine needs a folder to lie in: {error}. Name one in TMPDIR."
            ) from error
        context = zmq.asyncio.Context()
        try:
            while not self._closing:
                cause = await self._live(context, directory)
                self._process, self.pid, self._busy = None, None, False
                healthy_seconds = 0.0 if self._ready_at is None else self._clock() - self._ready_at
                self.up, self._ready_at = False, None
                if self._closing:
                    return
                if self._startup_seconds is None and not self._hung:
                    raise StartupError(cause)
                delay = self._back_off.after_death(healthy_seconds)
                logger.error("engine process ended: %s; starting another in %.1f s", cause, delay)
                self.restarts += 1
                self._starts_at = self._clock() + delay
                self._owner.engine_died()
                await asyncio.sleep(delay)
        finally:
            self._process = None
            self.up = False
            context.destroy(linger=0)
            shutil.rmtree(directory, ignore_errors=True)

    async def close(self, running: asyncio.Task[None]) -> None:
        """Ask the engine to leave, then make it; `running` is the task of `run`."""
        self._closing = True
        if self._process is not None and self.up:
            self._process.send(Shutdown())
            await asyncio.wait({running}, timeout=_GRACE_SECONDS)
        if not running.done():
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError, StartupError):
            await running

    async def _live(self, context: zmq.asyncio.Context, directory: str) -> str:
        """One engine's life. Returns what ended it."""
        self.epoch += 1
        self._starts_at = self._clock()
        self._hung = False
        try:
            process = await EngineProcess.spawn(
                self._command, self.config, epoch=self.epoch, context=context, directory=directory
            )
        except (OSError, zmq.ZMQError) as error:
            return f"the engine process could not be started: {error}"
        self._process, self.pid = process, process.pid
        watchers = [
            asyncio.create_task(self._listen(process)),
            asyncio.create_task(self._await_exit(process)),
            asyncio.create_task(self._watch_steps(process)),
        ]
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in watchers if task in done).result()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await process.close()

    async def _listen(self, process: EngineProcess) -> str:
        while True:
            try:
                message = await process.receive()
                self._heard(message)
                self._owner.received(message)
                self._busy = self._owner.engine_has_work
            except (msgspec.DecodeError, EngineMisbehaved) as error:
                return f"it said what it must not: {error}"
            if isinstance(message, StartFailed):
                return message.message

    def _heard(self, message: FromEngine) -> None:
        self._heard_at = self._clock()
        if isinstance(message, Ready) and message.epoch == self.epoch:
            self.up = True
            self._ready_at = self._clock()
            self._startup_seconds = self._ready_at - self._starts_at

    async def _await_exit(self, process: EngineProcess) -> str:
        code = await process.exited()
        # Its last words are still read: what it had finished is finished, and why it failed is worth knowing.
        while await process.has_mail(timeout_seconds=0.02):  # noqa: ASYNC110 - another task takes them
            await asyncio.sleep(0.001)
        return f"it ended {_how(code)} while it ran" if self.up else _why_not_ready(code)

    async def _watch_steps(self, process: EngineProcess) -> str:
        interval = min(1.0, self._step_timeout / 10, self._start_timeout / 10)
        while True:
            await asyncio.sleep(interval)
            # When this process itself was held up, the engine's words may be here, unread.
            if (overdue := self._overdue()) and not await process.has_mail():
                self._hung = True
                return overdue

    def _overdue(self) -> str | None:
        """What the engine should have done by now. A first start (it may be dequantising, or compiling) shows
        how long another one may take."""
        if self.up:
            if self.silent_seconds > self._step_timeout:
                return f"a step took longer than {self._step_timeout:g} s"
        else:
            patience = self._start_timeout
            if self._startup_seconds is not None:
                known = max(_STARTUP_PATIENCE * self._startup_seconds, self._step_timeout)
                patience = min(known, patience)
            if self._clock() - max(self._starts_at, self._heard_at) > patience:
                return f"it said nothing for {patience:.3g} s while it started"
        return None


def _how(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    if -code == signal.SIGKILL:
        return "by SIGKILL (perhaps because memory ran out)"
    return f"by signal {-code} ({signal.strsignal(-code)})"


def _why_not_ready(code: int) -> str:
    if -code == signal.SIGKILL:  # it could say nothing itself
        return (
            "the engine process was killed before it was ready. The system does so when memory runs out: use "
            "a smaller model, a smaller --dtype (bfloat16 is half of float32), or less --kv-cache-memory."
        )
    return f"the engine process ended {_how(code)} before it was ready; its own words are above"
