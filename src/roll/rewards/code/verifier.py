"""Score programs by running them: see docs/code-rewards.md.

    stdin and call cases ──► one sandbox, a process per case ──► outputs ──► compared as text and plain data (`batch`)
    assert, check, pytest ──► candidate's sandbox ◄── plain data ──► checker's sandbox ──► verdicts (`checker_run`)

All data from a candidate's sandbox is untrusted. The expected results are never in that sandbox.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence

from roll.config.rewards.code import CodeReward
from roll.errors import ConfigError, MalformedPromptError, UnscorableError
from roll.rewards.adaptive_limits import AdaptiveLimits
from roll.rewards.base import Judgement, Verifier
from roll.rewards.code.batch import BatchRun
from roll.rewards.code.checker_run import CheckerRun
from roll.rewards.code.extract import extract_code
from roll.rewards.code.languages import describe_missing_tool
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.tasks import MalformedTestsError, Task, TestCase, parse_task
from roll.rewards.code.verdicts import SKIPPED, BrokenTestsError, CaseVerdict
from roll.types import Prompt, Rollout
from roll_sandbox import OversizedUploadError

__all__ = ["CodeVerifier", "build_code_verifier", "run_cases"]

_MAX_CACHED_TASKS = 1024


class CodeVerifier:
    """Scores answers to the prompts of one source by running their code."""

    def __init__(self, config: CodeReward, sandboxes: CodeSandboxes) -> None:
        self._config, self._sandboxes = config, sandboxes
        self.limits = AdaptiveLimits(config.min_cpu_s, config.max_cpu_s, config.cpu_factor)
        self._tasks: OrderedDict[str, Task] = OrderedDict()

    async def judge(self, rollout: Rollout) -> Judgement:
        """Extract the program, run it on every case, and count the passed cases.

        Raises:
            MalformedPromptError: The prompt's tests cannot be used.
            UnscorableError: The tests cannot be run with this answer.
            InfraError: A sandbox, or one of ROLL's programs, failed.
        """
        uid = rollout.prompt.uid
        try:
            task = self.get_task(rollout.prompt)
        except MalformedTestsError as error:
            raise MalformedPromptError(uid, f"its tests cannot be used: {error}") from error
        code = extract_code(rollout.text, task.language, names=task.names, reads_input=task.reads_input)
        if code is None:
            return self._make_judgement([], task, "no code")
        if len(code.encode("utf-8", "surrogatepass")) > self._config.max_code_bytes:
            return self._make_judgement([], task, "too long")
        limits_s = [self.limits.compute_cpu_limit_s(uid, case) for case in range(len(task.cases))]
        try:
            async with self._sandboxes.slots:
                verdicts = await run_cases(self._sandboxes, task, code, limits_s, self._config)
        except (BrokenTestsError, OversizedUploadError, ConfigError) as error:
            # The tests may be valid, and only this answer may break them, so other answers are still tried.
            raise UnscorableError(f"prompt '{uid}': its tests cannot be run: {error}") from error
        for case, verdict in enumerate(verdicts):
            if verdict.verdict == "passed":
                self.limits.record_pass(uid, case, verdict.cpu_s)
        return self._make_judgement(verdicts, task, "")

    def get_task(self, prompt: Prompt) -> Task:
        """Return the prompt's parsed tests; the tests of a prompt are parsed only once.

        Raises:
            MalformedTestsError: The tests cannot be used, or their language's tool chain is missing.
        """
        task = self._tasks.get(prompt.uid)
        if task is None:
            config, row = self._config, prompt.metadata
            if config.tests_key not in row:
                columns = ", ".join(sorted(map(str, row))) or "none"
                raise MalformedTestsError(f"column '{config.tests_key}' does not exist (columns: {columns}).")
            task = parse_task(
                row[config.tests_key],
                language=row.get(config.language_key) or config.language,
                entry=row.get(config.entry_point_key),
                setup=row.get(config.setup_key) or "",
                modules=config.modules,
            )
            if self._sandboxes.config.can_use_local_tools and (missing := describe_missing_tool(task.language)):
                raise MalformedTestsError(missing)
            self._tasks[prompt.uid] = task
            if len(self._tasks) > _MAX_CACHED_TASKS:
                self._tasks.popitem(last=False)
        return task

    def _make_judgement(self, verdicts: list[CaseVerdict], task: Task, reason: str) -> Judgement:
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
        limits_s: Limit on the CPU time of each case.
        config: The reward's settings.

    Raises:
        SandboxError: A sandbox failed.
        RewardInfraError: One of ROLL's programs crashed.
        BrokenTestsError: The tests cannot be run, whatever the answer is.
    """
    deadline_s = asyncio.get_running_loop().time() + config.time_limit_s
    verdicts = [SKIPPED] * len(task.cases)
    numbered = list(enumerate(task.cases))
    plain = [(i, case) for i, case in numbered if not isinstance(case, TestCase)]
    tests = [(i, case) for i, case in numbered if isinstance(case, TestCase)]
    if plain:
        verdicts_of_part = await BatchRun(sandboxes, task, code, config, deadline_s).run(
            [(case, limits_s[i]) for i, case in plain]
        )
        for (i, _), verdict in zip(plain, verdicts_of_part, strict=True):
            verdicts[i] = verdict
    # With `credit: all`, one failed case already decides, so the checker's sandbox need not start.
    if tests and not (config.credit == "all" and any(verdicts[i].passed < 1 for i, _ in plain)):
        verdicts_of_part = await CheckerRun(sandboxes, task, code, config, deadline_s).run(
            [(case, limits_s[i]) for i, case in tests]
        )
        for (i, _), verdict in zip(tests, verdicts_of_part, strict=True):
            verdicts[i] = verdict
    return verdicts


def build_code_verifier(config: CodeReward, sandboxes: CodeSandboxes | None) -> Verifier:
    """Build the verifier of the reward `code`, after checking that the language's tool chain is installed.

    Raises:
        ConfigError: The tool chain is missing, or there are no sandboxes to run in.
    """
    if sandboxes is None:
        raise ConfigError("the reward 'code' requires sandboxes, but none are available.")
    if sandboxes.config.can_use_local_tools and (missing := describe_missing_tool(config.language)):
        raise ConfigError(f"reward 'code': {missing}.")
    verifier = CodeVerifier(config, sandboxes)
    return Verifier(
        judge=verifier.judge, decides_correctness=True, state=verifier.limits.state, restore=verifier.limits.restore
    )
