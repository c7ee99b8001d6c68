"""Inference engines behind one protocol (`roll.protocols.InferenceEngine`).

`spec` describes an engine and builds it. `hf` (with `hf_*`) decodes a `transformers` model in this process, `vllm/`
drives vLLM's processes, and `user_engine` wraps a user-defined engine. `roll.config.engines` lists the names and
capabilities of all engines.
"""

from roll.config.engines import ENGINES, EngineCapabilities, LazyEngine, get_engine_capabilities, resolve_engine_kind
from roll.inference.spec import EngineSpec, build_engine, prestart_engine

__all__ = [
    "ENGINES",
    "EngineCapabilities",
    "EngineSpec",
    "LazyEngine",
    "build_engine",
    "get_engine_capabilities",
    "prestart_engine",
    "resolve_engine_kind",
]
