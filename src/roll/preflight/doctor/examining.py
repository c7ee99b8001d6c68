"""All checks of `roll doctor`, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from roll.preflight.doctor import host, limits, network, software, stores
from roll.preflight.doctor.finding import Finding, problem

__all__ = ["SECTIONS", "examine"]

SECTIONS: dict[str, Callable[[Path], Iterable[Finding]]] = {
    "Machine": lambda runs: host.examine(),
    "Limits": lambda runs: limits.examine(),
    "Software": lambda runs: software.examine(),
    "Disk": stores.examine,
    "Network": lambda runs: network.examine(),
}


def examine(runs: Path, peers: Sequence[str] = ()) -> Iterator[Finding]:
    """Examine this machine, and yield one finding after another.

    Args:
        runs: directory where runs will be written.
        peers: other nodes to reach, as `HOST:PORT`.
    """
    for title, looks in SECTIONS.items():
        for finding in _guarded(title, looks(runs)):
            yield dataclasses.replace(finding, section=title)
    for peer in peers:
        for finding in network.reach(peer):
            yield dataclasses.replace(finding, section="Peers")


def _guarded(title: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings; an exception in a check becomes a finding and does not end the examination."""
    try:
        yield from findings
    except Exception as error:  # /proc, /sys and vendors' tools differ between machines
        yield problem(
            title.lower(), f"{type(error).__name__}: {error}", "this could not be examined: please report it."
        )
