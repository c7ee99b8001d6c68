"""The run's judge, a separate role."""

from roll.pipelines.judge.role import JudgeRole, start_judge, start_scoring

__all__ = ["JudgeRole", "start_judge", "start_scoring"]
