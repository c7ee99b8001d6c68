"""Transport `store`: the trainer writes weights to a file store, and engines fetch them while they generate.

Data flow, per sync:

    trainer rank 0 ─ full copy or delta ─► buckets, then manifest ─► store
    store ─► local copy of the weights on the engine's host (prefetch, while the engine generates)
    local copy ─ mapped ─► Receiver ─► engine (while the engine is paused)

Invariants:
    - Files in the store are written once and never changed. A version exists when its manifest exists.
    - The size and the checksum of every bucket and manifest are verified before use, and every tensor of a local copy
      is verified before the copy gets its final name.
    - A version is either a full copy or a delta against the version before it. The newest full copy and the deltas
      after it stay in the store, so an engine with any older version, or without a version, can reconstruct the newest
      version.
"""

from roll.weights.store.handle import StoredVersion, StoreHandle
from roll.weights.store.receiver import WeightPrefetcher, receive
from roll.weights.store.sender import StoreSender

__all__ = ["StoreHandle", "StoreSender", "StoredVersion", "WeightPrefetcher", "receive"]
