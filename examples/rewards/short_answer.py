"""A reward of your own: shorter answers score higher. Used by `examples/gsm8k.yaml`.

    reward:
      - math
      - {type: python, function: "examples/rewards/short_answer.py:score", weight: 0.1, options: {max_characters: 600}}

A reward function takes the model's answer, the reference answer, and the prompt's other columns. The entries of
`options` are passed as keyword arguments. The function may be `async`, for example to call a server; then up to
`max_concurrent` answers wait at once. It runs in a worker process under the reward's `time_limit_s`: an answer that
takes longer is treated as incorrect. An exception is an infrastructure error and never gives a reward of 0.

The return type decides how ROLL uses the result:

- A number is the value of this component, before it is multiplied by the weight: see `score`.
- With the annotation `-> bool`, the result also says whether the task was solved, for `accuracy`: see
  `ends_with_answer`.
- A `roll.rewards.Judgement` also contains a verdict, a word for people who read the answers: see `graded`.

You can test the function without a model: `score("42", "42", {})`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.rewards import Judgement


def score(text: str, answer: str, metadata: Mapping[str, Any], max_characters: int = 400) -> float:
    """Return 1 for an empty answer, decreasing to 0 at `max_characters`."""
    return max(0.0, 1.0 - len(text) / max_characters)


def ends_with_answer(text: str, answer: str, metadata: Mapping[str, Any]) -> bool:
    """Return whether the answer ends with the reference."""
    return text.rstrip(" .\n").endswith(answer)


def graded(text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
    """Return 1 for the reference alone, 0.5 for a longer answer that ends with the reference, and 0 otherwise."""
    if text.strip() == answer:
        return Judgement(value=1.0, verdict="exact", correct=True)
    if ends_with_answer(text, answer, metadata):
        return Judgement(value=0.5, verdict="wordy", correct=True)
    return Judgement(value=0.0, verdict="wrong", correct=False)
