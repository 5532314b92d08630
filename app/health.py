"""`plimsoll health`: whether the server that runs here answers, wherever it was told to listen.

A server that listens leaves its address in a file under the folder for temporary files, and holds a lock on
it as long as it lives: the lock goes with the process, however that ends, so that a dead server's file is
known. It is asked over HTTP without TLS, which is all that it speaks, and past any proxy.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import http.client
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from app import logs

Address: TypeAlias = tuple[str, int]

_ANSWER_SECONDS = 2.0
# What stands for every interface is no address to ask at.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def health(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 when every server of this user that runs here answers, and there is one."""
    parser = argparse.ArgumentParser(
        prog="plimsoll health",
        description="Ask the server that runs here, as this user, whether it is well. Exits with 0 or 1.",
        allow_abbrev=False,
    )
    parser.add_argument("--ready", action="store_true", help="ask whether its engine makes progress too")
    path = "/readyz" if parser.parse_args(argv).ready else "/healthz"
    found = addresses()
    if not found:
        where = _folder()
        print(f"plimsoll: no server of this user listens here (none is noted in {where})", file=sys.stderr)
        return 1
    return max(_ask(address, path) for address in found)


def _ask(address: Address, path: str) -> int:
    connection = http.client.HTTPConnection(*address, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        told = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        print(f"plimsoll: no answer from {address[0]} port {address[1]}: {error!r}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    print(f"{address[0]} port {address[1]}: {told}")
    return 0 if answer.status == 200 else 1


# The notes


@contextlib.contextmanager
def noted(address: Address) -> Iterator[None]:
    """While it lasts, `plimsoll health` finds this server. That it can't is no reason not to serve."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_note(address))
        except OSError as error:
            logs.event(f"`plimsoll health` won't find this server: {error}", level=logging.WARNING)
        yield


@contextlib.contextmanager
def _note(address: Address) -> Iterator[None]:
    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(folder):
        raise PermissionError(f"{folder} is not this user's own")
    addresses()  # what servers that were killed have left behind
    descriptor, temporary = tempfile.mkstemp(dir=folder)
    path = Path(temporary + ".json")
    with open(descriptor, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        host, port = address
        json.dump({"pid": os.getpid(), "host": _LOOPBACK.get(host, host), "port": port}, file)
        file.flush()
        os.rename(temporary, path)  # it is never seen unlocked or unfinished
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def addresses() -> list[Address]:
    """Of this user's servers that live. The notes of those that don't are removed."""
    folder = _folder()
    if not _is_ours(folder):
        return []
    found = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                noted = json.load(file)
                found.append((str(noted["host"]), int(noted["port"])))
            else:
                path.unlink(missing_ok=True)
    return found


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"plimsoll-{os.geteuid()}"


def _is_ours(folder: Path) -> bool:
    """Another user of the machine could have made it, to have us ask, or write, where they like."""
    try:
        about = folder.lstat()
    except FileNotFoundError:
        return False
    return folder.is_dir() and not folder.is_symlink() and about.st_uid == os.geteuid()
