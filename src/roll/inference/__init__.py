"""Inference engines behind one protocol (`roll.protocols.InferenceEngine`)."""

from roll.config.engines import ENGINES, EngineCapabilities, LazyEngine, engine_capabilities, resolve_engine_kind
from roll.inference.spec import EngineSpec, build_engine, engine_ahead

__all__ = [
    "ENGINES",
    "EngineCapabilities",
    "EngineSpec",
    "LazyEngine",
    "build_engine",
    "engine_ahead",
    "engine_capabilities",
    "resolve_engine_kind",
]
