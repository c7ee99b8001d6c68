"""Records of the transport `store`: the manifest of a version, and the handle that engines get. JSON in the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roll.weights.store.delta import Encoding

__all__ = [
    "MANIFEST_NAME",
    "MIN_BYTES_PER_S",
    "StoreHandle",
    "StoredBucket",
    "StoredTensor",
    "StoredVersion",
    "VersionManifest",
]

MANIFEST_NAME = "manifest.json"

MIN_BYTES_PER_S = 1e6
"""Minimum tolerated transfer rate of a store, from which timeouts are computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBucket:
    """One bucket file of a version."""

    name: str
    num_bytes: int
    checksum: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a version, and the location of its payload."""

    name: str
    shape: Sequence[int]
    dtype: str
    checksum: int
    """Checksum of the tensor's bytes in this version, for full payloads and deltas."""
    encoding: Encoding
    num_changed: int
    is_compressed: bool
    bucket: int
    """Index of the bucket with the payload."""
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionManifest:
    """The list of a version's buckets and tensors; the trainer writes this file last."""

    policy_version: int
    serial: int
    """Number of this version in its directory of the store."""
    base: int | None
    """Serial of the version that the deltas refer to; `None` for a full copy."""
    buckets: tuple[StoredBucket, ...]
    tensors: tuple[StoredTensor, ...]

    def to_json(self) -> bytes:
        """Return the manifest as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> VersionManifest:
        """Parse the result of `to_json`."""
        fields: dict[str, Any] = json.loads(data)
        fields["buckets"] = tuple(StoredBucket(**bucket) for bucket in fields["buckets"])
        fields["tensors"] = tuple(StoredTensor(**tensor) for tensor in fields["tensors"])
        return cls(**fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredVersion:
    """The size of one version in the store, and the size and checksum of its manifest."""

    serial: int
    manifest_checksum: int
    manifest_bytes: int
    num_bytes: int
    """Total size of the buckets."""

    @property
    def name(self) -> str:
        """Name of the version's directory."""
        return f"{self.serial:08d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreHandle:
    """The data that an engine needs to fetch a version."""

    url: str
    directory: str
    """Directory of these weights in the store."""
    chain: tuple[StoredVersion, ...]
    """The newest full copy, then all deltas up to the version to fetch."""
    num_elements: int
    num_changed: int | None
    """Number of elements that differ from the previous version; `None` if there was no previous version."""
    num_written_bytes: int
    """Number of bytes that the trainer wrote for this update."""
    local_dir: str | None = None
    """Directory for local copies on the engines' hosts; by default the system's directory for temporary files."""

    @property
    def max_fetch_s(self) -> float:
        """Maximum time to fetch a full copy and all deltas, in seconds."""
        return sum(version.num_bytes for version in self.chain) / MIN_BYTES_PER_S

    def compute_metrics(self) -> dict[str, float]:
        """Return the metrics of the update."""
        metrics = {"sync/written_bytes": float(self.num_written_bytes), "sync/deltas_since_full": len(self.chain) - 1.0}
        if self.num_changed is not None:
            metrics["sync/delta_density"] = self.num_changed / max(self.num_elements, 1)
        return metrics
