"""A reward of your own: shorter answers score higher. Used by `examples/gsm8k.yaml`.

    reward:
      - math
      - {type: python, function: "examples/rewards/short_answer.py:score", weight: 0.1, options: {max_characters: 600}}

A reward function takes the model's answer, the reference answer, and the prompt's other columns; the entries of
`options` come as keyword arguments. It may be `async`, for instance to ask a server: then up to `max_concurrent`
answers wait at once. It runs in a worker process under the reward's `time_limit_s`: an answer that takes longer counts
as wrong, and an exception never counts against the model.

What it returns says what it means:

- a number is this component's value, before its weight: `score` below;
- annotated `-> bool`, it also decides whether the task was solved, which accuracy counts: `ends_with_answer`;
- a `roll.rewards.Judgement` (annotated so) also brings a word for people: `graded`.

Test it as any function, without a model: `score("42", "42", {})`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.rewards import Judgement


def score(text: str, answer: str, metadata: Mapping[str, Any], max_characters: int = 400) -> float:
    """1 for an empty answer, falling to 0 at `max_characters`."""
    return max(0.0, 1.0 - len(text) / max_characters)


def ends_with_answer(text: str, answer: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the reference stands at the very end."""
    return text.rstrip(" .\n").endswith(answer)


def graded(text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
    """Full marks for the answer alone, half where it stands at the end of more."""
    if text.strip() == answer:
        return Judgement(value=1.0, verdict="exact", correct=True)
    if ends_with_answer(text, answer, metadata):
        return Judgement(value=0.5, verdict="wordy", correct=True)
    return Judgement(value=0.0, verdict="wrong", correct=False)
