"""Processor, memory and accelerators."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.preflight.doctor.finding import Finding, gib, ok, problem, warning
from roll.preflight.machine import ASK_TIMEOUT_S, Machine, inspect_machine

__all__ = ["available_cores", "examine"]

ENOUGH_MEMORY = 8 * 2**30
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_ASK = """
import json, torch, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    there = torch.accelerator.is_available()
devices = torch.get_device_module() if there else None
print(json.dumps({
    "names": [devices.get_device_name(i) for i in range(torch.accelerator.device_count())] if there else [],
    "built_for": torch.version.cuda or torch.version.hip or "",
    "said": [str(each.message) for each in said],
}))
"""


def examine() -> Iterator[Finding]:
    """Yield the findings of this section."""
    machine = inspect_machine()
    yield _system()
    yield _processor(machine)
    yield _memory(machine)
    yield _accelerators(machine)


def available_cores() -> float:
    """Return the cores that this process may use: fewer than exist if affinity or a container's quota limits them."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = _CPU_MAX.read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def _system() -> Finding:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() != "Linux":
        return problem("system", found, "ROLL runs on Linux: use a container, a virtual machine, or WSL 2.")
    if platform.machine() != "x86_64":
        return warning("system", found, "tested on x86-64 alone: vLLM's CPU build and sandboxes may be missing here.")
    return ok("system", found)


def _processor(machine: Machine) -> Finding:
    cores = available_cores()
    has = [flag for flag in FLAGS if flag in _cpu_flags()]
    found = f"{cores:g} of {machine.num_cores} cores, {', '.join(has) or 'no AVX2'}"
    if cores < machine.num_cores:
        threads = max(1, int(cores))
        if os.environ.get("OMP_NUM_THREADS") == str(threads):
            return ok("processor", found)
        return warning(
            "processor",
            found,
            f"a container or a scheduler gives fewer cores than libraries count: export OMP_NUM_THREADS={threads}.",
        )
    if not has and platform.machine() == "x86_64":
        return warning("processor", found, "matrix products are slow here: train on another processor.")
    return ok("processor", found)


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _memory(machine: Machine) -> Finding:
    found = f"{gib(machine.memory_bytes)} free"
    if machine.memory_bytes < ENOUGH_MEMORY:
        return warning(
            "memory", found, f"the quickstart wants {gib(ENOUGH_MEMORY)}: end other programs, or see docs/memory.md."
        )
    return ok("memory", found)


def _accelerators(machine: Machine) -> Finding:
    driver, torch = _driver(), _ask_torch()
    if torch is None:
        return problem("accelerators", "PyTorch cannot be imported", "install it: see `packages` below.")
    if machine.accelerator_bytes:
        devices = [
            f"{name} ({gib(free)} free)" for name, free in zip(torch["names"], machine.accelerator_bytes, strict=False)
        ]
        return ok("accelerators", f"{len(devices)}: {', '.join(devices)}" + (f"; driver {driver}" if driver else ""))
    hidden = next((name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in os.environ), None)
    if driver and not torch["built_for"]:
        return warning(
            "accelerators",
            f"a driver ({driver}), but this PyTorch is built for the CPU",
            "install a CUDA build of PyTorch, with the index address from its installation page.",
        )
    if driver and hidden:
        return warning(
            "accelerators", f"a driver ({driver}), and {hidden}={os.environ[hidden]!r}", f"unset {hidden} to use them."
        )
    if driver:
        said = torch["said"][0].splitlines()[0] if torch["said"] else "PyTorch finds none"
        return problem(
            "accelerators",
            f"a driver ({driver}), but {said}",
            f"PyTorch is built for CUDA {torch['built_for']}: update the driver, or install a build for an older CUDA.",
        )
    return ok("accelerators", "none: runs use the CPU")


def _driver() -> str:
    """Return the version of the NVIDIA driver from its command-line tool; empty if there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        asked = subprocess.run(
            [tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.split("\n")[0].strip() if asked.returncode == 0 else ""


def _ask_torch() -> dict[str, Any] | None:
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
        return json.loads(asked.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
