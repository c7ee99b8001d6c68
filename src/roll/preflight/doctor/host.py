"""Checks of CPU, memory and accelerators."""

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

from roll.preflight.doctor.finding import Finding, format_gib, report_ok, report_problem, report_warning
from roll.preflight.machine import QUERY_TIMEOUT_S, Machine, inspect_machine

__all__ = ["count_available_cores", "examine"]

MIN_MEMORY_BYTES = 8 * 2**30
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_CPU_MAX_FILE = Path("/sys/fs/cgroup/cpu.max")
_TORCH_QUERY = """
import json, torch, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    available = torch.accelerator.is_available()
devices = torch.get_device_module() if available else None
print(json.dumps({
    "names": [devices.get_device_name(i) for i in range(torch.accelerator.device_count())] if available else [],
    "built_for": torch.version.cuda or torch.version.hip or "",
    "warnings": [str(each.message) for each in caught],
}))
"""


def examine() -> Iterator[Finding]:
    """Check operating system, CPU, memory and accelerators, and yield the findings."""
    machine = inspect_machine()
    yield _check_system()
    yield _check_processor(machine)
    yield _check_memory(machine)
    yield _check_accelerators(machine)


def count_available_cores() -> float:
    """Return the number of cores that this process may use, within its affinity and its container's quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = _CPU_MAX_FILE.read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def _check_system() -> Finding:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() != "Linux":
        return report_problem("system", found, "ROLL runs on Linux: use a container, a virtual machine, or WSL 2.")
    if platform.machine() != "x86_64":
        return report_warning(
            "system", found, "ROLL is tested on x86-64 only: vLLM's CPU build and sandboxes may not work here."
        )
    return report_ok("system", found)


def _check_processor(machine: Machine) -> Finding:
    cores = count_available_cores()
    has = [flag for flag in CPU_FLAGS if flag in _read_cpu_flags()]
    found = f"{cores:g} of {machine.num_cores} cores, {', '.join(has) or 'no AVX2'}"
    if cores < machine.num_cores:
        threads = max(1, int(cores))
        if os.environ.get("OMP_NUM_THREADS") == str(threads):
            return report_ok("processor", found)
        return report_warning(
            "processor",
            found,
            "a container or scheduler limits the cores, but libraries would start one thread per core of the machine: "
            f"export OMP_NUM_THREADS={threads}.",
        )
    if not has and platform.machine() == "x86_64":
        return report_warning("processor", found, "matmuls are slow without AVX2: train on another CPU.")
    if has == ["avx2"]:
        # oneDNN has bfloat16 kernels only for AVX-512 and AMX. Two cores with AVX2 reach 0.9 to 1.3 GFLOP/s in
        # bfloat16, and 123 to 143 GFLOP/s in float32 (PyTorch 2.13, square matrices of 1,024 and 512).
        return report_warning(
            "processor",
            found,
            "without AVX-512, bfloat16 matmuls are about 100 times slower than float32 matmuls: set "
            "model.dtype=float32, or train on another CPU.",
        )
    return report_ok("processor", found)


def _read_cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _check_memory(machine: Machine) -> Finding:
    found = f"{format_gib(machine.memory_bytes)} free"
    if machine.memory_bytes < MIN_MEMORY_BYTES:
        return report_warning(
            "memory",
            found,
            f"the quickstart needs {format_gib(MIN_MEMORY_BYTES)}: end other programs, or see docs/memory.md.",
        )
    return report_ok("memory", found)


def _check_accelerators(machine: Machine) -> Finding:
    driver, torch = _read_driver_version(), _query_torch()
    if torch is None:
        return report_problem("accelerators", "PyTorch cannot be imported", "install PyTorch: see `packages` below.")
    if machine.accelerator_bytes:
        devices = [
            f"{name} ({format_gib(free)} free)"
            for name, free in zip(torch["names"], machine.accelerator_bytes, strict=False)
        ]
        return report_ok(
            "accelerators", f"{len(devices)}: {', '.join(devices)}" + (f"; driver {driver}" if driver else "")
        )
    hidden = next((name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in os.environ), None)
    if driver and not torch["built_for"]:
        return report_warning(
            "accelerators",
            f"a driver ({driver}), but this PyTorch build supports only CPUs",
            "install a CUDA build of PyTorch, with the index address from its installation page.",
        )
    if driver and hidden:
        return report_warning(
            "accelerators",
            f"a driver ({driver}), and {hidden}={os.environ[hidden]!r}",
            f"unset {hidden} to use the accelerators.",
        )
    if driver:
        reason = torch["warnings"][0].splitlines()[0] if torch["warnings"] else "PyTorch finds no accelerator"
        return report_problem(
            "accelerators",
            f"a driver ({driver}), but {reason}",
            f"PyTorch is built for CUDA {torch['built_for']}: update the driver, or install a build for an older CUDA.",
        )
    return report_ok("accelerators", "none: runs use the CPU")


def _read_driver_version() -> str:
    """Return the version of the NVIDIA driver, from `nvidia-smi`; empty if there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        completed = subprocess.run(
            [tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return completed.stdout.split("\n")[0].strip() if completed.returncode == 0 else ""


def _query_torch() -> dict[str, Any] | None:
    try:
        completed = subprocess.run(
            [sys.executable, "-c", _TORCH_QUERY], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S
        )
        return json.loads(completed.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
