"""What engines are offered and say beside answers: weights, receipts, how busy they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["EngineLoad", "EngineStretch", "TensorSpec", "WeightReceipt", "WeightUpdate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of a weight sync, in the names of the HF checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """`bfloat16`, `float32`, … as torch spells it."""

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """An offer of weights to an engine: what will come, and how to fetch it."""

    policy_version: int
    manifest: tuple[TensorSpec, ...]
    transport: str
    """Name of the transport that the engine opens with `handle`."""
    handle: Any
    """Transport's own plain data (a shared-memory name, a process group's address, …)."""
    adapter: str | None = None
    """Whose weights they are, and whose version; `None`: the policy's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightReceipt:
    """An engine's confirmation of an update."""

    engine_id: str
    policy_version: int
    checksums: Mapping[str, int]
    """By tensor name, 64 bits, of the bytes that the engine received and applied; the controller compares them with
    the sender's."""
    duration_s: float = 0.0
    adapter: str | None = None
    """That of the update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """How busy an engine is."""

    num_running: int
    num_waiting: int
    kv_used: float
    """Share of the KV cache in use, 0 … 1."""
    capacity: int
    """Requests it can run at once."""
    num_steps: int | None = None
    """Decoding steps that it has made since it started: what shows that it works. `None`: it does not count them, so
    that nobody can tell whether it hangs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStretch:
    """Some steps of an engine, one right after the other."""

    began_s: float
    """Seconds since 1970."""
    duration_s: float
    num_steps: int
    num_decoding: int
    """Requests that got a further token in each step."""
    num_started: int
    """Requests that got their first one."""
    num_prefilled: int
    """Prompt tokens that were computed; those found in a cache of prefixes do not count."""
    context_tokens: float
    """Keys and values of all running requests, in tokens, mean over the steps."""
