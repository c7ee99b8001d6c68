"""Score references against themselves before a run: no answer can equal a reference that does not equal itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from roll.config.rewards import ChoiceReward, MathReward, RewardConfig, ShortAnswerReward
from roll.errors import MalformedPromptError, short
from roll.protocols import WorkerPool
from roll.rewards import math
from roll.rewards.base import LONGEST_TEXT, in_pool
from roll.rewards.choice import chosen_letter, options_of, question_of
from roll.rewards.final_answer import reference_answer
from roll.rewards.mathematics.plain_number import number_of
from roll.rewards.short_answer import references_for
from roll.types import Prompt

__all__ = ["BadReference", "bad_references", "prepare_worker", "problem_of", "problems_of"]

ROWS_PER_CALL = 200
CALL_S = 120.0
"""Timeout of one call; the references of a slower call are not judged."""
LIMIT_S = 0.5
"""Timeout of one reference."""

Row: TypeAlias = tuple[RewardConfig, str, str]
"""A component of a reward, a reference, and the question."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadReference:
    """A prompt whose reference is not right against itself."""

    uid: str
    problem: str


def prepare_worker() -> None:
    """Import what comparisons need, before any time limit runs."""
    math.prepare_worker()


def problems_of(rows: Sequence[Row]) -> list[str]:
    """Return the problem with each row's reference; empty if the reference is valid."""
    return [problem_of(config, reference, question) for config, reference, question in rows]


def problem_of(config: RewardConfig, reference: str, question: str = "") -> str:
    """Return why no answer, not even the reference itself, would be right; empty if the reference is valid.

    Args:
        config: A component of a reward; only the types `math` and `choice` are checked.
        reference: The prompt's answer.
        question: The prompt's last message, which may list options.
    """
    if isinstance(config, MathReward):
        return _problem_of_math(config, reference)
    if isinstance(config, ChoiceReward):
        options = options_of(question, config.letters)
        if chosen_letter(reference, config.letters, options) is None:
            return f"{short(reference)} names none of the letters {config.letters}, nor an option of the prompt"
    return ""


def _problem_of_math(config: MathReward, reference: str) -> str:
    answer = reference_answer(reference)
    if not answer.strip():
        return f"the box or mark in {short(reference)} is empty"
    if "\\boxed" in answer:
        return f"{short(reference[-LONGEST_TEXT:])} has a box that is not closed"
    if len(answer) > math.LONGEST_ANSWER:
        return (
            f"{short(reference)} has {len(answer):,} characters and no box, and answers of more than "
            f"{math.LONGEST_ANSWER:,} are wrong"
        )
    texts = {"boxed": [f"\\boxed{{{answer}}}"], "last_number": [answer]}.get(config.extract)
    verdicts = [
        math.score_math(text, reference, config.extract, LIMIT_S)
        for text in texts or [f"\\boxed{{{answer}}}", f"<answer>{answer}</answer>"]
    ]
    if any(right for right, _ in verdicts):
        return ""
    return f"{short(answer)} is not right against itself ({verdicts[0][1]}, extract: {config.extract})"


async def bad_references(
    pool: WorkerPool, prompts: Sequence[tuple[Sequence[RewardConfig], Prompt]]
) -> list[BadReference]:
    """Return the prompts whose references are not right against themselves.

    References that are plain numbers, or single letters of a choice, are valid without a check in a worker.

    Args:
        pool: The pool that runs the comparisons.
        prompts: The prompts, each with its reward's components.
    """
    found: list[BadReference] = []
    rows: list[tuple[str, Row]] = []
    for configs, prompt in prompts:
        for config in configs:
            if isinstance(config, ShortAnswerReward):
                try:
                    references_for(config, prompt)
                except MalformedPromptError as error:
                    found.append(BadReference(uid=prompt.uid, problem=error.problem))
            elif not _is_plain(config, prompt.answer):
                rows.append((prompt.uid, (config, prompt.answer, question_of(prompt))))
    for begin in range(0, len(rows), ROWS_PER_CALL):
        part = rows[begin : begin + ROWS_PER_CALL]
        try:
            problems = await in_pool(pool, problems_of, [row for _, row in part], time_limit_s=CALL_S)
        except TimeoutError:
            continue
        found += [
            BadReference(uid=uid, problem=problem) for (uid, _), problem in zip(part, problems, strict=True) if problem
        ]
    return found


def _is_plain(config: RewardConfig, reference: str) -> bool:
    """Return whether a reference is valid without a check."""
    if isinstance(config, MathReward):
        return number_of(reference) is not None
    return not isinstance(config, ChoiceReward) or (len(reference.strip()) == 1 and reference.strip() in config.letters)
