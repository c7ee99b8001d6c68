"""`roll reward test`: scores a file of answers, line by line, and reports the results.

configuration, or rewards named on the command line ──► rewards by domain ─┐
lines of the file ──► rollouts ──► scored in parallel by the workers ──────┴──► a table, a summary, an exit code
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from roll.cli.answer_files import ANSWER_KEYS, AnswerLine, encode_words, read_answers
from roll.cli.score_report import ScoredLine, format_json_lines, render
from roll.config.base import Section, option
from roll.config.rewards import RewardConfig, RewardList, expand_rewards
from roll.config.run import RunConfig
from roll.config.sandbox import SandboxConfig
from roll.errors import ConfigError, InfraError, UserError
from roll.process_environment import prepare_environment

__all__ = ["parse_rewards", "read_rewards_by_domain", "score_file"]

_PENALTY_TYPES = {"length", "repetition"}


class _CommandLineRewards(Section):
    """Rewards given on the command line, parsed like `reward` in a data source."""

    reward: RewardList = option(..., "Rewards of an answer.")


def parse_rewards(texts: Sequence[str]) -> list[RewardConfig]:
    """Parse rewards, each written as in a YAML configuration: `math`, or `{type: math, extract: boxed}`.

    Raises:
        ConfigError: a reward is malformed.
    """
    import yaml
    from pydantic import ValidationError

    from roll.config.document import Document
    from roll.config.problems import describe_errors, format_problems

    entries: list[Any] = []
    for text in texts:
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--reward {text!r} is not valid YAML: {str(error).splitlines()[0]}.") from None
        if isinstance(value, str) and ":" in value:
            raise ConfigError(
                f"--reward {text!r} names a function, not a type of reward: "
                f"write \"{{type: python, function: '{value}'}}\"."
            )
        entries += value if isinstance(value, list) else [value]
    tree = {"reward": expand_rewards(entries)}
    try:
        return _CommandLineRewards.model_validate(tree).reward
    except ValidationError as error:
        raise ConfigError(
            format_problems(describe_errors(error, Document(name="", tree=tree), _CommandLineRewards))
        ) from None


def score_file(
    path: str,
    config: str | None,
    overrides: Sequence[str],
    reward_texts: Sequence[str],
    *,
    jobs: int | None,
    limit: int | None,
    as_json: bool,
) -> int:
    """Score the answers of a file and print the results.

    Args:
        path: a JSON Lines file: see `roll.cli.answer_files`.
        config: configuration with the rewards; with several domains, each line's `domain` selects the rewards.
        overrides: overrides of the configuration.
        reward_texts: rewards as YAML; they replace the rewards of a configuration.
        jobs: number of answers that are scored concurrently; by default the number of CPUs.
        limit: maximum number of answers to score.
        as_json: whether to print one JSON object per line instead of a table.

    Returns:
        The exit code: 1 if an answer could not be scored or its result differs from `expected`, otherwise 0.

    Raises:
        UserError: the file, the configuration or a reward cannot be used.
    """
    if (config is None) == (not reward_texts):
        raise ConfigError("exactly one of --config FILE and --reward TYPE (which may be repeated) is required.")
    if overrides and config is None:
        raise ConfigError(f"the override '{overrides[0]}' requires --config.")
    rewards_by_domain, loaded = read_rewards_by_domain(config, overrides, reward_texts)
    model = loaded.model.path if loaded else None
    penalised = any(reward.type in _PENALTY_TYPES for rewards in rewards_by_domain.values() for reward in rewards)
    tokens = _load_tokenize_function(model) if penalised else lambda text: [0] * len(text.split())
    lines = list(read_answers(Path(path), list(rewards_by_domain), tokens, limit))
    _check_answers(path, lines, rewards_by_domain)
    started = perf_counter()
    found = asyncio.run(_score(lines, rewards_by_domain, loaded, jobs or os.cpu_count() or 1))
    wall_s = perf_counter() - started
    note = (
        "lengths are counted in words; with --config they are counted in tokens" if penalised and model is None else ""
    )
    click.echo(format_json_lines(found) if as_json else render(found, wall_s, note))
    return 1 if any(scored.result is None or scored.is_unexpected for scored in found) else 0


def read_rewards_by_domain(
    config: str | None, overrides: Sequence[str], reward_texts: Sequence[str]
) -> tuple[dict[str, list[RewardConfig]], RunConfig | None]:
    """Return the rewards of each domain, and the configuration that defines them.

    Without `config`, the rewards are those in `reward_texts`, under the domain "", and the configuration is `None`.
    """
    if config is None:
        return {"": parse_rewards(reward_texts)}, None
    from roll.config.load import load_config

    loaded = load_config(config, list(overrides))
    rewards_by_domain = {entry.domain or entry.source: list(entry.reward) for entry in loaded.get_section("data", list)}
    return rewards_by_domain, loaded


def _load_tokenize_function(model: str | None) -> Callable[[str], list[int]]:
    """Return a function that tokenizes text for length penalties, with the model's tokenizer or by words."""
    if model is None:
        return encode_words
    prepare_environment()
    from roll.models import load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _check_answers(
    path: str, lines: Iterable[AnswerLine], rewards_by_domain: Mapping[str, Sequence[RewardConfig]]
) -> None:
    for line in lines:
        comparing = [reward.type for reward in rewards_by_domain[line.domain] if reward.needs_answer]
        if comparing and not line.rollout.prompt.answer.strip():
            others = ", ".join(map(repr, line.rollout.prompt.metadata))
            raise ConfigError(
                f"'{path}', line {line.number}: the reward '{comparing[0]}' requires a reference answer: add the key "
                f"{' or '.join(ANSWER_KEYS)}." + (f" Other keys of the line: {others}." if others else "")
            )


async def _score(
    lines: Sequence[AnswerLine],
    rewards_by_domain: Mapping[str, Sequence[RewardConfig]],
    config: RunConfig | None,
    jobs: int,
) -> list[ScoredLine]:
    from roll.cluster.pool import LocalWorkerPool
    from roll.rewards.opening import open_reward_lists

    places = asyncio.Semaphore(jobs)
    async with AsyncExitStack() as stack:
        pool = LocalWorkerPool(jobs)
        stack.push_async_callback(pool.close)
        if config is None:
            opening = open_reward_lists(rewards_by_domain, SandboxConfig(), pool)
        else:
            from roll.cluster.local import LocalCluster
            from roll.pipelines.judge import start_scoring

            prepare_environment()
            opening = start_scoring(config, LocalCluster(), pool)  # a judge always runs in this process
        rewards = await stack.enter_async_context(opening)

        async def score(line: AnswerLine) -> ScoredLine:
            async with places:
                started = perf_counter()
                try:
                    result, problem = await rewards[line.domain](line.rollout), ""
                except InfraError as error:
                    if isinstance(error.__cause__, UserError):
                        raise type(error.__cause__)(f"line {line.number}: {error.__cause__}") from error
                    result, problem = None, str(error)
                return ScoredLine(line=line, result=result, problem=problem, duration_s=perf_counter() - started)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(score(line)) for line in lines]
        return [task.result() for task in tasks]
