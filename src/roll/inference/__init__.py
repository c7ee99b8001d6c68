"""Inference engines behind one protocol (`roll.protocols.InferenceEngine`)."""

from roll.inference.spec import ENGINES, EngineSpec, build_engine, engine_ahead, resolve_engine_kind

__all__ = ["ENGINES", "EngineSpec", "build_engine", "engine_ahead", "resolve_engine_kind"]
