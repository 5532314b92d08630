"""An engine whose parent has died."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


def test_an_engine_whose_parent_dies_exits(tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(
        f"""
import asyncio, sys
from model_runner.async_engine import AsyncEngine
from model_runner.door import DoorPolicy
from model_runner.config import EngineConfig

async def main():
    config = EngineConfig(model='{{}}', cache_dir='', kv_cache_memory_bytes=1 << 20)
    engine = AsyncEngine(config, DoorPolicy(), None, command=[sys.executable, {str(FAKE_ENGINE)!r}])
    await engine.start(lambda loading: None)
    await engine.wait_ready()
    print(engine.engine_pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
    )
    with subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        engine_pid = int(process.stdout.readline())
        assert psutil.pid_exists(engine_pid)
        process.kill()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(engine_pid) and psutil.Process(engine_pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine has outlived its parent"
        time.sleep(0.02)
