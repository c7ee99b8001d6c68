"""Running an answer's program on its cases.

    stdin and call cases ──► one sandbox, a process per case ──► outputs ──► compared as text and plain data (`batch`)
    assert, check, pytest ──► candidate's sandbox ◄── plain data ──► checker's sandbox ──► verdicts (`dialogue`)

What comes from a candidate's sandbox is the candidate's claim of what it computed. The expected results are never
there.
"""

from __future__ import annotations

from collections.abc import Sequence

from roll.config.rewards.code import CodeReward
from roll.rewards.code.batch import Batch
from roll.rewards.code.dialogue import Dialogue
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.tasks import Task, TestCase
from roll.rewards.code.verdicts import SKIPPED, CaseVerdict

__all__ = ["run_cases"]


async def run_cases(
    sandboxes: CodeSandboxes, task: Task, code: str, limits_s: Sequence[float], config: CodeReward
) -> list[CaseVerdict]:
    """A verdict per case, in order.

    Args:
        limits_s: CPU time of each case.

    Raises:
        SandboxError: a sandbox broke.
        RewardInfraError: one of our own programs crashed.
        BrokenTestsError: see there.
    """
    verdicts = [SKIPPED] * len(task.cases)
    numbered = list(enumerate(task.cases))
    plain = [(i, case) for i, case in numbered if not isinstance(case, TestCase)]
    tests = [(i, case) for i, case in numbered if isinstance(case, TestCase)]
    if plain:
        found = await Batch(sandboxes, task, code, config).run([(case, limits_s[i]) for i, case in plain])
        for (i, _), verdict in zip(plain, found, strict=True):
            verdicts[i] = verdict
    if tests and not (config.credit == "all" and any(verdicts[i].passed < 1 for i, _ in plain)):
        found = await Dialogue(sandboxes, task, code, config).run([(case, limits_s[i]) for i, case in tests])
        for (i, _), verdict in zip(tests, found, strict=True):
            verdicts[i] = verdict
    return verdicts
