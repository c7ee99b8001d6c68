"""Tries a run's rewards before it starts: does the correct answer score higher than a wrong one?

Also the tests of programs: which are unusable, and which could no answer pass?
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack

from roll.cluster.pool import LocalWorkerPool
from roll.config.data import DataConfig
from roll.config.rewards import JudgeReward, PythonReward, RewardConfig
from roll.config.rewards.code import CodeReward
from roll.config.sandbox import SandboxConfig
from roll.data.build import load_source
from roll.errors import ConfigError, InfraError, UnscorableError
from roll.preflight.report import RewardTrial
from roll.rewards.base import answered
from roll.rewards.code.judgeable import importable, why_not
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.tasks import MalformedTestsError
from roll.rewards.code.verifier import CodeVerifier
from roll.rewards.opening import open_reward_lists
from roll.types import Prompt

__all__ = ["check_rewards", "notes_on_tests", "try_rewards"]

LONGEST_TRIAL_S = 20.0
"""Timeout of a trial: a reward that needs longer is not checked before the run."""


async def try_rewards(sandbox: SandboxConfig, prompts: Sequence[tuple[DataConfig, Prompt]]) -> list[RewardTrial]:
    """Score a correct and a wrong answer to each prompt, in a worker process as in a run.

    Args:
        sandbox: where programs run.
        prompts: one prompt of each domain, with its source.

    Raises:
        ConfigError: a reward cannot score at all.
        UserError: a reward cannot be opened.
    """
    trials: list[RewardTrial] = []
    async with AsyncExitStack() as stack:
        pool = LocalWorkerPool(1)
        stack.push_async_callback(pool.close)
        lists = {prompt.domain: entry.reward for entry, prompt in prompts}
        rewards = await stack.enter_async_context(open_reward_lists(lists, sandbox, pool))
        for entry, prompt in prompts:
            reward = rewards[prompt.domain]
            right, wrong = _answers(entry, prompt)
            try:
                values = [(await reward(answered(prompt, text))).value for text in (right, wrong)]
            except InfraError as error:
                raise ConfigError(f"the reward of '{prompt.domain}' does not work: {error}") from None
            if not prompt.answer and any(reward.needs_sandbox for reward in entry.reward):
                continue  # programs ran, but no correct one is known
            trials.append(
                RewardTrial(
                    domain=prompt.domain, right=right, right_value=values[0], wrong=wrong, wrong_value=values[1]
                )
            )
    return trials


async def check_rewards(sandbox: SandboxConfig, prompts: Sequence[tuple[DataConfig, Prompt]]) -> None:
    """Check the external parts of a run's rewards: the user's own functions, sandboxes, and judges.

    A reward that takes longer than `LONGEST_TRIAL_S` is not checked.

    Args:
        sandbox: where programs run.
        prompts: one prompt of each domain, with its source.

    Raises:
        ConfigError: a reward raises for every answer.
        UserError: a reward cannot be opened.
    """
    tried = [(entry, prompt, parts) for entry, prompt in prompts if (parts := _that_may_fail(entry, prompt))]
    if not tried:
        return
    with contextlib.suppress(TimeoutError):
        async with AsyncExitStack() as stack, asyncio.timeout(LONGEST_TRIAL_S):
            pool = LocalWorkerPool(1)
            stack.push_async_callback(pool.close)
            lists = {prompt.domain: parts for _, prompt, parts in tried}
            rewards = await stack.enter_async_context(open_reward_lists(lists, sandbox, pool))
            for entry, prompt, _ in tried:
                failure: InfraError | None = None
                for text in _answers(entry, prompt):
                    try:
                        await rewards[prompt.domain](answered(prompt, text))
                        break
                    except UnscorableError:  # this prompt cannot be scored: the run drops such prompts
                        break
                    except InfraError as error:
                        failure = error
                else:
                    raise ConfigError(f"the reward of '{prompt.domain}' does not work: {failure}")


def _that_may_fail(entry: DataConfig, prompt: Prompt) -> list[RewardConfig]:
    """Return the rewards of a source that depend on more than this library and can be tried without engines."""
    if prompt.environment is not None:  # the reward of an environment needs an episode
        return []
    kinds = (PythonReward, JudgeReward)
    return [r for r in entry.reward if (isinstance(r, kinds) or r.needs_sandbox) and not r.asks_own_judge]


def _answers(entry: DataConfig, prompt: Prompt) -> tuple[str, str]:
    """Return the reference answer, boxed if the reward looks for a box, and an answer that is certainly wrong."""
    answer = prompt.answer
    wrong = str(int(answer) + 1) if answer.lstrip("-").isdecimal() else "no idea"
    boxed = any(getattr(config, "extract", "") == "boxed" for config in entry.reward)
    return (f"\\boxed{{{answer}}}", f"\\boxed{{{wrong}}}") if boxed else (answer, wrong)


MAX_PROMPTS = 20_000
"""Maximum number of prompts of one source; reading a task takes well under a millisecond."""


def notes_on_tests(data: Sequence[DataConfig], sandbox: SandboxConfig, seed: int) -> Iterator[str]:
    """Yield, for each source with a code reward, how many prompts have tests that fail every answer, and the first.

    Raises:
        ConfigError: a package of `sandbox.packages` is not installed.
        DataError: a source cannot be read.
    """
    for entry in data:
        for reward in entry.reward:
            if isinstance(reward, CodeReward):
                yield from _of_source(entry, reward, sandbox, seed)


def _of_source(entry: DataConfig, reward: CodeReward, sandbox: SandboxConfig, seed: int) -> Iterator[str]:
    domain = entry.domain or entry.source
    sources = load_source(entry, domain, seed)
    prompts = [source[index] for source in sources for index in range(min(len(source), MAX_PROMPTS))]
    verifier = CodeVerifier(reward, CodeSandboxes(sandbox))
    packages = importable(sandbox)
    found: list[tuple[str, str]] = []
    for prompt in prompts:
        try:
            reason = why_not(verifier.task(prompt), packages)
        except MalformedTestsError as error:
            reason = str(error)
        if reason:
            found.append((prompt.uid, reason))
    if found:
        uid, reason = found[0]
        yield (
            f"the tests of {len(found)} of {len(prompts)} prompts of '{domain}' cannot judge an answer: leave these "
            f"prompts out, or change their tests. The first is '{uid}': {reason.rstrip('.')}."
        )
