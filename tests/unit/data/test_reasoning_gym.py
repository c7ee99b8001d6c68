"""Tasks of reasoning-gym as a prompt source."""

from __future__ import annotations

import random
from typing import Any

import pytest

from roll.config.data import ReasoningGymData
from roll.data.reasoning_gym import build_reasoning_gym_prompts
from roll.data.source import PromptList
from roll.errors import DataError


def load(task: str, seed: int = 0, **changes: Any) -> tuple[PromptList, PromptList]:
    return build_reasoning_gym_prompts(ReasoningGymData(source=f"reasoning_gym:{task}", **changes), "d", seed)


def test_data_reasoning_gym_tasks_are_seeded_and_held_out_ones_do_not_occur_in_training() -> None:
    sides = load("chain_sum", size=60, held_out=0.5)
    again, other = load("chain_sum", size=60, held_out=0.5), load("chain_sum", seed=1, size=60, held_out=0.5)
    training, held_out = ([side[i] for i in range(len(side))] for side in sides)
    assert (len(training), len(held_out)) == (60, 30)
    asked, kept = ({p.messages[-1].text for p in side} for side in (training, held_out))
    assert not asked & kept
    assert sides[0].fingerprint == again[0].fingerprint != other[0].fingerprint
    assert training[0].uid == "d/0" and held_out[0].uid == "d/held_out/0"
    terms = training[0].messages[0].text.split("problem: ")[1].split("=")[0]
    assert training[0].answer == str(sum(map(int, terms.replace("- ", "-").replace("+ ", "+").split())))


def test_data_reasoning_gym_a_task_that_uses_the_processes_generator_is_seeded_too() -> None:
    random.seed(1)
    first = load("list_functions", size=10, held_out=0)[0]
    random.seed(2)
    expected = random.random()
    random.seed(2)
    assert load("list_functions", size=10, held_out=0)[0].fingerprint == first.fingerprint
    assert random.random() == expected


def test_data_reasoning_gym_options_reach_the_task() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    training, _ = load("chain_sum", size=20, held_out=0, options=options)
    assert all(-9 <= int(training[i].answer) <= 18 for i in range(20))
    assert training[0].metadata["reasoning_gym"]["options"] == options


@pytest.mark.parametrize(
    ("task", "changes", "words"),
    [
        ("chain_sums", {}, r"has no task 'chain_sums'. Did you mean 'chain_sum'\?"),
        (
            "chain_sum",
            {"options": {"min_term": 2}},
            r"has no option 'min_term'. Did you mean 'min_terms'\? Available options: .*max_digits",
        ),
        ("chain_sum", {"options": {"min_terms": 5, "max_terms": 2}}, "rejected the options"),
        ("chain_sum", {"options": {"min_terms": "two"}}, "rejected the options"),
        ("chain_sum", {"options": {"seed": 3}}, "set by `size` and the run's seed"),
    ],
)
def test_data_reasoning_gym_wrong_tasks_and_options_are_refused(task: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        load(task, **changes)


def test_data_reasoning_gym_a_task_with_few_questions_that_leaves_none_to_hold_out_says_so() -> None:
    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(DataError, match="too few distinct questions to hold any out"):
        load("chain_sum", size=5000, held_out=0.001, options=one_digit)
