"""Checks of an RLVR run before it starts, for `roll check` and `roll.check`."""

from __future__ import annotations

from roll.pipelines.reinforcement.check import inspect

__all__ = ["inspect"]
