"""What this machine has: cores, memory, and the number formats it is fast in. A container is its limits."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import psutil
import torch

from model_runner.errors import StartupError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FAST_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # "bf16" is ARM's name
_CGROUP = Path("/sys/fs/cgroup")
# cgroup v1 writes "no limit" as a number near 2**63.
_NO_LIMIT = 1 << 60


def has_amx() -> bool:
    """Whether the CPU multiplies tiles of bfloat16 (Intel's AMX)."""
    return "amx_bf16" in cpu_flags()


def choose_device(device: str) -> torch.device:
    """`auto` is the first CUDA device, or the CPU. Raises StartupError for a device that isn't there."""
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise StartupError(
            f"--device {device}: this machine (or this build of torch) has no CUDA device. Use --device cpu."
        )
    chosen = torch.device("cuda:0" if device == "cuda" else device)
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise StartupError(
            f"--device {device}: there are {torch.cuda.device_count()} CUDA devices, counted from 0."
        )
    return chosen


def choose_dtype(dtype: str, device: torch.device, model_dtype: Any) -> torch.dtype:
    """`auto` is the checkpoint's half format on CUDA; on a CPU, bfloat16 where that is fast, else float32."""
    if dtype != "auto":
        return _DTYPES[dtype]
    if device.type == "cuda":
        return model_dtype if model_dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    return torch.bfloat16 if cpu_flags() & _FAST_BFLOAT16_FLAGS else torch.float32


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets of the first core, as Linux names them; empty where that can't be read."""
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def choose_num_threads(num_threads: int | None, cgroup: Path = _CGROUP) -> int:
    """The physical cores this process may use, no more than the container's CPU quota.

    Raises StartupError for more threads than there are CPUs: they would wait for each other in every product.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    if num_threads is not None:
        if num_threads > len(allowed):
            raise StartupError(
                f"--num-threads is {num_threads}, and this process may use {len(allowed)} CPUs. "
                f"Write at most {len(allowed)}, or leave it out."
            )
        return num_threads
    cores = len({_core_of(cpu) for cpu in allowed})
    quota = _cpu_quota(cgroup)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _core_of(cpu: int) -> str:
    """A name for the physical core of a logical CPU: the list of its hyper-threads."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return siblings.read_text().strip() if siblings.exists() else str(cpu)


def _cpu_quota(cgroup: Path) -> float | None:
    """In CPUs, from cgroup v2 or v1, or None when unlimited."""
    v2 = cgroup / "cpu.max"
    if v2.exists():
        quota, period = v2.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    v1 = cgroup / "cpu" / "cpu.cfs_quota_us"
    if v1.exists() and (micros := int(v1.read_text())) > 0:
        return micros / int(v1.with_name("cpu.cfs_period_us").read_text())
    return None


def describe_machine(model_dtype: Any) -> dict[str, Any]:
    """What a server would find here: {"device", "on_cpu", "memory_bytes", "dtype"}. A CPU's memory is what is
    available; a GPU's is all of it. `model_dtype` is what the model's configuration says."""
    device = choose_device("auto")
    dtype = str(choose_dtype("auto", device, model_dtype)).removeprefix("torch.")
    on_cpu = device.type == "cpu"
    total = available_memory_bytes() if on_cpu else torch.cuda.mem_get_info(device)[1]
    return {"device": str(device), "on_cpu": on_cpu, "memory_bytes": total, "dtype": dtype}


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """What may still be allocated: the system's available memory, or the container's limit less its use."""
    available: int = psutil.virtual_memory().available
    limit, used = _cgroup_memory(cgroup)
    return available if limit is None else max(0, min(available, limit - used))


def _cgroup_memory(cgroup: Path) -> tuple[int | None, int]:
    """(limit or None, bytes in use that can't be reclaimed), from cgroup v2 or v1."""
    for folder, limit_name, usage_name, cache_name in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if not (folder / limit_name).exists():
            continue
        written = (folder / limit_name).read_text().strip()
        if written == "max" or int(written) >= _NO_LIMIT:
            return None, 0
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(written), max(0, usage - int(stat.get(cache_name, 0)))
    return None, 0
