"""`plimsoll health` finds the server by itself, and knows a dead one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app import health
from tests.app.test_serve import Running


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No other server of this machine's is found."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / f"plimsoll-{os.geteuid()}"


def asked(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app", "health", *argv]
    env = {**os.environ, "http_proxy": "http://127.0.0.1:9", "PLIMSOLL_PORT": "9"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "127.0.0.2", "localhost"])
def test_it_finds_the_server_wherever_that_listens(host: str, folder: Path) -> None:
    server = Running("--host", host)
    try:
        port = server.url().rpartition(":")[2]
        answer = asked()
        assert answer.returncode == 0, answer.stderr
        assert f"port {port}" in answer.stdout
        assert asked("--ready").returncode == 0
        assert os.stat(folder).st_mode & 0o777 == 0o700
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
        assert list(folder.iterdir()) == []
    finally:
        server.close()


def test_a_killed_server_is_known_to_be_dead_and_a_silent_one_is_not_well(folder: Path) -> None:
    server = Running()
    try:
        server.url()
        server.process.send_signal(signal.SIGSTOP)
        silent = asked()
        assert (silent.returncode, "no answer from 127.0.0.1" in silent.stderr) == (1, True)
        server.process.send_signal(signal.SIGKILL)
        server.ended()
        assert len(list(folder.iterdir())) == 1
        dead = asked()
        assert (dead.returncode, "no server of this user" in dead.stderr) == (1, True)
        assert list(folder.iterdir()) == []
    finally:
        server.close()


def test_loading_is_well_but_not_ready() -> None:
    server = Running(knobs={"load_seconds": 60})
    try:
        server.listening()
        assert asked().returncode == 0
        not_ready = asked("--ready")
        assert (not_ready.returncode, '"starting"' in not_ready.stdout) == (1, True)
    finally:
        server.close()


def test_of_two_both_must_be_well() -> None:
    with health.noted(("127.0.0.1", 8000)), health.noted(("::", 8001)):
        assert sorted(health.addresses()) == [("127.0.0.1", 8000), ("::1", 8001)]
    assert health.addresses() == []


def test_a_folder_that_another_has_planted_is_left_alone(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    folder.symlink_to(theirs)
    with caplog.at_level("WARNING"), health.noted(("127.0.0.1", 8000)):
        assert list(theirs.iterdir()) == []
    assert "won't find this server" in caplog.text
