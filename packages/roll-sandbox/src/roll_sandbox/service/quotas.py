"""Quotas of owners, and the resources in use that count against them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from roll_sandbox.errors import SandboxQuotaError
from roll_sandbox.types import SandboxSpec

__all__ = ["Quota", "Quotas"]


@dataclass(frozen=True, kw_only=True)
class Quota:
    """Limits for one owner. `None` means that only the limits of the machines apply."""

    sandboxes: int | None = 1024
    """Maximum number of live sandboxes."""
    memory_bytes: int | None = None
    """Maximum sum of the memory limits of all sandboxes."""
    disk_bytes: int | None = None
    """Maximum sum of the disk limits of all sandboxes."""
    cpu_s: float | None = None
    """Maximum CPU seconds of one program, and the limit of programs that request none."""
    lifetime_s: float = 24 * 3600.0
    """Maximum remaining lifetime of a sandbox in seconds."""
    programs: int | None = 4096
    """Maximum number of running programs."""
    requests_per_s: float = 5000.0
    """Requests and messages per second, on average; a burst may have twice as many."""


_QUOTA_NAMES = {field.name for field in fields(Quota)}
_REQUIRED_QUOTAS = ("lifetime_s", "requests_per_s")
"""Fields that must not be `None`."""
_log = logging.getLogger(__name__)


def _is_valid_value(name: str, value: object) -> bool:
    """Return whether this value is valid for a field; database rows may have been edited by hand."""
    if value is None:
        return name in _QUOTA_NAMES and name not in _REQUIRED_QUOTAS
    least = 1e-9 if name in _REQUIRED_QUOTAS else 0
    return name in _QUOTA_NAMES and type(value) in (int, float) and least <= value <= 2**62  # type: ignore[operator]


@dataclass
class _Usage:
    """The resources that one owner uses."""

    sandboxes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    programs: int = 0


class Quotas:
    """The quotas and the used resources of all owners.

    Args:
        default: the quota of owners without an entry in `overrides`.
        overrides: maps owners to the fields of `Quota` that differ from the default.
    """

    def __init__(self, default: Quota, overrides: Mapping[str, Mapping[str, Any]]) -> None:
        self._default = default
        self._fields: Mapping[str, Mapping[str, Any]] = {}
        self._named: dict[str, Quota] = {}
        self._usage: defaultdict[str, _Usage] = defaultdict(_Usage)
        self.set_overrides(overrides)

    def set_overrides(self, overrides: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the quotas of individual owners; invalid fields are ignored with a warning.

        The counts of used resources are kept, even if they exceed the new quota.
        """
        if overrides == self._fields:
            return
        self._fields = overrides
        self._named = {}
        for owner, values in overrides.items():
            sound = {name: value for name, value in values.items() if _is_valid_value(name, value)}
            if sound != values:
                _log.warning(
                    "ignoring invalid fields of the quota of '%s': %s",
                    owner,
                    sorted(values.keys() - sound.keys()),
                )
            self._named[owner] = replace(self._default, **sound)

    def get(self, owner: str) -> Quota:
        """Return an owner's quota."""
        return self._named.get(owner, self._default)

    def resolve_lifetime_s(self, owner: str, requested_s: float | None, default_s: float) -> float:
        """Return the lifetime of a sandbox in seconds: `requested_s`, or by default `default_s` limited by the quota.

        Raises:
            SandboxQuotaError: `requested_s` exceeds the quota.
        """
        most = self.get(owner).lifetime_s
        if requested_s is not None and requested_s > most:
            raise SandboxQuotaError(
                f"the requested lifetime is {requested_s:g} s, but the quota of '{owner}' allows {most:g} s: request "
                f"less, or raise the quota (`roll-sandbox quota set {owner} --lifetime`)."
            )
        return min(default_s, most) if requested_s is None else requested_s

    def check_sandbox(self, owner: str, spec: SandboxSpec) -> SandboxSpec:
        """Check a new sandbox against the owner's quota; return its spec, with the quota's CPU limit if the spec has no
        CPU limit.

        Raises:
            SandboxQuotaError: the quota is used up, or the spec exceeds it.
        """
        quota, usage, limits = self.get(owner), self._usage[owner], spec.limits
        for unit, used, requested, most in (
            ("sandboxes", usage.sandboxes, 1, quota.sandboxes),
            ("bytes of memory", usage.memory_bytes, limits.memory_bytes, quota.memory_bytes),
            ("bytes of disk", usage.disk_bytes, limits.disk_bytes, quota.disk_bytes),
        ):
            if most is not None and used + requested > most:
                raise SandboxQuotaError(
                    f"the quota of '{owner}' is {most:,} {unit}: {used:,} are in use, and {requested:,} more are "
                    f"requested. Stop sandboxes, or raise the quota (`roll-sandbox quota set {owner}`)."
                )
        self.check_cpu(owner, limits.cpu_s)
        return self.apply_cpu_limit(owner, spec)

    def apply_cpu_limit(self, owner: str, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec, with the CPU limit of the owner's quota if the spec has no CPU limit."""
        cpu_s = spec.limits.cpu_s or self.get(owner).cpu_s
        return replace(spec, limits=replace(spec.limits, cpu_s=cpu_s))

    def check_cpu(self, owner: str, cpu_s: float | None) -> None:
        """Check the CPU time limit of a program.

        Raises:
            SandboxQuotaError: the limit exceeds the owner's quota.
        """
        most = self.get(owner).cpu_s
        if most is not None and cpu_s is not None and cpu_s > most:
            raise SandboxQuotaError(
                f"a program requests {cpu_s:g} s of CPU time, but the quota of '{owner}' allows {most:g} s: request "
                f"less, or raise the quota (`roll-sandbox quota set {owner} --cpu`)."
            )

    def add_sandbox(self, owner: str, spec: SandboxSpec) -> None:
        """Count a sandbox against its owner's quota, without checking the quota."""
        usage, limits = self._usage[owner], spec.limits
        usage.sandboxes += 1
        usage.memory_bytes += limits.memory_bytes
        usage.disk_bytes += limits.disk_bytes

    def remove_sandbox(self, owner: str, spec: SandboxSpec) -> None:
        """Stop counting a sandbox that has ended against its owner's quota."""
        usage = self._usage[owner]
        usage.sandboxes -= 1
        usage.memory_bytes -= spec.limits.memory_bytes
        usage.disk_bytes -= spec.limits.disk_bytes

    def add_program(self, owner: str) -> None:
        """Count a program against its owner's quota.

        Raises:
            SandboxQuotaError: the quota of programs is used up.
        """
        most = self.get(owner).programs
        if most is not None and self._usage[owner].programs >= most:
            raise SandboxQuotaError(
                f"'{owner}' already runs {most:,} programs, the maximum of its quota: wait until a program ends."
            )
        self.add_programs(owner)

    def add_programs(self, owner: str, num_programs: int = 1) -> None:
        """Count running programs against their owner's quota, without checking the quota."""
        self._usage[owner].programs += num_programs

    def get_usage(self, owner: str) -> dict[str, int]:
        """Return the resources that an owner uses, by field of `Quota`."""
        return asdict(self._usage[owner])

    def remove_programs(self, owner: str, num_programs: int = 1) -> None:
        """Stop counting programs that have ended against their owner's quota."""
        self._usage[owner].programs -= num_programs
