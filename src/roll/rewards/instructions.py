"""Check that an answer follows the instructions in its prompt's metadata, as IFEval does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from roll.config.rewards import InstructionsReward
from roll.errors import DataError, MalformedPromptError
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, run_in_pool
from roll.rewards.instruction_checks import InstructionError, build_loose_variants, check_instruction
from roll.types import Prompt, Rollout

__all__ = ["build_instructions_verifier", "check_instructions", "parse_instructions"]

MAX_TEXT_LENGTH = 100_000

Instruction = tuple[str, dict[str, Any]]


def check_instructions(text: str, instructions: Sequence[Instruction], loose: bool) -> list[bool] | str:
    """Return whether the text follows each instruction; if an instruction is invalid, return a description of the
    problem.

    Args:
        text: The answer.
        instructions: Names with their arguments.
        loose: Whether to accept a text if one of its variants from `build_loose_variants` follows the instruction.
    """
    texts = build_loose_variants(text) if loose else [text]
    try:
        return [any(check_instruction(name, arguments, text) for text in texts) for name, arguments in instructions]
    except InstructionError as error:
        return str(error)


def parse_instructions(prompt: Prompt, config: InstructionsReward) -> list[Instruction]:
    """Return the instructions in the prompt's metadata.

    Raises:
        DataError: The column does not exist.
        MalformedPromptError: This prompt's instructions are malformed.
    """
    if config.ids_key not in prompt.metadata:
        known = ", ".join(map(repr, prompt.metadata)) or "none"
        raise DataError(
            f"prompt '{prompt.uid}' has no column '{config.ids_key}' with instructions (columns: {known}): set "
            "`ids_key` of the reward 'instructions', or choose another reward for this source."
        )
    names = _parse_list(prompt.metadata[config.ids_key])
    arguments = _parse_list(prompt.metadata.get(config.arguments_key))
    arguments = [{}] * len(names) if arguments is None and isinstance(names, list) else arguments
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise _make_error(prompt, f"column '{config.ids_key}' must be a list of instructions, got {names!r:.80}")
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise _make_error(
            prompt, f"column '{config.arguments_key}' must be a list of {len(names)} entries, got {arguments!r:.80}"
        )
    if not all(entry is None or isinstance(entry, Mapping) for entry in arguments):
        raise _make_error(prompt, f"column '{config.arguments_key}' must be a list of mappings, got {arguments!r:.80}")
    return [(name, dict(entry or {})) for name, entry in zip(names, arguments, strict=True)]


def _parse_list(value: Any) -> Any:
    """Convert a JSON string or an array to a list; return any other value unchanged."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return list(value) if isinstance(value, tuple) or hasattr(value, "tolist") else value


def _make_error(prompt: Prompt, problem: str) -> MalformedPromptError:
    return MalformedPromptError(prompt.uid, f"it cannot be scored: {problem}.")


def build_instructions_verifier(config: InstructionsReward, pool: WorkerPool) -> Verifier:
    """Build the verifier of the reward `instructions`. It runs in the worker pool. A task is solved if the answer
    follows all instructions.
    """

    async def judge(rollout: Rollout) -> Judgement:
        wanted = parse_instructions(rollout.prompt, config)
        text = rollout.text[:MAX_TEXT_LENGTH]
        results = await run_in_pool(
            pool, check_instructions, text, wanted, config.loose, time_limit_s=config.time_limit_s
        )
        if isinstance(results, str):
            raise _make_error(rollout.prompt, results)
        share = sum(results) / len(results)
        parts: dict[str, float] = {}
        for (name, _), result in zip(wanted, results, strict=True):
            parts[name] = min(parts.get(name, 1.0), float(result))
        solved = all(results)
        verdict = "follows all" if solved else f"follows {sum(results)} of {len(results)}"
        return Judgement(
            value=share if config.score == "share" else float(solved), verdict=verdict, correct=solved, parts=parts
        )

    return Verifier(judge=judge, decides_correctness=True)
