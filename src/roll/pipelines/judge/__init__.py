"""The run's own judge: a role beside the policy's."""

from roll.pipelines.judge.role import JudgeRole, start_judge

__all__ = ["JudgeRole", "start_judge"]
