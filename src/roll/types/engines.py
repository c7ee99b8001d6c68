"""Records that engines exchange with the controller for weight syncs and load reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["EngineLoad", "EngineStepSpan", "TensorSpec", "WeightReceipt", "WeightStore", "WeightUpdate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """The name (as in the HF checkpoint), shape and dtype of one tensor of a weight sync."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the torch dtype, such as `bfloat16`."""

    @property
    def num_elements(self) -> int:
        """Number of elements, the product of the shape."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightStore:
    """The file store through which the weight transport `store` sends weights."""

    url: str
    """A directory, or a URL of `fsspec`."""
    session: str
    """Directory in the store of this session of the run; no other session or run uses it."""
    previous_session: str = ""
    """Directory of an earlier session of the run, which the trainer deletes; an empty string if there is none."""
    full_copy_every: int = 20
    """Number of weight syncs after which a full copy is written instead of a delta."""
    local_dir: str | None = None
    """Directory for local copies on the engines' hosts; by default the system's directory for temporary files."""
    adapter: str | None = None
    """Adapter whose weights are sent; `None` for the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """A description of a weight sync for an engine: the tensors, and the way in which the engine fetches them."""

    policy_version: int
    manifest: tuple[TensorSpec, ...]
    transport: str
    """Name of the transport that the engine opens with `handle`."""
    handle: Any
    """Plain data of the transport, such as a shared-memory name or a process group's address."""
    adapter: str | None = None
    """Adapter to which weights and version belong; `None` for the policy itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightReceipt:
    """An engine's confirmation of a weight sync."""

    engine_id: str
    policy_version: int
    checksums: Mapping[str, int]
    """64-bit checksums of the bytes that the engine received and applied, by tensor name; the controller compares them
    with the sender's."""
    duration_s: float = 0.0
    adapter: str | None = None
    """Adapter that was updated; `None` for the policy itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """The load of an engine: requests, KV cache and decoding steps."""

    num_running: int
    num_waiting: int
    kv_used: float
    """Fraction of the KV cache in use, 0 … 1."""
    capacity: int
    """Number of requests that the engine can run at once."""
    kv_capacity: int | None = None
    """Number of tokens that fit into the KV cache; `None` if the engine does not report it."""
    num_steps: int | None = None
    """Number of decoding steps since the engine started. If the engine does not count them (`None`), hangs cannot be
    detected."""
    num_preempted: int | None = None
    """Number of times that a running request lost its KV cache to others since the engine started; `None` if the engine
    does not count them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStepSpan:
    """Several consecutive steps of an engine."""

    began_s: float
    """Unix time in seconds."""
    duration_s: float
    num_steps: int
    num_decoding: int
    """Number of requests that decoded a token in each step."""
    num_started: int
    """Number of requests that generated their first token."""
    num_prefilled: int
    """Prompt tokens that were prefilled, without prefix cache hits."""
    context_tokens: float
    """Number of tokens in the KV cache, over all running requests; mean over the steps."""
