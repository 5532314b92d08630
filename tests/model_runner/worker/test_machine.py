"""Containers are seen as their limits, in both versions of cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from model_runner.errors import StartupError
from model_runner.worker import machine

MIB = 1 << 20


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


def test_memory_of_a_cgroup_v2(tmp_path: Path) -> None:
    stat = f"anon {40 * MIB}\ninactive_file {30 * MIB}\n"
    write(tmp_path, memory__max=f"{200 * MIB}\n", memory__current=f"{100 * MIB}\n", memory__stat=stat)
    assert machine.available_memory_bytes(tmp_path) == 130 * MIB


def test_memory_of_a_cgroup_v1(tmp_path: Path) -> None:
    write(
        tmp_path / "memory",
        memory__limit_in_bytes=str(200 * MIB),
        memory__usage_in_bytes=str(100 * MIB),
        memory__stat=f"total_inactive_file {30 * MIB}\n",
    )
    assert machine.available_memory_bytes(tmp_path) == 130 * MIB


def test_a_cgroup_over_its_limit_has_nothing_available(tmp_path: Path) -> None:
    write(tmp_path, memory__max="100", memory__current="150", memory__stat="inactive_file 10\n")
    assert machine.available_memory_bytes(tmp_path) == 0


@pytest.mark.parametrize("limit", ["max\n", f"{(1 << 63) - 4096}"])
def test_no_limit_leaves_the_system_s_memory(tmp_path: Path, limit: str) -> None:
    write(tmp_path, memory__max=limit)
    available = machine.available_memory_bytes(tmp_path)
    assert abs(available - psutil.virtual_memory().available) < 1 << 30


def test_threads_follow_the_cpu_quota(tmp_path: Path) -> None:
    write(tmp_path, cpu__max="50000 100000\n")
    assert machine.choose_num_threads(None, tmp_path) == 1
    cpus = len(os.sched_getaffinity(0))
    assert machine.choose_num_threads(cpus, tmp_path) == cpus  # asked for: the quota is the asker's affair
    with pytest.raises(StartupError, match=f"--num-threads is {cpus + 1}.*Write at most {cpus}"):
        machine.choose_num_threads(cpus + 1, tmp_path)
    write(tmp_path, cpu__max="max 100000\n")
    assert machine.choose_num_threads(None, tmp_path) >= 1


def test_threads_follow_a_v1_quota(tmp_path: Path) -> None:
    write(tmp_path / "cpu", cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
    assert machine.choose_num_threads(None, tmp_path) == 1


def test_cpu_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n")
    assert machine.cpu_flags(cpuinfo) == {"fpu", "avx2", "avx512_bf16"}
    assert machine.cpu_flags(tmp_path / "absent") == set()


def test_dtype() -> None:
    cuda, cpu = torch.device("cuda:0"), torch.device("cpu")
    assert machine.choose_dtype("float16", cpu, torch.float32) is torch.float16
    assert machine.choose_dtype("auto", cuda, torch.float16) is torch.float16
    assert machine.choose_dtype("auto", cuda, torch.float32) is torch.bfloat16
    assert machine.choose_dtype("auto", cpu, torch.bfloat16) in (torch.bfloat16, torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    assert machine.choose_device("auto") == torch.device("cpu")
    with pytest.raises(StartupError, match="Use --device cpu"):
        machine.choose_device("cuda:0")
