"""What can be known of an RLVR run before it starts: what `roll check` prints, and `roll.check` returns."""

from __future__ import annotations

from roll.pipelines.reinforcement.check import inspect

__all__ = ["inspect"]
