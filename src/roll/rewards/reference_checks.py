"""Find invalid references before a run, by scoring every reference against itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from roll.config.rewards import ChoiceReward, MathReward, RewardConfig, ShortAnswerReward
from roll.errors import MalformedPromptError, shorten
from roll.protocols import WorkerPool
from roll.rewards import math
from roll.rewards.base import MAX_TEXT_LENGTH, run_in_pool
from roll.rewards.choice import extract_letter, get_question, parse_options
from roll.rewards.final_answer import extract_reference
from roll.rewards.mathematics.plain_number import parse_number
from roll.rewards.short_answer import get_references
from roll.types import Prompt

__all__ = ["InvalidReference", "check_reference", "check_references", "find_invalid_references", "prepare_worker"]

ROWS_PER_CALL = 200
CALL_TIMEOUT_S = 120.0
"""Timeout of one call in seconds; after a timeout, the references of the call are skipped."""
REFERENCE_TIMEOUT_S = 0.5
"""Timeout of the check of one reference, in seconds."""

ReferenceRow: TypeAlias = tuple[RewardConfig, str, str]
"""A component of a reward, a reference, and the question."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InvalidReference:
    """A prompt with an invalid reference, which no answer can match."""

    uid: str
    problem: str


def prepare_worker() -> None:
    """Import the packages that comparisons need, before any time limit applies."""
    math.prepare_worker()


def check_references(rows: Sequence[ReferenceRow]) -> list[str]:
    """Return, for each row, the problem with its reference; an empty string if the reference is valid."""
    return [check_reference(config, reference, question) for config, reference, question in rows]


def check_reference(config: RewardConfig, reference: str, question: str = "") -> str:
    """Return the problem with a reference; an empty string if the reference is valid.

    Args:
        config: A component of a reward; only references of the types `math` and `choice` are checked.
        reference: The prompt's answer.
        question: The prompt's last message, which may list options.
    """
    if isinstance(config, MathReward):
        return _check_math_reference(config, reference)
    if isinstance(config, ChoiceReward):
        options = parse_options(question, config.letters)
        if extract_letter(reference, config.letters, options) is None:
            return f"{shorten(reference)} contains none of the letters {config.letters}, and is no option of the prompt"
    return ""


def _check_math_reference(config: MathReward, reference: str) -> str:
    answer = extract_reference(reference)
    if not answer.strip():
        return f"the box or mark in {shorten(reference)} is empty"
    if "\\boxed" in answer:
        return f"{shorten(reference[-MAX_TEXT_LENGTH:])} has a box that is not closed"
    if len(answer) > math.MAX_ANSWER_LENGTH:
        return (
            f"{shorten(reference)} has {len(answer):,} characters and no box, but an answer of more than "
            f"{math.MAX_ANSWER_LENGTH:,} characters is always wrong"
        )
    texts = {"boxed": [f"\\boxed{{{answer}}}"], "last_number": [answer]}.get(config.extract)
    verdicts = [
        math.score_math(text, reference, config.extract, REFERENCE_TIMEOUT_S)
        for text in texts or [f"\\boxed{{{answer}}}", f"<answer>{answer}</answer>"]
    ]
    if any(right for right, _ in verdicts):
        return ""
    return f"{shorten(answer)} does not match itself ({verdicts[0][1]}, extract: {config.extract})"


async def find_invalid_references(
    pool: WorkerPool, prompts: Sequence[tuple[Sequence[RewardConfig], Prompt]]
) -> list[InvalidReference]:
    """Return the prompts with invalid references.

    References that are plain numbers, or single letters of a choice, are valid without a check in a worker.

    Args:
        pool: The pool that runs the comparisons.
        prompts: The prompts, each with its reward's components.
    """
    invalid: list[InvalidReference] = []
    rows: list[tuple[str, ReferenceRow]] = []
    for configs, prompt in prompts:
        for config in configs:
            if isinstance(config, ShortAnswerReward):
                try:
                    get_references(config, prompt)
                except MalformedPromptError as error:
                    invalid.append(InvalidReference(uid=prompt.uid, problem=error.problem))
            elif not _is_plain(config, prompt.answer):
                rows.append((prompt.uid, (config, prompt.answer, get_question(prompt))))
    for begin in range(0, len(rows), ROWS_PER_CALL):
        part = rows[begin : begin + ROWS_PER_CALL]
        try:
            problems = await run_in_pool(pool, check_references, [row for _, row in part], time_limit_s=CALL_TIMEOUT_S)
        except TimeoutError:
            continue
        invalid += [
            InvalidReference(uid=uid, problem=problem)
            for (uid, _), problem in zip(part, problems, strict=True)
            if problem
        ]
    return invalid


def _is_plain(config: RewardConfig, reference: str) -> bool:
    """Return whether a reference needs no check.

    No check is needed for a plain number in `math`, for a letter in `choice`, and for other types of rewards.
    """
    if isinstance(config, MathReward):
        return parse_number(reference) is not None
    return not isinstance(config, ChoiceReward) or (len(reference.strip()) == 1 and reference.strip() in config.letters)
