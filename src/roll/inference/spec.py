"""Describes an engine and builds it. No engine is imported until one is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from roll.config.engines import ENGINES, LazyEngine, resolve_engine_kind
from roll.config.model import LoRAConfig
from roll.errors import ConfigError, UnsupportedError
from roll.inference.user_engine import UserEngine
from roll.models.multimodal import MediaInputs, has_media_config, open_media
from roll.protocols import InferenceEngine
from roll.types import MediaSpan

__all__ = ["EngineSpec", "build_engine", "get_expert_dtype", "prestart_engine", "reject_adapter", "reject_media"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """The complete description of one engine. It is plain data, so it can be sent to the engine's process."""

    engine_id: str
    kind: str
    """A name in `roll.config.engines.ENGINES`, or an import path; see `resolve_engine_kind` for `auto`."""
    model_path: str
    """A Hugging Face model directory."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_context: int
    """The maximum length of prompt plus answer, in tokens. Longer requests are rejected."""
    max_num_seqs: int = 64
    """The maximum number of concurrent requests; further requests wait."""
    kv_cache_bytes: int | None = None
    """The size of the KV cache; `None`: 256 MiB on a CPU, elsewhere a fraction of the device that the engine
    chooses."""
    quantization: Literal["none", "int8", "fp8"] = "none"
    """The format in which linear layers compute, for engines with the capability `quantized_compute`."""
    tensor_parallel: int = 1
    seed: int = 0
    """The seed of requests that have no seed."""
    num_threads: int | None = None
    """The number of CPU threads; `None` keeps the setting of the process."""
    sleeps: bool = False
    """True if the engine must support `sleep`, because trainers use its device in the meantime."""
    lora: LoRAConfig | None = None
    """The configuration of the adapters, if weight updates contain an adapter instead of all weights. The engine keeps
    the weights of `model_path`, and rejects requests until the first adapter arrives."""
    max_adapters: int = 1
    """The maximum number of adapters, including the policy's."""
    records_experts: bool = False
    """True if every `Generation` must contain the experts that the routers chose."""
    trust_remote_code: bool = False
    media_dir: Path | None = None
    """The directory of the run's media store (`roll.media.MediaStore`); `None` if requests have no images."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the engine, which are passed unchanged and override ROLL's arguments."""
    log_path: Path | None = None
    """The log file of the engine; `None` sends its messages to the logging of the process."""

    @property
    def reads_media(self) -> bool:
        """True if requests may have images or other media."""
        return self.media_dir is not None and has_media_config(self.model_path)

    def open_media(self) -> MediaInputs | None:
        """Open the run's media store for this model; return `None` if the run has none or the model reads only text."""
        if self.media_dir is None:
            return None
        return open_media(self.model_path, self.media_dir, trust_remote_code=self.trust_remote_code)


def reject_adapter(kind: str, adapter: str | None) -> None:
    """Reject an adapter that a request or a weight update names, for engines without adapters.

    Raises:
        UnsupportedError: `adapter` is not `None`.
    """
    if adapter is not None:
        raise UnsupportedError(
            f"the {kind} engine has no LoRA adapters, got adapter '{adapter}': set EngineSpec.lora, or sync the "
            "policy's weights with the adapter merged."
        )


def reject_media(kind: str, *media: Iterable[MediaSpan]) -> None:
    """Reject sequences with media, for engines without the capability `supports_images`.

    Raises:
        UnsupportedError: a sequence has media.
    """
    for span in (span for spans in media for span in spans):
        raise UnsupportedError(
            f"the {kind} engine supports text only, but a sequence has a part of kind '{span.kind}': remove the part, "
            "or use an engine that supports it."
        )


def get_expert_dtype(num_experts: int) -> np.dtype[np.signedinteger]:
    """Return the smallest dtype for expert indices and -1 (unknown): int8 for up to 128 experts."""
    return np.dtype(np.int8 if num_experts <= 128 else np.int16)


def prestart_engine(kind: str, num_threads: int | None) -> AbstractContextManager[None]:
    """Prepare the start of an engine during the `with` block, before the engine's model is known.

    Unused preparations are discarded at the end of the block.

    Args:
        kind: See `EngineSpec.kind`. An invalid kind is ignored here, and rejected when the engine is built.
        num_threads: See `EngineSpec.num_threads`.
    """
    try:
        factory = ENGINES.get(resolve_engine_kind(kind))
    except ConfigError:
        return nullcontext()
    context = factory.prestart(num_threads) if isinstance(factory, LazyEngine) else None
    return nullcontext() if context is None else context


def build_engine(spec: EngineSpec) -> InferenceEngine:
    """Build the engine that `spec` describes; `await engine.start()` then loads the model.

    Raises:
        ConfigError: the kind is unknown or not installed, or a user's engine cannot be built.
    """
    factory = ENGINES.get(resolve_engine_kind(spec.kind))
    if isinstance(factory, LazyEngine):
        return factory(spec)
    return UserEngine(spec.kind, spec.engine_id, partial(factory, spec))
