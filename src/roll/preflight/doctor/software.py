"""Python, packages, engines, backends, compilers and sandboxes."""

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
from roll.preflight.doctor.finding import Finding, ok, problem, warning
from roll.version import DISTRIBUTION, __version__, install_extra
from roll_sandbox import RollSandboxError, Runtime

__all__ = ["examine", "versions"]

TRY_S = 30.0
"""Timeout for a sandbox to start, or for Docker to respond."""
_OPTIONAL = (
    ("ray", "ray", "`cluster.type: ray` (several ranks or machines)"),
    ("deepspeed", "deepspeed", "`training.backend: deepspeed`"),
    ("megatron-core", "megatron", "`training.backend: megatron`"),
)
"""Distribution, the extra that installs it, and its users."""


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes of a run; empty for a package that is not installed."""
    return {
        DISTRIBUTION: __version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        **{name: _version(name) for name in ("torch", "transformers", "ray", "numpy")},
    }


def examine() -> Iterator[Finding]:
    """Yield the findings of this section."""
    yield ok("python", f"{platform.python_version()}, {sys.prefix}")
    yield ok(DISTRIBUTION, __version__)
    yield _packages()
    yield _engine()
    yield from starmap(_optional, _OPTIONAL)
    yield _compiler()
    yield from _sandboxes()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _packages() -> Finding:
    try:
        written = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return warning("packages", f"{DISTRIBUTION} is not installed: its source tree is used", "pip install -e .")
    needed = map(Requirement, written)
    required = [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    wrong = [each for each in required if not _suits(each)]
    if not wrong:
        return ok("packages", f"all {len(required)} as required; torch {_version('torch')}")
    shown = ", ".join(f"{each.name} {_version(each.name) or 'missing'} (wants {each.specifier})" for each in wrong)
    install = " ".join(f"'{each.name}{each.specifier}'" for each in wrong)
    return problem("packages", shown, f"pip install {install}")


def _suits(requirement: Requirement) -> bool:
    found = _version(requirement.name)
    return bool(found) and requirement.specifier.contains(found, prereleases=True)


def _engine() -> Finding:
    kind = resolve_engine_kind("auto")
    found, others = ENGINES.get(kind), [name for name in ENGINES if name not in ENGINES.built_in]
    version = found.version if isinstance(found, LazyEngine) else ""
    also = f"; installed packages bring {', '.join(others)}" if others else ""
    faster = list(ENGINES.built_in[: ENGINES.built_in.index(kind)])
    hint = f"{faster[0]} generates faster: {install_extra(faster[0])}" if faster else ""
    return ok("engine", (version or f"{kind}, which is built in") + also, hint)


def _optional(distribution: str, name: str, purpose: str) -> Finding:
    found = _version(distribution)
    return ok(distribution, found or f"not installed; {purpose} wants it: {install_extra(name)}")


def _compiler() -> Finding:
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        return warning(
            "compiler", "none", "training on a CPU is slower without: install gcc, and python3-dev for vLLM."
        )
    return ok("compiler", found)


def _sandboxes() -> Iterator[Finding]:
    from roll_sandbox.bubblewrap import BubblewrapRuntime
    from roll_sandbox.docker import DockerRuntime

    reason = asyncio.run(_trial(BubblewrapRuntime()))
    if reason:
        yield warning("sandbox", "bubblewrap starts none; code rewards need one", reason)
    else:
        yield ok("sandbox", "bubblewrap starts one")
    if importlib.util.find_spec("docker") is None:
        yield ok("docker", f"not installed; `sandbox.runtime: docker` wants it: {install_extra('docker')}")
        return
    reason = asyncio.run(_trial(DockerRuntime()))
    yield ok("docker", "an engine answers" if not reason else f"the SDK is installed, and {reason}")


async def _trial(runtime: Runtime) -> str:
    """Start a runtime, and return why it does not work; empty if it does."""
    try:
        async with asyncio.timeout(TRY_S):
            await runtime.start()
    except RollSandboxError as error:
        return str(error)
    except TimeoutError:
        return f"it did not start within {TRY_S:g} s."
    finally:
        await runtime.close()
    return ""
