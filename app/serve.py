"""`plimsoll serve`: from settings to a server that listens, and from a signal to an orderly end.

    bind → plan (the engine starts, the table is shown) → listen → ready → … → signal → drain → close

The port is taken first, so that a port in use is known in the first second. The listener opens as soon as the
model's prices are known, and stays open until the last request has ended: whoever comes too early or too late
is told so.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import uvicorn
from fastapi import FastAPI
from prometheus_client import disable_created_metrics

from app import logs
from app.connection import SPARE_CONNECTIONS, Connection
from app.health import noted
from app.leaving import Leaving, leave_now, unless
from app.loading import LoadingReport
from app.main import create_app
from app.metrics import Metrics
from app.settings import Settings
from model_runner.async_engine import AsyncEngine, EngineState
from model_runner.errors import StartupError
from model_runner.messages import ModelInfo
from model_runner.model_files import resolve
from model_runner.tokenizer import Tokenizer, load_tokenizer
from model_runner.types import Ending

# After the last request has ended: for answers that are still on their way to slow readers.
_FLUSH_SECONDS = 5
_KEEP_ALIVE_SECONDS = 65  # longer than the usual proxies' 60 s: they, and not we, close idle connections
# A client that reads nothing for so long is cut off: what has been made for it is kept in memory meanwhile.
_STALLED_SECONDS = 60
_OTHER_FILES = 128  # that the process may have open beside its connections: pipes, sockets, a model's files


def serve(settings: Settings) -> int:
    """Serve until a signal comes. Returns the exit code. Raises StartupError when it can't start."""
    logs.configure(settings.log_level, settings.log_format)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series of every counter and histogram
    try:
        sockets = bind(settings.host, settings.port)
        with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
            return runner.run(_serve(settings, sockets))
    except StartupError as error:
        if settings.log_format == "text":
            raise
        logs.event(error.message, level=logging.ERROR)
        return 1


async def _serve(settings: Settings, sockets: Sequence[socket.socket]) -> int:
    began = time.monotonic()
    leaving = Leaving()
    metrics = LoggingMetrics(settings)
    engine = AsyncEngine(settings.engine_config(), settings.door_policy(), metrics)
    try:
        with LoadingReport(settings) as report:
            planned = await unless(leaving.asked, _plan(engine, settings, report))
            if planned is None:
                await engine.close()
                leave_now("stopped while loading", 0)
            model, tokenizer = planned
            metrics.attach(engine)
            report.plan(settings, model)
            app = create_app(engine=engine, tokenizer=tokenizer, settings=settings, metrics=metrics)
            async with _listening(app, sockets, _room_for(settings.max_connections)):
                _warn_if_open_to_all(settings, sockets)
                await unless(leaving.asked, engine.wait_ready())
                report.close()
                if not leaving.asked.is_set():
                    load_seconds = round(time.monotonic() - began, 1)
                    logs.event(f"Plimsoll is ready on {url_of(sockets)}", load_seconds=load_seconds)
                if await unless(leaving.asked, _failure(engine)):
                    raise StartupError("the engine died, and a new one could not be started.")
                logs.event("draining", timeout_seconds=settings.shutdown_timeout)
                await unless(leaving.hurried, engine.drain(settings.shutdown_timeout))
                if leaving.hurried.is_set():
                    await engine.drain(0)
            if leaving.hurried.is_set():
                leave_now("stopped in a hurry", leaving.exit_code)
    finally:
        await engine.close()
    logs.event("stopped")
    return leaving.exit_code


async def _plan(
    engine: AsyncEngine, settings: Settings, report: LoadingReport
) -> tuple[ModelInfo, Tokenizer]:
    """Find the model, start the engine on it, and load the tokenizer meanwhile."""
    files = await asyncio.to_thread(resolve, settings.model, settings.cache_dir, report.stage)
    model, tokenizer = await asyncio.gather(
        engine.start(report.loading), asyncio.to_thread(load_tokenizer, files)
    )
    return model, tokenizer


async def _failure(engine: AsyncEngine) -> bool:
    """Returns, with True, when the engine is past hope. Whatever a new one can mend, it mends by itself."""
    while engine.state is not EngineState.FAILED:  # noqa: ASYNC110 - nobody is in a hurry to hear it
        await asyncio.sleep(0.5)
    return True


class LoggingMetrics(Metrics):
    """Counts every ending, and writes its line."""

    def ended(self, ending: Ending) -> None:
        super().ended(ending)
        logs.ending(ending)


# The listener


class _Server(uvicorn.Server):
    """Leaves the signals to us: uvicorn alone would close the listener at the first one."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _listening(
    app: FastAPI, sockets: Sequence[socket.socket], max_connections: int
) -> AsyncIterator[None]:
    """Open on entry; on exit, answers that are on their way get a few seconds to arrive."""
    config = uvicorn.Config(
        app,
        http=Connection,
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=max_connections,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(list(sockets)))
    while not server.started:
        await asyncio.sleep(0.005)
        if task.done() and (error := task.exception()) is not None:
            raise StartupError(f"cannot listen on {url_of(sockets)}: {error}.") from error
    try:
        with noted(sockets[0].getsockname()[:2]):
            yield
    finally:
        server.should_exit = True
        await task


def bind(host: str, port: int) -> list[socket.socket]:
    """Take the port on every address that `host` names, without listening yet. Port 0 takes any free one.

    Raises StartupError when the name is unknown or the port can't be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise StartupError(f"--host {host} is no address of this machine: {error.strerror}.") from None
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, _, _, _, address in dict.fromkeys(found):
        chosen = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_bound(family, (address[0], chosen, *address[2:])))
        except OSError as error:
            # `localhost` names ::1 also where IPv6 is switched off: one address that exists is enough.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise StartupError(_why_not(error, host, chosen)) from None
            missing = error
    if missing is not None and not sockets:
        raise StartupError(_why_not(missing, host, port))
    return sockets


def _room_for(connections: int) -> int:
    """How many of so many connections the system's limit of open files allows; it is raised where it may be.

    At the limit nothing could be accepted any more, not even a probe.
    """
    wanted = connections + SPARE_CONNECTIONS + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    room = max(soft - SPARE_CONNECTIONS - _OTHER_FILES, 1)
    may = f"this process may open {hard} files (ulimit -n)"
    logs.event(
        f"at most {room} connections are taken, not {connections}: {may}",
        level=logging.WARNING,
    )
    return room


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _STALLED_SECONDS)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use by another process; write --port {port + 1}, or 0 for any."
    if error.errno == errno.EACCES:
        return (
            f"port {port} needs privileges that this process lacks; write --port 8000, or any from 1024 up."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"--host {host} is no address of this machine; write 127.0.0.1, or 0.0.0.0 for every interface."
        )
    return f"cannot listen on {host}, port {port}: {error.strerror}."


def url_of(sockets: Sequence[socket.socket]) -> str:
    host, port = sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _warn_if_open_to_all(settings: Settings, sockets: Sequence[socket.socket]) -> None:
    addresses = [ipaddress.ip_address(each.getsockname()[0].partition("%")[0]) for each in sockets]
    if not settings.has_keys and not all(address.is_loopback for address in addresses):
        logs.event("whoever can reach the port can use it: no --api-key is set", level=logging.WARNING)
