"""What can be found out about this machine without importing torch (vLLM: vllm/platforms)."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_NVIDIA_DRIVER = Path("/dev/nvidiactl")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def detect_device() -> tuple[str, str]:
    """(`cuda` or `cpu`, what decided)."""
    if not _NVIDIA_DRIVER.exists():
        return "cpu", "no NVIDIA driver"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "cpu", "CUDA_VISIBLE_DEVICES hides every GPU"
    try:
        if version("torch").endswith("+cpu"):
            return "cpu", "torch is built without CUDA"
    except PackageNotFoundError:
        pass  # a torch that was not installed as a package tells nothing about how it was built
    return "cuda", str(_NVIDIA_DRIVER)


def available_cores() -> int:
    """CPU cores that this process may use: its affinity mask, cut by the container's quota, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    except (OSError, ValueError):
        pass  # no cgroup v2 here
    return max(1, cores)
