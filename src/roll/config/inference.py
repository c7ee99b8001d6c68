"""Inference engines."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import field_validator

from roll.config.base import EXTENSION, Section, option, path_option
from roll.config.engines import ENGINES

__all__ = ["EngineOptions", "InferenceConfig", "Quantization"]

Quantization: TypeAlias = Literal["none", "int8", "fp8"]


class EngineOptions(Section):
    """Options of the engines of every role."""

    engine: str = path_option(
        "auto",
        "`vllm`, `hf` (embedded, deterministic), or `auto`: vLLM where it is installed and `hf` otherwise. Or an "
        "engine of your own: a name that an installed package gives (entry points `roll.engines`), or "
        "`path/to/file.py:Class`.",
        examples=["hf"],
        pattern=EXTENSION,
    )
    tensor_parallel: int = option(1, "Devices of one engine.", ge=1)
    max_num_seqs: int = option(64, "Requests that one engine runs at once; more wait.", ge=1)
    kv_cache_bytes: int | None = option(
        None,
        "Memory for keys and values per engine; by default 256 MiB on CPU, the engine's own share on a GPU.",
        unit="bytes",
        ge=1,
    )
    options: dict[str, Any] = option({}, "Further arguments for the engine, passed on as they are.")

    @field_validator("engine")
    @classmethod
    def _known(cls, name: str) -> str:
        return name if name == "auto" else ENGINES.checked(name)


class InferenceConfig(EngineOptions):
    """How answers are generated."""

    max_context: int | None = option(
        None,
        "Longest prompt plus answer; by default what prompts and max_new_tokens need.",
        unit="tokens",
        ge=1,
    )
    quantization: Quantization = option(
        "none",
        "Linear weights go to the engines in 8 bits, and these compute with what is read back of them: `int8`, or "
        "`fp8` (e4m3), with a scale for every output channel.",
    )
