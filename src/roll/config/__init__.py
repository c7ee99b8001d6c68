"""Typed configuration: strict, frozen after loading, and the only place where a number is asked for."""

from roll.config.pipelines.rlvr import RLVRConfig

__all__ = ["RLVRConfig"]
