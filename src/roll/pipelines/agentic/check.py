"""What can be known of an agentic run before it starts: what `roll check` prints, and `roll.check` returns."""

from roll.pipelines.rlvr.check import inspect

__all__ = ["inspect"]
