"""Check that an answer follows the instructions in its prompt's metadata, as IFEval does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from roll.config.rewards import InstructionsReward
from roll.errors import DataError, MalformedPromptError
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, in_pool
from roll.rewards.instruction_checks import InstructionError, check, variants
from roll.types import Prompt, Rollout

__all__ = ["followed", "instructions_of", "instructions_verifier"]

LONGEST_TEXT = 100_000

Instruction = tuple[str, dict[str, Any]]


def followed(text: str, instructions: Sequence[Instruction], loose: bool) -> list[bool] | str:
    """Return whether the text follows each instruction; if one is unusable, return a description of the problem.

    Args:
        text: The answer.
        instructions: Names with their arguments.
        loose: Whether a variant of the text may follow the instruction instead: see `variants`.
    """
    texts = variants(text) if loose else [text]
    try:
        return [any(check(name, arguments, text) for text in texts) for name, arguments in instructions]
    except InstructionError as error:
        return str(error)


def instructions_of(prompt: Prompt, config: InstructionsReward) -> list[Instruction]:
    """Return the instructions in the prompt's metadata.

    Raises:
        DataError: The column does not exist.
        MalformedPromptError: This prompt's instructions are malformed.
    """
    if config.ids_key not in prompt.metadata:
        known = ", ".join(map(repr, prompt.metadata)) or "none"
        raise DataError(
            f"prompt '{prompt.uid}' has no column '{config.ids_key}' with instructions (it has: {known}): set "
            "`ids_key` of the reward 'instructions', or choose another reward for this source."
        )
    names = _plain(prompt.metadata[config.ids_key])
    arguments = _plain(prompt.metadata.get(config.arguments_key))
    arguments = [{}] * len(names) if arguments is None and isinstance(names, list) else arguments
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise _unusable(prompt, f"'{config.ids_key}' must be a list of instructions, got {names!r:.80}")
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise _unusable(
            prompt, f"'{config.arguments_key}' must be a list of {len(names)} entries, got {arguments!r:.80}"
        )
    if not all(entry is None or isinstance(entry, Mapping) for entry in arguments):
        raise _unusable(prompt, f"entries of '{config.arguments_key}' must be mappings, got {arguments!r:.80}")
    return [(name, dict(entry or {})) for name, entry in zip(names, arguments, strict=True)]


def _plain(value: Any) -> Any:
    """Return a list, also for a list that is written as JSON or stored as an array."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return list(value) if isinstance(value, tuple) or hasattr(value, "tolist") else value


def _unusable(prompt: Prompt, problem: str) -> MalformedPromptError:
    return MalformedPromptError(prompt.uid, f"it cannot be scored: {problem}.")


def instructions_verifier(config: InstructionsReward, pool: WorkerPool) -> Verifier:
    """Build the verifier, which checks in the pool. A task is solved if every instruction is followed."""

    async def judge(rollout: Rollout) -> Judgement:
        wanted = instructions_of(rollout.prompt, config)
        text = rollout.text[:LONGEST_TEXT]
        results = await in_pool(pool, followed, text, wanted, config.loose, time_limit_s=config.time_limit_s)
        if isinstance(results, str):
            raise _unusable(rollout.prompt, results)
        share = sum(results) / len(results)
        parts: dict[str, float] = {}
        for (name, _), result in zip(wanted, results, strict=True):
            parts[name] = min(parts.get(name, 1.0), float(result))
        solved = all(results)
        verdict = "follows all" if solved else f"follows {sum(results)} of {len(results)}"
        return Judgement(
            value=share if config.score == "share" else float(solved), verdict=verdict, correct=solved, parts=parts
        )

    return Verifier(judge=judge, decides=True)
