"""What `roll check` says of the tests of programs: those that cannot be used, and those that no answer could pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from roll.config.data import DataConfig
from roll.config.rewards.code import CodeReward
from roll.config.sandbox import SandboxConfig
from roll.data.build import load_source
from roll.data.source import Source
from roll.rewards.code.judgeable import importable, why_not
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.tasks import MalformedTestsError
from roll.rewards.code.verifier import CodeVerifier
from roll.types import Prompt

__all__ = ["notes_on_tests"]

MAX_PROMPTS = 20_000
"""Of one source; reading a task takes well under a millisecond."""


def notes_on_tests(data: Sequence[DataConfig], sandbox: SandboxConfig, seed: int) -> Iterator[str]:
    """For each source with a code reward, how many of its prompts have tests that fail every answer, and the first.

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
    prompts = [prompt for source in load_source(entry, domain, seed) for prompt in _some(source)]
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


def _some(source: Source) -> list[Prompt]:
    return [source[index] for index in range(min(len(source), MAX_PROMPTS))]
