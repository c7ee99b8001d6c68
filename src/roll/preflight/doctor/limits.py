"""System limits of a process: shared memory, open files, processes, threads."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from roll.preflight.doctor.finding import Finding, gib, ok, problem, warning
from roll.preflight.doctor.host import available_cores

__all__ = ["examine"]

SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_MEMORY = 2**30
"""A container's default is 64 MiB. Weights need no shared memory; NCCL on one machine and Ray's objects do."""
ENOUGH_FILES = 4096
"""Open files for sockets of engines, workers and Ray's actors."""
ENOUGH_PROCESSES = 4096
"""Processes, including threads."""
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_MAX_TASKS = Path("/sys/fs/cgroup/pids.max")
_INFINIBAND = Path("/sys/class/infiniband")


def examine() -> Iterator[Finding]:
    """Yield the findings of this section."""
    yield _shared_memory()
    yield _open_files()
    yield _processes()
    yield _overcommit()
    if _INFINIBAND.is_dir():
        yield _locked_memory()
    yield _threads()


def _shared_memory() -> Finding:
    name = "shared memory"
    try:
        use = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        return problem(name, f"{SHARED_MEMORY}: {error.strerror}", "mount a tmpfs there: Ray and NCCL need it.")
    found = f"{SHARED_MEMORY}: {gib(use.free)} of {gib(use.total)} free"
    if use.free >= ENOUGH_SHARED_MEMORY:
        return ok(name, found)
    advice = (
        "Ray and NCCL keep data there: give a container `--shm-size=16g` (Kubernetes: an emptyDir of medium Memory), "
        f"or `mount -o remount,size=16G {SHARED_MEMORY}`."
    )
    return warning(name, found, advice)


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _enough(limit: int, enough: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= enough


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_shown(soft)} (up to {_shown(hard)})"
    if _enough(soft, ENOUGH_FILES):
        return ok("open files", found)
    if _enough(hard, ENOUGH_FILES):
        advice = f"many engines or Ray actors need more: ulimit -n {min(hard, 65536) if hard > 0 else 65536}."
    else:
        advice = "raise `nofile` in /etc/security/limits.conf, or give a container `--ulimit nofile=65536`."
    return warning("open files", found, advice)


def _processes() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    try:
        in_group: int | None = int(_MAX_TASKS.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        in_group = None
    found = f"{_shown(soft)} (up to {_shown(hard)})" + (f", {in_group:,} in this control group" if in_group else "")
    if in_group is not None and in_group < ENOUGH_PROCESSES:
        return warning("processes", found, "threads count: give a container `--pids-limit=-1`, or raise TasksMax.")
    if not _enough(soft, ENOUGH_PROCESSES):
        return warning("processes", found, "threads count: ulimit -u 65536, or raise `nproc` in limits.conf.")
    return ok("processes", found)


def _overcommit() -> Finding:
    mode = _OVERCOMMIT.read_text().strip() if _OVERCOMMIT.is_file() else "0"
    if mode == "2":
        return warning(
            "overcommit",
            "vm.overcommit_memory=2",
            "forks of a large process are refused then: sysctl vm.overcommit_memory=0.",
        )
    return ok("overcommit", f"vm.overcommit_memory={mode}")


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    return warning("locked memory", gib(soft), "InfiniBand registers memory: ulimit -l unlimited.")


def _threads() -> Finding:
    """Check whether the user's thread variables differ from what `prepare_environment` would choose."""
    cores = max(1, int(available_cores()))
    number, policy = os.environ.get("OMP_NUM_THREADS", ""), os.environ.get("OMP_WAIT_POLICY", "passive")
    found = f"OMP_NUM_THREADS {number or 'not set'}, OMP_WAIT_POLICY={policy}"
    if policy.lower() != "passive":
        return warning("threads", found, "threads that spin take the engine's cores: unset OMP_WAIT_POLICY.")
    if number.isdigit() and int(number) > cores:
        return warning("threads", found, f"more threads than the {cores} cores here: unset OMP_NUM_THREADS.")
    if number.isdigit() and int(number) < cores:
        return warning("threads", found, f"{cores} cores are here, and libraries use {number}: unset OMP_NUM_THREADS.")
    return ok("threads", found)
