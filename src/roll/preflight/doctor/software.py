"""Checks of Python packages, engines, backends, compilers and sandboxes."""

from __future__ import annotations

import asyncio
import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from itertools import starmap

from packaging.requirements import Requirement

from roll.inference import ENGINES, LazyEngine, resolve_engine_kind
from roll.preflight.doctor.finding import Finding, report_ok, report_problem, report_warning
from roll.version import DISTRIBUTION, __version__, build_install_command
from roll_sandbox import RollSandboxError, Runtime

__all__ = ["examine", "read_versions"]

START_TIMEOUT_S = 30.0
"""Timeout for a sandbox to start, or for Docker to respond."""
_OPTIONAL_PACKAGES = (
    ("ray", "ray", "`cluster.type: ray` (several ranks or machines)"),
    ("deepspeed", "deepspeed", "`training.backend: deepspeed`"),
    ("megatron-core", "megatron", "`training.backend: megatron`"),
)
"""Optional distributions: name, the extra that installs it, and the settings that need it."""


def read_versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes of a run; empty for a package that is not installed."""
    return {
        DISTRIBUTION: __version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        **{name: _read_version(name) for name in ("torch", "transformers", "ray", "numpy")},
    }


def examine() -> Iterator[Finding]:
    """Check Python packages, engines, compilers and sandboxes, and yield the findings."""
    yield report_ok("python", f"{platform.python_version()}, {sys.prefix}")
    yield report_ok(DISTRIBUTION, __version__)
    yield _check_packages()
    yield _check_engine()
    yield from starmap(_check_optional, _OPTIONAL_PACKAGES)
    yield _check_compiler()
    yield from _check_sandboxes()


def _read_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _check_packages() -> Finding:
    try:
        written = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return report_warning(
            "packages", f"{DISTRIBUTION} is not installed; the source tree is used", "pip install -e ."
        )
    needed = map(Requirement, written)
    required = [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    wrong = [each for each in required if not _is_satisfied(each)]
    if not wrong:
        return report_ok("packages", f"all {len(required)} as required; torch {_read_version('torch')}")
    listing = ", ".join(
        f"{each.name} {_read_version(each.name) or 'missing'} (requires {each.specifier})" for each in wrong
    )
    install = " ".join(f"'{each.name}{each.specifier}'" for each in wrong)
    return report_problem("packages", listing, f"pip install {install}")


def _is_satisfied(requirement: Requirement) -> bool:
    found = _read_version(requirement.name)
    return bool(found) and requirement.specifier.contains(found, prereleases=True)


def _check_engine() -> Finding:
    kind = resolve_engine_kind("auto")
    found, others = ENGINES.get(kind), [name for name in ENGINES if name not in ENGINES.built_in_names]
    version = found.version if isinstance(found, LazyEngine) else ""
    also = f"; installed packages add {', '.join(others)}" if others else ""
    faster = list(ENGINES.built_in_names[: ENGINES.built_in_names.index(kind)])
    hint = f"{faster[0]} generates faster: {build_install_command(faster[0])}" if faster else ""
    return report_ok("engine", (version or f"{kind}, which is built in") + also, hint)


def _check_optional(distribution: str, name: str, purpose: str) -> Finding:
    found = _read_version(distribution)
    return report_ok(distribution, found or f"not installed; required for {purpose}: {build_install_command(name)}")


def _check_compiler() -> Finding:
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        return report_warning(
            "compiler",
            "none",
            "training on a CPU is slower without a compiler: install gcc, and python3-dev for vLLM.",
        )
    return report_ok("compiler", found)


def _check_sandboxes() -> Iterator[Finding]:
    from roll_sandbox.bubblewrap import BubblewrapRuntime
    from roll_sandbox.docker import DockerRuntime

    reason = asyncio.run(_try_runtime(BubblewrapRuntime()))
    if reason:
        yield report_warning("sandbox", "bubblewrap cannot start sandboxes, which code rewards require", reason)
    else:
        yield report_ok("sandbox", "bubblewrap can start sandboxes")
    if importlib.util.find_spec("docker") is None:
        yield report_ok(
            "docker", f"not installed; required for `sandbox.runtime: docker`: {build_install_command('docker')}"
        )
        return
    reason = asyncio.run(_try_runtime(DockerRuntime()))
    yield report_ok("docker", "the Docker daemon responds" if not reason else f"the SDK is installed, but {reason}")


async def _try_runtime(runtime: Runtime) -> str:
    """Start and close a sandbox runtime; return the reason why it does not start, or "" if it does."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await runtime.start()
    except RollSandboxError as error:
        return str(error)
    except TimeoutError:
        return f"the sandbox did not start within {START_TIMEOUT_S:g} s."
    finally:
        await runtime.close()
    return ""
