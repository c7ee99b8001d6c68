"""Checks of system limits: shared memory, open files, processes, threads."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from roll.preflight.doctor.finding import Finding, format_gib, report_ok, report_problem, report_warning
from roll.preflight.doctor.host import count_available_cores

__all__ = ["examine"]

SHARED_MEMORY_DIRECTORY = Path("/dev/shm")
MIN_SHARED_MEMORY_BYTES = 2**30
"""Sufficient shared memory for NCCL on one machine and Ray's object store; a container's default is 64 MiB."""
MIN_FILES = 4096
"""Sufficient number of open files, for sockets of engines, workers and Ray's actors."""
MIN_PROCESSES = 4096
"""Sufficient number of processes, including threads."""
_OVERCOMMIT_FILE = Path("/proc/sys/vm/overcommit_memory")
_MAX_TASKS_FILE = Path("/sys/fs/cgroup/pids.max")
_INFINIBAND_DIRECTORY = Path("/sys/class/infiniband")


def examine() -> Iterator[Finding]:
    """Check limits on shared memory, files, processes and threads, and yield the findings."""
    yield _check_shared_memory()
    yield _check_open_files()
    yield _check_processes()
    yield _check_overcommit()
    if _INFINIBAND_DIRECTORY.is_dir():
        yield _check_locked_memory()
    yield _check_thread_variables()


def _check_shared_memory() -> Finding:
    name = "shared memory"
    try:
        use = shutil.disk_usage(SHARED_MEMORY_DIRECTORY)
    except OSError as error:
        return report_problem(
            name, f"{SHARED_MEMORY_DIRECTORY}: {error.strerror}", "mount a tmpfs there: Ray and NCCL require it."
        )
    found = f"{SHARED_MEMORY_DIRECTORY}: {format_gib(use.free)} of {format_gib(use.total)} free"
    if use.free >= MIN_SHARED_MEMORY_BYTES:
        return report_ok(name, found)
    advice = (
        "Ray and NCCL store data there: start a container with `--shm-size=16g` (Kubernetes: an emptyDir of medium "
        f"Memory), or `mount -o remount,size=16G {SHARED_MEMORY_DIRECTORY}`."
    )
    return report_warning(name, found, advice)


def _format_limit(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _is_sufficient(limit: int, minimum: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= minimum


def _check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_format_limit(soft)} (up to {_format_limit(hard)})"
    if _is_sufficient(soft, MIN_FILES):
        return report_ok("open files", found)
    if _is_sufficient(hard, MIN_FILES):
        number = min(hard, 65536) if hard > 0 else 65536  # RLIM_INFINITY is -1
        advice = f"many engines or Ray actors require more open files: ulimit -n {number}."
    else:
        advice = "raise `nofile` in /etc/security/limits.conf, or start the container with `--ulimit nofile=65536`."
    return report_warning("open files", found, advice)


def _check_processes() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    try:
        in_group: int | None = int(_MAX_TASKS_FILE.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        in_group = None
    found = f"{_format_limit(soft)} (up to {_format_limit(hard)})" + (
        f", {in_group:,} in this control group" if in_group else ""
    )
    if in_group is not None and in_group < MIN_PROCESSES:
        return report_warning(
            "processes",
            found,
            "threads count as processes: start the container with `--pids-limit=-1`, or raise TasksMax.",
        )
    if not _is_sufficient(soft, MIN_PROCESSES):
        return report_warning(
            "processes", found, "threads count as processes: ulimit -u 65536, or raise `nproc` in limits.conf."
        )
    return report_ok("processes", found)


def _check_overcommit() -> Finding:
    mode = _OVERCOMMIT_FILE.read_text().strip() if _OVERCOMMIT_FILE.is_file() else "0"
    if mode == "2":
        return report_warning(
            "overcommit",
            "vm.overcommit_memory=2",
            "in this mode, forks of a large process fail: sysctl vm.overcommit_memory=0.",
        )
    return report_ok("overcommit", f"vm.overcommit_memory={mode}")


def _check_locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return report_ok("locked memory", "unlimited")
    return report_warning("locked memory", format_gib(soft), "InfiniBand registers memory: ulimit -l unlimited.")


def _check_thread_variables() -> Finding:
    """Check the environment variables of thread pools, such as OMP_NUM_THREADS, against the available cores."""
    cores = max(1, int(count_available_cores()))
    number, policy = os.environ.get("OMP_NUM_THREADS", ""), os.environ.get("OMP_WAIT_POLICY", "passive")
    found = f"OMP_NUM_THREADS {number or 'not set'}, OMP_WAIT_POLICY={policy}"
    if policy.lower() != "passive":
        return report_warning("threads", found, "waiting threads occupy the engine's cores: unset OMP_WAIT_POLICY.")
    if number.isdigit() and int(number) > cores:
        return report_warning(
            "threads", found, f"there are more threads than the {cores} available cores: unset OMP_NUM_THREADS."
        )
    if number.isdigit() and int(number) < cores:
        return report_warning(
            "threads", found, f"libraries use only {number} of {cores} available cores: unset OMP_NUM_THREADS."
        )
    return report_ok("threads", found)
