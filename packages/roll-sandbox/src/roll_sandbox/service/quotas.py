"""Quotas of owners, and their usage."""

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
    """Bounds of one owner; `None`: only the machine's bounds apply."""

    sandboxes: int | None = 1024
    """Most live sandboxes."""
    memory_bytes: int | None = None
    """Bound on the sum of the sandboxes' memory limits."""
    disk_bytes: int | None = None
    """Bound on the sum of the sandboxes' disk limits."""
    cpu_s: float | None = None
    """Most CPU time of one program, and the limit of programs that request none."""
    lifetime_s: float = 24 * 3600.0
    """Longest remaining lifetime of a sandbox, at any moment."""
    programs: int | None = 4096
    """Most running programs."""
    requests_per_s: float = 5000.0
    """Messages and requests per second, on average; a burst may have twice as many."""


_NAMES = {field.name for field in fields(Quota)}
_REQUIRED = ("lifetime_s", "requests_per_s")
"""Fields that are never `None`."""
_log = logging.getLogger(__name__)


def _is_valid_value(name: str, value: object) -> bool:
    """Return whether a field may have this value; database rows may have been edited by hand."""
    if value is None:
        return name in _NAMES and name not in _REQUIRED
    least = 1e-9 if name in _REQUIRED else 0
    return name in _NAMES and type(value) in (int, float) and least <= value <= 2**62  # type: ignore[operator]


@dataclass
class _Usage:
    sandboxes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    programs: int = 0


class Quotas:
    """The quotas of all owners, and how much of them is taken.

    Args:
        default: quota of owners that `named` does not have.
        named: fields of `Quota` by owner, which replace the default's.
    """

    def __init__(self, default: Quota, named: Mapping[str, Mapping[str, Any]]) -> None:
        self._default = default
        self._fields: Mapping[str, Mapping[str, Any]] = {}
        self._named: dict[str, Quota] = {}
        self._usage: defaultdict[str, _Usage] = defaultdict(_Usage)
        self.set_named(named)

    def set_named(self, named: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the fields of `Quota` by owner. What is taken stays, even where it now exceeds the quota."""
        if named == self._fields:
            return
        self._fields = named
        self._named = {}
        for owner, values in named.items():
            sound = {name: value for name, value in values.items() if _is_valid_value(name, value)}
            if sound != values:
                _log.warning(
                    "the quota of '%s' has invalid fields, which are ignored: %s",
                    owner,
                    sorted(values.keys() - sound.keys()),
                )
            self._named[owner] = replace(self._default, **sound)

    def get(self, owner: str) -> Quota:
        """Return an owner's quota."""
        return self._named.get(owner, self._default)

    def resolve_lifetime_s(self, owner: str, requested_s: float | None, default_s: float) -> float:
        """Return the lifetime of a sandbox.

        Raises:
            SandboxQuotaError: `requested_s` exceeds the quota.
        """
        most = self.get(owner).lifetime_s
        if requested_s is not None and requested_s > most:
            raise SandboxQuotaError(
                f"the requested lifetime is {requested_s:g} s, and the quota of '{owner}' allows {most:g} s: request "
                f"less, or raise the quota (`roll-sandbox quota set {owner} --lifetime`)."
            )
        return min(default_s, most) if requested_s is None else requested_s

    def check_sandbox(self, owner: str, spec: SandboxSpec) -> SandboxSpec:
        """Check that a sandbox fits into the owner's quota, and return its spec as `bounded` does.

        Raises:
            SandboxQuotaError: the quota is used up, or the spec exceeds it.
        """
        quota, taken, limits = self.get(owner), self._usage[owner], spec.limits
        for what, have, more, most in (
            ("sandboxes", taken.sandboxes, 1, quota.sandboxes),
            ("bytes of memory", taken.memory_bytes, limits.memory_bytes, quota.memory_bytes),
            ("bytes of disk", taken.disk_bytes, limits.disk_bytes, quota.disk_bytes),
        ):
            if most is not None and have + more > most:
                raise SandboxQuotaError(
                    f"the quota of '{owner}' is {most:,} {what}: {have:,} are in use, and {more:,} more are requested. "
                    f"Stop sandboxes, or raise the quota (`roll-sandbox quota set {owner}`)."
                )
        self.check_cpu(owner, limits.cpu_s)
        return self.apply_cpu_limit(owner, spec)

    def apply_cpu_limit(self, owner: str, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec, with the owner's bound on CPU time if the spec has none."""
        cpu_s = spec.limits.cpu_s or self.get(owner).cpu_s
        return replace(spec, limits=replace(spec.limits, cpu_s=cpu_s))

    def check_cpu(self, owner: str, cpu_s: float | None) -> None:
        """Check the CPU time limit of a program.

        Raises:
            SandboxQuotaError: it exceeds the owner's quota.
        """
        most = self.get(owner).cpu_s
        if most is not None and cpu_s is not None and cpu_s > most:
            raise SandboxQuotaError(
                f"a program requests {cpu_s:g} s of CPU time, and the quota of '{owner}' allows {most:g} s: request "
                "less, or "
                f"raise the quota (`roll-sandbox quota set {owner} --cpu`)."
            )

    def add_sandbox(self, owner: str, spec: SandboxSpec) -> None:
        """Count a sandbox that `allow` has admitted, or that already exists."""
        taken, limits = self._usage[owner], spec.limits
        taken.sandboxes += 1
        taken.memory_bytes += limits.memory_bytes
        taken.disk_bytes += limits.disk_bytes

    def remove_sandbox(self, owner: str, spec: SandboxSpec) -> None:
        """Stop counting a sandbox that has ended."""
        taken = self._usage[owner]
        taken.sandboxes -= 1
        taken.memory_bytes -= spec.limits.memory_bytes
        taken.disk_bytes -= spec.limits.disk_bytes

    def add_program(self, owner: str) -> None:
        """Count a program.

        Raises:
            SandboxQuotaError: the quota of programs is used up.
        """
        most = self.get(owner).programs
        if most is not None and self._usage[owner].programs >= most:
            raise SandboxQuotaError(
                f"'{owner}' already runs {most:,} programs, the most that its quota allows: wait until one ends."
            )
        self.count_programs(owner)

    def count_programs(self, owner: str, programs: int = 1) -> None:
        """Count running programs without checking the quota."""
        self._usage[owner].programs += programs

    def get_usage(self, owner: str) -> dict[str, int]:
        """Return the used amounts of an owner's quota, by field."""
        return asdict(self._usage[owner])

    def remove_programs(self, owner: str, programs: int = 1) -> None:
        """Stop counting programs that have ended."""
        self._usage[owner].programs -= programs
