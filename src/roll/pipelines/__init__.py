"""Pipelines: one loop each, over parts that `setup` builds. The functions here are what the commands call."""

from roll.pipelines.commands import evaluate, export, resume, train
from roll.tracking import Summary

__all__ = ["Summary", "evaluate", "export", "resume", "train"]
