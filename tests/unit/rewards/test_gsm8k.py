"""GSM8K's own answers are accepted, changed ones are not. Needs the data set beside the repository."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from roll.config.data import FileData
from roll.data.tables import load_table_prompts
from roll.rewards.math import score_math

DATA = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"
pytestmark = pytest.mark.skipif(not DATA.is_file(), reason="GSM8K is not at ../shared/data/gsm8k")


@functools.cache
def references() -> list[str]:
    """All final answers of the test set, read as `examples/gsm8k.yaml` reads them."""
    config = FileData(
        source="file", path=str(DATA), prompt_key="question", answer_pattern="#### (.+)", reward="math", held_out=0
    )
    prompts, _ = load_table_prompts(config, "gsm8k", 0)
    return [prompts[i].answer for i in range(len(prompts))]


def forms(answer: str) -> dict[str, str]:
    """Ways a model gives an answer, by style."""
    value = int(answer.replace(",", ""))
    grouped = f"{value:,}"
    return {
        "bare": answer,
        "hashes": f"#### {answer}",
        "sentence": f"First 3 + 4 = 7. Therefore, she has {answer} apples left.",
        "boxed": f"Thus the final answer is $\\boxed{{{answer}}}$.",
        "LaTeX": f"\\[ x = 2 \\cdot 3 = {value} \\]",
        "thousands": f"In all there are {grouped} of them.",
        "thousands in LaTeX": f"\\boxed{{{grouped.replace(',', '{,}')}}}",
        "money": f"So the total is ${grouped}.00.",
        "units": f"\\[ x = \\boxed{{{answer} \\text{{ dollars}}}} \\] as 12 was asked for",
        "fraction": f"\\boxed{{\\frac{{{3 * value}}}{{3}}}}",
        "decimals": f"**Answer:** {value:.2f}",
    }


def test_reward_gsm8k_gold_answers_are_accepted_in_every_form() -> None:
    assert len(references()) == 1319
    rejected = [
        (style, form, answer)
        for answer in references()
        for style, form in forms(answer).items()
        if not score_math(form, answer, "auto")[0]
    ]
    assert rejected == []


@pytest.mark.integration
def test_reward_gsm8k_changed_answers_are_rejected_in_every_form() -> None:
    accepted = []
    for answer in references():
        value = int(answer.replace(",", ""))
        for other in {value + 1, value * 10 or 1, -value or 5, value + 1000}:
            accepted += [form for form in forms(str(other)).values() if score_math(form, answer, "auto")[0]]
    assert accepted == []


def test_reward_gsm8k_the_solutions_of_the_data_set_are_right_and_those_of_the_next_question_are_not() -> None:
    rows = [json.loads(line)["answer"] for line in DATA.read_text().splitlines()]
    answers = references()
    assert all(score_math(row, answer, "auto")[0] for row, answer in zip(rows, answers, strict=True))
    others = zip(rows, answers[1:] + answers[:1], answers, strict=True)
    assert not any(score_math(row, other, "auto")[0] for row, other, own in others if other != own)
