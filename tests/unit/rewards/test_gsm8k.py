"""GSM8K's own answers are accepted, changed ones are not. Needs the data set beside the repository."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from roll.config.data import FileData
from roll.data.files import file_prompts
from roll.rewards.math import score_math

DATA = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"
pytestmark = pytest.mark.skipif(not DATA.is_file(), reason="GSM8K is not at ../shared/data/gsm8k")


def references(count: int) -> list[str]:
    """A seeded sample of the data set's final answers, read as `examples/gsm8k.yaml` reads them."""
    config = FileData(
        source="file", path=str(DATA), prompt_key="question", answer_pattern="#### (.+)", reward="math", held_out=0
    )
    prompts, _ = file_prompts(config, "gsm8k", 0)
    return [prompts[i].answer for i in random.Random(0).sample(range(len(prompts)), count)]


def forms(answer: str) -> list[str]:
    """Ways a model gives an answer."""
    return [
        answer,
        f"#### {answer}",
        f"Therefore, she has {answer} apples left.",
        f"First 3 + 4 = 7. So the total is ${answer}.",
        f"Thus the final answer is $\\boxed{{{answer}}}$.",
        f"\\[ x = \\boxed{{{answer} \\text{{ dollars}}}} \\] as 12 was asked for",
        f"**Answer:** {float(answer.replace(',', '')):.2f}",
    ]


def test_gold_answers_are_accepted_in_every_form() -> None:
    rejected = [
        (form, answer)
        for answer in references(200)
        for form in forms(answer)
        if not score_math(form, answer, "auto")[0]
    ]
    assert rejected == []


def test_changed_answers_are_rejected_in_every_form() -> None:
    accepted = []
    for answer in references(200):
        value = int(answer.replace(",", ""))
        for other in (value + 1, value * 10, -value if value else 5, value + 1000):
            accepted += [(form, answer) for form in forms(str(other)) if score_math(form, answer, "auto")[0]]
    assert accepted == []
