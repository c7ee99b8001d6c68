"""All checks of `roll doctor`, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from roll.preflight.doctor import host, limits, network, software, stores
from roll.preflight.doctor.finding import Finding, report_problem

__all__ = ["SECTIONS", "examine"]

SECTIONS: dict[str, Callable[[Path], Iterable[Finding]]] = {
    "Machine": lambda runs: host.examine(),
    "Limits": lambda runs: limits.examine(),
    "Software": lambda runs: software.examine(),
    "Disk": stores.examine,
    "Network": lambda runs: network.examine(),
}


def examine(runs: Path, peers: Sequence[str] = ()) -> Iterator[Finding]:
    """Check whether this machine is ready for runs; yield one finding per check, as soon as it is known.

    Args:
        runs: directory where runs will be written.
        peers: other nodes to reach, as `HOST:PORT`.
    """
    for title, examine_section in SECTIONS.items():
        for finding in _catch_errors(title, examine_section(runs)):
            yield dataclasses.replace(finding, section=title)
    for peer in peers:
        for finding in network.check_peer(peer):
            yield dataclasses.replace(finding, section="Peers")


def _catch_errors(title: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings; convert an exception to a finding with the name `title`, so that other checks can continue."""
    try:
        yield from findings
    except Exception as error:  # /proc, /sys and vendors' tools differ between machines
        yield report_problem(
            title.lower(),
            f"{type(error).__name__}: {error}",
            "this check failed unexpectedly: please report the error.",
        )
