"""Pipelines: one loop each, over parts that `setup` builds. The functions here are what the commands call."""

from roll.pipelines.commands import evaluate, resume, train
from roll.pipelines.exporting import export
from roll.pipelines.hub import check_hub, upload
from roll.tracking import Summary

__all__ = ["Summary", "check_hub", "evaluate", "export", "resume", "train", "upload"]
