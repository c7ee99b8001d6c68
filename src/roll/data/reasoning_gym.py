"""Prompts from the tasks of the `reasoning-gym` package, which are seeded generators with task-specific scorers."""

from __future__ import annotations

import random
from typing import Any

from roll.config.data import ReasoningGymData
from roll.data.conversations import build_messages
from roll.data.source import PromptList
from roll.errors import DataError
from roll.registry import did_you_mean
from roll.types import Prompt

__all__ = ["build_reasoning_gym_prompts", "load_task"]

HELD_OUT_SEED_OFFSET = 1_000_003
"""Held-out tasks are generated from another seed; those that also occur in training are removed."""


def load_task(name: str, size: int, seed: int, options: dict[str, Any]) -> Any:
    """Load reasoning-gym's dataset for a task, with `size` items generated from `seed`.

    Raises:
        DataError: The task does not exist, or rejects the options.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise DataError(
            f"reasoning-gym has no task '{name}'.{did_you_mean(name, list(DATASETS))} See "
            '`python -c "from reasoning_gym.factory import DATASETS; print(*DATASETS)"` for all of them.'
        )
    refused = sorted({"seed", "size"} & set(options))
    if refused:
        raise DataError(
            f"reasoning-gym task '{name}': {refused} in `options` are set by `size` and the run's seed: remove them."
        )
    known = list(DATASETS[name][1].__dataclass_fields__)
    for option in options:
        if option not in known:
            settable = ", ".join(field for field in known if field not in ("seed", "size"))
            raise DataError(
                f"reasoning-gym task '{name}' has no option '{option}'.{did_you_mean(option, known)} Available "
                f"options: {settable}."
            )
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except Exception as error:  # tasks may raise anything for invalid options
        problem = str(error) or type(error).__name__
        raise DataError(f"reasoning-gym task '{name}' rejected the options {options}: {problem}") from error


def build_reasoning_gym_prompts(config: ReasoningGymData, domain: str, seed: int) -> tuple[PromptList, PromptList]:
    """Build training prompts, and held-out prompts that differ from all training prompts.

    Raises:
        DataError: The task does not exist, rejects the options, or has too few distinct questions for a held-out split.
    """
    num_held_out = round(config.size * config.held_out)
    training = _build_prompts(config, domain, seed, config.size, "")
    if not num_held_out:
        return PromptList(training), PromptList([])
    seen = {prompt.messages[-1].text for prompt in training}
    other = _build_prompts(config, domain, seed + HELD_OUT_SEED_OFFSET, num_held_out, "held_out/")
    held_out = [prompt for prompt in other if prompt.messages[-1].text not in seen]
    if not held_out:
        raise DataError(
            f"reasoning-gym task '{config.task}' has too few distinct questions to hold any out with size "
            f"{config.size}: lower `size`, make the task larger with `options`, or set held_out: 0."
        )
    return PromptList(training), PromptList(held_out)


def _build_prompts(config: ReasoningGymData, domain: str, seed: int, size: int, prefix: str) -> list[Prompt]:
    task = load_task(config.task, size, seed, config.options)
    return [
        Prompt(
            uid=f"{domain}/{prefix}{index}",
            domain=domain,
            messages=build_messages(entry["question"], config.system_prompt, config.prompt_template),
            answer=str(entry["answer"]),
            metadata={"reasoning_gym": {"task": config.task, "options": config.options, "entry": entry}},
        )
        for index, entry in enumerate(_generate_entry(task, config.task, seed, i) for i in range(size))
    ]


def _generate_entry(task: Any, name: str, seed: int, index: int) -> dict[str, Any]:
    """Generate one item of a task; the item depends only on the seed and the index."""
    # Some tasks draw from the process-wide generator instead of their own, so it is seeded, and restored afterwards.
    before = random.getstate()
    random.seed(f"{name}/{seed}/{index}")
    try:
        return task[index]
    except Exception as error:  # a generator that cannot satisfy its options may raise anything
        problem = str(error) or type(error).__name__
        raise DataError(f"reasoning-gym task '{name}' failed to generate item {index}: {problem}") from error
    finally:
        random.setstate(before)
