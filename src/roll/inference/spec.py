"""The description of an engine, and how it is built. Imports no engine until one is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from roll.config.engines import ENGINES, LazyEngine, resolve_engine_kind
from roll.errors import ConfigError, UnsupportedError
from roll.inference.own_engine import OwnEngine
from roll.protocols import InferenceEngine
from roll.types import MediaSpan

__all__ = ["EngineSpec", "build_engine", "expert_dtype", "prestart_engine", "refuse_adapter", "refuse_media"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """The complete description of one engine; plain data, so it can be sent to the process that runs the engine."""

    engine_id: str
    kind: str
    """A name in `roll.config.engines.ENGINES`, or an import path; see `resolve_engine_kind` for `auto`."""
    model_path: str
    """A Hugging Face model directory."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_context: int
    """The longest prompt plus answer, in tokens. Longer requests are rejected."""
    max_num_seqs: int = 64
    """The largest number of concurrent requests; more requests wait."""
    kv_cache_bytes: int | None = None
    """The size of the KV cache; `None`: 256 MiB on CPU, the engine's own share of the device elsewhere."""
    tensor_parallel: int = 1
    seed: int = 0
    """The seed for requests without a seed."""
    num_threads: int | None = None
    """The number of CPU threads; `None` leaves the process's setting."""
    sleeps: bool = False
    """Whether the engine will `sleep` while trainers use its device."""
    records_experts: bool = False
    """Whether every `Generation` must contain the experts that routers chose."""
    trust_remote_code: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the engine itself, passed on unchanged; they override ROLL's."""
    log_path: Path | None = None
    """The file of the engine's own messages; `None` sends them to the process's logging."""


def refuse_adapter(kind: str, adapter: str | None) -> None:
    """Reject a request, or weights, that name an adapter, for a kind of engine without the capability `lora`.

    Raises:
        UnsupportedError: an adapter is named.
    """
    if adapter is not None:
        raise UnsupportedError(
            f"the {kind} engine cannot answer with adapters (lora), and was asked for '{adapter}': send the policy's "
            "weights with the adapter merged, or use an engine that can."
        )


def refuse_media(kind: str, *media: Iterable[MediaSpan]) -> None:
    """Reject sequences with media, for a kind of engine without the capability `supports_images`.

    Raises:
        UnsupportedError: a sequence has media.
    """
    for span in (span for spans in media for span in spans):
        raise UnsupportedError(
            f"the {kind} engine consumes texts alone, and was sent a part of kind '{span.kind}': leave it out, or use "
            "an engine that consumes it."
        )


def expert_dtype(num_experts: int) -> np.dtype[np.signedinteger]:
    """Return the smallest dtype that holds every expert's number and -1 for unknown: one byte up to 128 experts."""
    return np.dtype(np.int8 if num_experts <= 128 else np.int16)


def prestart_engine(kind: str, num_threads: int | None) -> AbstractContextManager[None]:
    """Start the work that every engine of this kind needs before its model is known; undo unused work after the body.

    Args:
        kind: See `EngineSpec.kind`. An unusable kind is ignored here and rejected when the engine is built.
        num_threads: See `EngineSpec.num_threads`.
    """
    try:
        factory = ENGINES.get(resolve_engine_kind(kind))
    except ConfigError:
        return nullcontext()
    begun = factory.prestart(num_threads) if isinstance(factory, LazyEngine) else None
    return nullcontext() if begun is None else begun


def build_engine(spec: EngineSpec) -> InferenceEngine:
    """Build the engine that `spec` describes; `await engine.start()` then loads the model.

    Raises:
        ConfigError: the kind is unknown or not installed, or a user's engine cannot be built.
    """
    factory = ENGINES.get(resolve_engine_kind(spec.kind))
    if isinstance(factory, LazyEngine):
        return factory(spec)
    return OwnEngine(spec.kind, spec.engine_id, partial(factory, spec))
