"""The run's own judge, a separate role."""

from roll.pipelines.judge.role import JudgeRole, open_scoring, start_judge

__all__ = ["JudgeRole", "open_scoring", "start_judge"]
