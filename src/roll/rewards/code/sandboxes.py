"""The sandboxes that all code rewards of a run share.

    answer ──► slot (at most `max_parallel`) ──► a sandbox for the candidate
                                             └─► if the tests are programs: another sandbox for their checker

Invariants: candidate and checker use different pools, so no sandbox's memory ever contains both the candidate's and the
checker's data; an answer holds one slot, and at most two sandboxes.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from roll.config.sandbox import SandboxConfig
from roll.rewards.code.packages import build_package_mounts
from roll.sandbox_errors import sandbox_errors
from roll.sandboxes import build_manager
from roll_sandbox import ExecutionResult, Job, Limits, Mount, Program, SandboxSpec

__all__ = ["CodeSandboxes"]

_PROGRAMS_DIRECTORY = Path(__file__).parent / "sandbox_programs"
_LIBRARY_MOUNT_PATH = "/opt/roll"


class CodeSandboxes:
    """Starts and closes the sandboxes of code rewards; an async context manager."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        max_parallel = config.max_parallel or os.cpu_count() or 1
        warm = max_parallel if config.warm is None else config.warm
        self._candidate = self._build_spec("candidate", ("sandbox_programs.candidate",), config.program_packages)
        self._checker = self._build_spec("checker", ("sandbox_programs.checker",), config.program_packages)
        # An answer may need a sandbox for its checker in addition to the candidate's.
        self._manager = build_manager(config, spec=self._candidate, warm=warm, max_sandboxes=2 * max_parallel)
        self.slots = asyncio.Semaphore(max_parallel)
        """Slots that bound the number of answers that run at once: an answer runs only while it holds one."""

    def _build_spec(self, pool: str, modules: tuple[str, ...], packages: list[str]) -> SandboxSpec:
        config = self.config
        unsafe = config.runtime == "subprocess"  # this runtime has no file system of its own
        mounts = () if unsafe else build_package_mounts(packages, f"{_LIBRARY_MOUNT_PATH}/packages")
        return SandboxSpec(
            limits=Limits(
                wall_s=60.0,
                memory_bytes=config.memory_bytes,
                max_processes=config.max_processes,
                disk_bytes=config.disk_bytes,
                file_size_bytes=config.disk_bytes,
            ),
            trust="trusted" if config.trust_programs else "untrusted",
            mounts=()
            if unsafe
            else (
                Mount(source=str(_PROGRAMS_DIRECTORY), target=f"{_LIBRARY_MOUNT_PATH}/sandbox_programs", upload=True),
                *mounts,
            ),
            python_path=(str(_PROGRAMS_DIRECTORY.parent),)
            if unsafe
            else (_LIBRARY_MOUNT_PATH, f"{_LIBRARY_MOUNT_PATH}/packages")[: 1 + bool(mounts)],
            preload=(*modules, *config.preload),
            pool=pool,
            image=config.image,
        )

    async def __aenter__(self) -> CodeSandboxes:
        """Start the first sandboxes.

        Raises:
            SandboxUnavailableError: This machine cannot run sandboxes; the message gives the reason and a remedy.
        """
        with sandbox_errors():
            await self._manager.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._manager.close()

    async def run(self, program: Program) -> ExecutionResult:
        """Run a candidate's program, and return its result."""
        with sandbox_errors():
            return await self._manager.execute(program, spec=self._candidate)

    async def compare(self, program: Program) -> ExecutionResult:
        """Compare a candidate's output with the expected output, in a sandbox that never runs candidates."""
        with sandbox_errors():
            return await self._manager.execute(program, spec=self._checker)

    @asynccontextmanager
    async def start_candidate(self, program: Program) -> AsyncIterator[Job]:
        """Start a candidate; yield its job, through which the caller exchanges messages with it."""
        with sandbox_errors():
            async with self._manager.run_interactive(program, spec=self._candidate) as job:
                yield job

    @asynccontextmanager
    async def start_checker(self, program: Program, *, pytest: bool) -> AsyncIterator[Job]:
        """Start a checker; yield its job, through which the caller exchanges messages with it.

        Raises:
            ConfigError: Pytest is needed, but not installed.
        """
        spec = self._checker_with_pytest if pytest else self._checker
        with sandbox_errors():
            async with self._manager.run_interactive(program, spec=spec) as job:
                yield job

    @functools.cached_property
    def _checker_with_pytest(self) -> SandboxSpec:
        spec = self._build_spec("checker", ("sandbox_programs.checker",), [*self.config.program_packages, "pytest"])
        return replace(spec, preload=(*spec.preload, "pytest"))
