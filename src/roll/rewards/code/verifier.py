"""Score programs by running them: see docs/code-rewards.md.

    stdin and call cases ──► one sandbox, a process per case ──► outputs ──► compared as text and plain data (`batch`)
    assert, check, pytest ──► candidate's sandbox ◄── plain data ──► checker's sandbox ──► verdicts (`dialogue`)

All data from a candidate's sandbox is the candidate's claim of its results. The expected results are never there.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence

from roll.config.rewards.code import CodeReward
from roll.errors import ConfigError, MalformedPromptError, UnscorableError
from roll.rewards.base import Judgement, Verifier
from roll.rewards.code.batch import Batch
from roll.rewards.code.dialogue import Dialogue
from roll.rewards.code.extract import extract_code
from roll.rewards.code.languages import missing_tool
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.tasks import MalformedTestsError, Task, TestCase, parse_task
from roll.rewards.code.timeouts import AdaptiveLimits
from roll.rewards.code.verdicts import SKIPPED, BrokenTestsError, CaseVerdict
from roll.types import Prompt, Rollout
from roll_sandbox import OversizedUploadError

__all__ = ["CodeVerifier", "code_verifier", "run_cases"]

_TASKS_KEPT = 1024


class CodeVerifier:
    """Scores answers to prompts of one source."""

    def __init__(self, config: CodeReward, sandboxes: CodeSandboxes) -> None:
        self._config, self._sandboxes = config, sandboxes
        self.limits = AdaptiveLimits(config)
        self._tasks: OrderedDict[str, Task] = OrderedDict()

    async def judge(self, rollout: Rollout) -> Judgement:
        """Extract the program, run it on every case, and count the passed cases.

        Raises:
            MalformedPromptError: The prompt's tests cannot be used.
            UnscorableError: The tests cannot be run on this answer.
            InfraError: A sandbox, or one of ROLL's own programs, broke.
        """
        uid = rollout.prompt.uid
        try:
            task = self.task(rollout.prompt)
        except MalformedTestsError as error:
            raise MalformedPromptError(uid, f"its tests cannot be used: {error}") from error
        code = extract_code(rollout.text, task.language, names=task.names, reads_input=task.reads_input)
        if code is None:
            return self._judgement([], task, "no code")
        if len(code.encode("utf-8", "surrogatepass")) > self._config.max_code_bytes:
            return self._judgement([], task, "too long")
        limits_s = [self.limits.cpu_s(uid, case) for case in range(len(task.cases))]
        try:
            async with self._sandboxes.places:
                verdicts = await run_cases(self._sandboxes, task, code, limits_s, self._config)
        except (BrokenTestsError, OversizedUploadError, ConfigError) as error:
            # The tests may be valid, and only this answer may break them: other answers are still tried.
            raise UnscorableError(f"prompt '{uid}': its tests cannot be run: {error}") from error
        for case, verdict in enumerate(verdicts):
            if verdict.verdict == "passed":
                self.limits.passed(uid, case, verdict.cpu_s)
        return self._judgement(verdicts, task, "")

    def task(self, prompt: Prompt) -> Task:
        """Return the prompt's tests, parsed once.

        Raises:
            MalformedTestsError: The tests cannot be used, or their language's tool chain is missing.
        """
        task = self._tasks.get(prompt.uid)
        if task is None:
            config, row = self._config, prompt.metadata
            if config.tests_key not in row:
                columns = ", ".join(sorted(map(str, row))) or "none"
                raise MalformedTestsError(f"there is no column '{config.tests_key}' (columns: {columns}).")
            task = parse_task(
                row[config.tests_key],
                language=row.get(config.language_key) or config.language,
                entry=row.get(config.entry_point_key),
                setup=row.get(config.setup_key) or "",
                modules=config.modules,
            )
            if self._sandboxes.config.own_tools and (missing := missing_tool(task.language)):
                raise MalformedTestsError(missing)
            self._tasks[prompt.uid] = task
            if len(self._tasks) > _TASKS_KEPT:
                self._tasks.popitem(last=False)
        return task

    def _judgement(self, verdicts: list[CaseVerdict], task: Task, reason: str) -> Judgement:
        shares = [verdict.passed for verdict in verdicts] or [0.0] * len(task.cases)
        num_passed = sum(share == 1 for share in shares)
        solved = num_passed == len(task.cases)
        share = sum(shares) / len(shares)
        parts = {"passed": share} | {f"case_{i}": value for i, value in enumerate(shares[: self._config.case_metrics])}
        kinds = Counter(verdict.verdict for verdict in verdicts)
        for kind in ("timeout", "error"):
            parts[kind] = kinds[kind] / len(shares)
        if not reason:
            first = next((verdict.verdict for verdict in verdicts if verdict.passed < 1), "")
            reason = "correct" if solved else f"{first.replace('_', ' ')} {num_passed}/{len(shares)}"
        value = float(solved) if self._config.credit == "all" else share
        return Judgement(value=value, verdict=reason, correct=solved, parts=parts)


async def run_cases(
    sandboxes: CodeSandboxes, task: Task, code: str, limits_s: Sequence[float], config: CodeReward
) -> list[CaseVerdict]:
    """Return a verdict per case, in order.

    Args:
        sandboxes: The sandboxes to run in.
        task: The task with the cases.
        code: The answer's code.
        limits_s: CPU time of each case.
        config: The reward's settings.

    Raises:
        SandboxError: A sandbox broke.
        RewardInfraError: One of ROLL's own programs crashed.
        BrokenTestsError: The tests cannot be run, whatever the answer.
    """
    ends = asyncio.get_running_loop().time() + config.time_limit_s
    verdicts = [SKIPPED] * len(task.cases)
    numbered = list(enumerate(task.cases))
    plain = [(i, case) for i, case in numbered if not isinstance(case, TestCase)]
    tests = [(i, case) for i, case in numbered if isinstance(case, TestCase)]
    if plain:
        found = await Batch(sandboxes, task, code, config, ends).run([(case, limits_s[i]) for i, case in plain])
        for (i, _), verdict in zip(plain, found, strict=True):
            verdicts[i] = verdict
    if tests and not (config.credit == "all" and any(verdicts[i].passed < 1 for i, _ in plain)):
        found = await Dialogue(sandboxes, task, code, config, ends).run([(case, limits_s[i]) for i, case in tests])
        for (i, _), verdict in zip(tests, found, strict=True):
            verdicts[i] = verdict
    return verdicts


def code_verifier(config: CodeReward, sandboxes: CodeSandboxes | None) -> Verifier:
    """Build the verifier; check at once that the language's tool chain is installed.

    Raises:
        ConfigError: The tool chain is missing, or there are no sandboxes to run in.
    """
    if sandboxes is None:
        raise ConfigError("the reward 'code' runs programs, and was given no sandboxes to run them in.")
    if sandboxes.config.own_tools and (missing := missing_tool(config.language)):
        raise ConfigError(f"reward 'code': {missing}.")
    verifier = CodeVerifier(config, sandboxes)
    return Verifier(judge=verifier.judge, decides=True, state=verifier.limits.state, restore=verifier.limits.restore)
