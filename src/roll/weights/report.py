"""The report of a weight sync, and checks of receipts. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roll.errors import EngineDiedError
from roll.types import WeightReceipt
from roll.weights.probe import ProbeResult

__all__ = ["SyncReport", "find_checksum_problem", "find_receipt_problem"]

MAX_LISTED_NAMES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """The result of a weight sync that succeeded for every engine that is alive."""

    policy_version: int
    """The version of the weights, or of the adapter if an adapter was pushed."""
    transport: str
    seconds: float
    """Duration from the first call to the last checked receipt, without read-back and probe."""
    num_bytes: int
    """Total size of the tensors; each tensor is counted once, even with several engines."""
    num_tensors: int
    engines: tuple[str, ...]
    """The engines that confirmed the update."""
    dead_engines: Mapping[str, EngineDiedError] = field(default_factory=dict)
    """The engines that died or did not answer in time. Their weights are unknown: replace them, then call `push_to`."""
    num_read_back: int = 0
    """The number of tensors whose checksums were read back and compared, over all engines."""
    readback_s: float = 0.0
    probe: Mapping[str, ProbeResult] = field(default_factory=dict)
    """The probe results by engine; empty if no probe was due."""
    probe_s: float = 0.0
    adapter: str | None = None
    """The adapter whose weights were pushed; `None` for the policy."""
    pause_s: float = 0.0
    """Duration for which engines were paused: while they applied the weights and read them back."""
    transport_metrics: Mapping[str, float] = field(default_factory=dict)
    """Additional metrics of the transport."""

    def compute_metrics(self) -> dict[str, float]:
        """Return the metrics of the sync; probe metrics are the maxima over the engines."""
        values = {
            "sync/transfer_s": self.seconds,
            "sync/pause_s": self.pause_s,
            "sync/bytes": float(self.num_bytes),
            "sync/tensors": float(self.num_tensors),
            "sync/engines": float(len(self.engines)),
            "sync/engines_dead": float(len(self.dead_engines)),
            "sync/checksums_read_back": float(self.num_read_back),
        }
        values |= self.transport_metrics
        if self.probe:
            results = self.probe.values()
            values |= {
                "sync/probe_mean_abs": max(result.mean_abs for result in results),
                "sync/probe_max_abs": max(result.max_abs for result in results),
                "sync/probe_change": max(result.change for result in results),
                "sync/probe_change_missed": max(result.change_missed for result in results),
                "sync/probe_s": self.probe_s,
            }
        return values


def find_receipt_problem(
    receipt: WeightReceipt, policy_version: int, sent: Mapping[str, int], adapter: str | None = None
) -> str:
    """Check a receipt against the checksums that the trainer sent.

    Returns:
        A description of the problem, with "it" (the engine) as the subject; an empty string if there is no problem.
    """
    if receipt.adapter != adapter:
        return f"it confirmed {_describe_owner(receipt.adapter)} instead of {_describe_owner(adapter)}"
    if receipt.policy_version != policy_version:
        return f"it confirmed policy version {receipt.policy_version}"
    missing = [name for name in sent if name not in receipt.checksums]
    if missing:
        return f"it did not receive {_list_names(missing)}"
    unknown = [name for name in receipt.checksums if name not in sent]
    if unknown:
        return f"it received {_list_names(unknown)}, which the trainer did not send"
    return find_checksum_problem(receipt.checksums, sent, "received different bytes than the trainer sent for")


def _describe_owner(adapter: str | None) -> str:
    return "the policy's own weights" if adapter is None else f"the adapter '{adapter}'"


def find_checksum_problem(checksums: Mapping[str, int], sent: Mapping[str, int], action: str) -> str:
    """Return "it {action} …" with the tensors whose checksums differ from `sent`, or "" if there are none."""
    wrong = [name for name, checksum in checksums.items() if name in sent and sent[name] != checksum]
    return f"it {action} {_list_names(wrong)}" if wrong else ""


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:MAX_LISTED_NAMES])
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return f"{'tensor' if len(names) == 1 else f'{len(names)} tensors:'} {shown}{more}"
