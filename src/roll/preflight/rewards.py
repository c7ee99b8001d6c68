"""Tests a run's rewards before it starts: the correct answer must score higher than an incorrect one.

Also finds test cases of code rewards that are unusable, or that no answer can pass.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack

from roll.cluster.pool import LocalWorkerPool
from roll.config.data import DataConfig
from roll.config.rewards import JudgeReward, PythonReward, RemoteReward, RewardConfig
from roll.config.rewards.code import CodeReward
from roll.config.sandbox import SandboxConfig
from roll.data.build import load_source
from roll.errors import ConfigError, InfraError, UnscorableError
from roll.media import MediaStore
from roll.preflight.report import RewardTrial
from roll.rewards.base import build_rollout_from_answer
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.tasks import MalformedTestsError
from roll.rewards.code.unsupported_tests import describe_unsupported, find_importable_modules
from roll.rewards.code.verifier import CodeVerifier
from roll.rewards.compose import WeightedReward
from roll.rewards.opening import open_reward_lists
from roll.rewards.remote.client import ServiceUnreachableError
from roll.types import Prompt

__all__ = ["check_rewards", "describe_bad_tests", "try_rewards"]

TRIAL_TIMEOUT_S = 20.0
"""Timeout of a trial; slower rewards are not checked before the run."""
OTHER_ANSWERS = ("I do not know.", "")
"""Answers that models write although no reference answer has this form. A user's function must score them too."""


async def try_rewards(
    sandbox: SandboxConfig, prompts: Sequence[tuple[DataConfig, Prompt]], add_note: Callable[[str], None]
) -> list[RewardTrial]:
    """Score a correct and an incorrect answer to each prompt in a worker process, as in a run, and return both rewards.

    Prompts of code rewards without a reference answer are scored, but not returned.

    Args:
        sandbox: settings of the sandboxes in which programs run.
        prompts: one prompt of each domain, with its source.
        add_note: called with a message if a reward service cannot be reached from this machine.

    Raises:
        ConfigError: a reward fails.
        UserError: a reward cannot be opened.
    """
    trials: list[RewardTrial] = []
    async with AsyncExitStack() as stack:
        pool = LocalWorkerPool(1)
        stack.push_async_callback(pool.close)
        lists = {prompt.domain: [_send_once(reward) for reward in entry.reward] for entry, prompt in prompts}
        rewards = await stack.enter_async_context(open_reward_lists(lists, sandbox, pool))
        for entry, prompt in prompts:
            reward = rewards[prompt.domain]
            right, wrong = _build_answers(entry, prompt)
            try:
                values = [(await reward(build_rollout_from_answer(prompt, text))).value for text in (right, wrong)]
            except InfraError as error:
                if isinstance(error.__cause__, ServiceUnreachableError):
                    add_note(f"the reward of '{prompt.domain}' was not tested: {error.__cause__}.")
                    continue
                raise ConfigError(f"the reward of '{prompt.domain}' failed: {error}") from None
            await _try_other_answers(entry, prompt, reward)
            if not prompt.answer and any(reward.needs_sandbox for reward in entry.reward):
                continue  # no correct program is known, so the two values cannot be compared
            trials.append(
                RewardTrial(
                    domain=prompt.domain,
                    correct_answer=right,
                    correct_reward=values[0],
                    incorrect_answer=wrong,
                    incorrect_reward=values[1],
                )
            )
    return trials


async def _try_other_answers(entry: DataConfig, prompt: Prompt, reward: WeightedReward) -> None:
    """Score answers in ordinary prose with the user's reward functions, unless requests to services would be needed.

    Raises:
        ConfigError: The reward fails.
    """
    kinds = {type(config) for config in entry.reward}
    if PythonReward not in kinds or kinds & {JudgeReward, RemoteReward}:
        return
    for text in OTHER_ANSWERS:
        try:
            await reward(build_rollout_from_answer(prompt, text))
        except InfraError as error:
            raise ConfigError(
                f"the reward of '{prompt.domain}' failed for the answer {text!r}: {error}. A reward function must "
                "return a number for every answer, such as 0 if it cannot parse the answer"
            ) from None


def _send_once(reward: RewardConfig) -> RewardConfig:
    """Return the settings of a reward; if the reward is a service, disable retries."""
    if not isinstance(reward, RemoteReward):
        return reward
    return reward.model_copy(update={"max_attempts": 1, "time_limit_s": min(reward.time_limit_s, TRIAL_TIMEOUT_S)})


async def check_rewards(sandbox: SandboxConfig, prompts: Sequence[tuple[DataConfig, Prompt]]) -> None:
    """Check that rewards with external dependencies work: user-defined functions, sandboxes, external judges, and
    services.

    The check ends without an error after `TRIAL_TIMEOUT_S`.

    Args:
        sandbox: settings of the sandboxes in which programs run.
        prompts: one prompt of each domain, with its source.

    Raises:
        ConfigError: a reward fails for every answer.
        UserError: a reward cannot be opened.
    """
    tried = [(entry, prompt, parts) for entry, prompt in prompts if (parts := _list_external_rewards(entry, prompt))]
    if not tried:
        return
    with contextlib.suppress(TimeoutError):
        async with AsyncExitStack() as stack, asyncio.timeout(TRIAL_TIMEOUT_S):
            pool = LocalWorkerPool(1)
            stack.push_async_callback(pool.close)
            lists = {prompt.domain: parts for _, prompt, parts in tried}
            rewards = await stack.enter_async_context(open_reward_lists(lists, sandbox, pool))
            for entry, prompt, _ in tried:
                failure: InfraError | None = None
                for text in _build_answers(entry, prompt):
                    try:
                        await rewards[prompt.domain](build_rollout_from_answer(prompt, text))
                        break
                    except UnscorableError:  # the reward works; the run drops prompts that cannot be scored
                        break
                    except InfraError as error:
                        failure = error
                else:
                    raise ConfigError(f"the reward of '{prompt.domain}' failed: {failure}")


def _list_external_rewards(entry: DataConfig, prompt: Prompt) -> list[RewardConfig]:
    """Return the rewards of a source that have external dependencies, except those that need the run's engines."""
    if prompt.environment is not None:  # the reward of an environment needs an episode
        return []
    kinds = (PythonReward, JudgeReward, RemoteReward)
    return [r for r in entry.reward if (isinstance(r, kinds) or r.needs_sandbox) and not r.uses_own_judge]


def _build_answers(entry: DataConfig, prompt: Prompt) -> tuple[str, str]:
    """Return the reference answer and an incorrect answer to a prompt, in `\\boxed{}` if a reward expects that."""
    answer = prompt.answer
    wrong = str(int(answer) + 1) if answer.lstrip("-").isdecimal() else "no idea"
    boxed = any(getattr(config, "extract", "") == "boxed" for config in entry.reward)
    return (f"\\boxed{{{answer}}}", f"\\boxed{{{wrong}}}") if boxed else (answer, wrong)


MAX_PROMPTS = 20_000
"""Maximum number of prompts of one source; reading a task takes well under a millisecond."""


def describe_bad_tests(
    data: Sequence[DataConfig], sandbox: SandboxConfig, seed: int, media: MediaStore | None = None
) -> Iterator[str]:
    """Yield a message for each code-reward source with prompts whose tests reject every answer.

    Args:
        data: The sources.
        sandbox: The sandboxes of the run.
        seed: The seed of the run.
        media: A store for the media of rows; `None` for a text-only model.

    Raises:
        ConfigError: a package of `sandbox.packages` is not installed.
        DataError: a source cannot be read.
    """
    for entry in data:
        for reward in entry.reward:
            if isinstance(reward, CodeReward):
                yield from _find_bad_tests(entry, reward, sandbox, seed, media)


def _find_bad_tests(
    entry: DataConfig, reward: CodeReward, sandbox: SandboxConfig, seed: int, media: MediaStore | None
) -> Iterator[str]:
    domain = entry.domain or entry.source
    sources = load_source(entry, domain, seed, media=media)
    prompts = [source[index] for source in sources for index in range(min(len(source), MAX_PROMPTS))]
    verifier = CodeVerifier(reward, CodeSandboxes(sandbox))
    packages = find_importable_modules(sandbox)
    found: list[tuple[str, str]] = []
    for prompt in prompts:
        try:
            reason = describe_unsupported(verifier.get_task(prompt), packages)
        except MalformedTestsError as error:
            reason = str(error)
        if reason:
            found.append((prompt.uid, reason))
    if found:
        uid, reason = found[0]
        yield (
            f"the tests of {len(found)} of {len(prompts)} prompts of '{domain}' cannot verify an answer: remove these "
            f"prompts, or change the tests. The first is '{uid}': {reason.rstrip('.')}."
        )
