"""What the machine gives: read bandwidth, and who used the processors meanwhile."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

_BYTES = 512 * 2**20  # far more than any cache holds
_PASSES = 8


def read_bandwidth(threads: int | None = None) -> float:
    """Bytes per second that `threads` (one for each core, when None) read from memory together: the best of
    a few passes.

    The reader is the C library's memchr, looking in vain: vectorised, and only reads.
    """
    count = threads or len(os.sched_getaffinity(0))
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    memchr.restype = ctypes.c_void_p
    size = _BYTES // count
    buffers = [(ctypes.c_char * size)() for _ in range(count)]
    for buffer in buffers:  # untouched pages would all be one page of zeros, read from the cache
        ctypes.memset(buffer, 1, size)
    best = 0.0
    for _ in range(_PASSES):
        readers = [
            threading.Thread(target=memchr, args=(ctypes.addressof(buffer), 0, size)) for buffer in buffers
        ]
        began = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        best = max(best, count * size / (time.perf_counter() - began))
    return best


def weights_bytes(base_url: str) -> int | None:
    """What the server's metrics say that a decode step reads of its weights; None when they say nothing."""
    try:
        page = httpx.get(f"{base_url}/metrics", timeout=10)
    except httpx.HTTPError:
        return None
    if page.status_code != 200:
        return None
    for family in text_string_to_metric_families(page.text):
        if family.name == "plimsoll_model_weights_read_bytes":
            return int(family.samples[0].value)
    return None


@dataclass(slots=True)
class Shares:
    """Processor time over elapsed time: 1.0 is one core. None: it is on another machine, or out of sight."""

    generator: float
    api: float | None
    engine: float | None


class ProcessorMeter:
    """Since it was made: the shares of this process, of the local server's, and of that one's children."""

    def __init__(self, base_url: str) -> None:
        self._generator = psutil.Process()
        self._server = _listener(base_url)
        self._began = time.perf_counter()
        self._before = self._used()

    def read(self) -> Shares:
        elapsed = time.perf_counter() - self._began
        shares = [
            None if before is None or now is None else (now - before) / elapsed
            for before, now in zip(self._before, self._used(), strict=True)
        ]
        assert shares[0] is not None
        return Shares(shares[0], shares[1], shares[2])

    def _used(self) -> tuple[float | None, float | None, float | None]:
        mine = _seconds(self._generator)
        if self._server is None:
            return mine, None, None
        try:
            children = self._server.children(recursive=True)
            return mine, _seconds(self._server), sum(_seconds(child) for child in children)
        except psutil.Error:  # it ended meanwhile
            return mine, None, None


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _listener(base_url: str) -> psutil.Process | None:
    """The process on this machine that listens where the URL points."""
    parts = urlsplit(base_url)
    if parts.hostname not in ("127.0.0.1", "::1", "localhost"):
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    pids = [each.pid for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port]
    return psutil.Process(pids[0]) if pids and pids[0] else None
