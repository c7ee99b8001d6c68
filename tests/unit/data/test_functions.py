"""The source of tiny programming tasks."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from roll.config.data import DataConfig, FunctionsData
from roll.data.functions import FUNCTION_KINDS, build_functions_prompts
from roll.errors import DataError
from roll.rewards.code.tasks import CallCase, parse_task
from roll.types import Prompt


def config(**settings: object) -> FunctionsData:
    return TypeAdapter(DataConfig).validate_python({"source": "functions", **settings})


def solve(prompt: Prompt, *args: object) -> object:
    """What the reference answer of a prompt computes; it is ours, not a model's."""
    variables: dict[str, object] = {}
    exec(prompt.answer.removeprefix("```python").removesuffix("```"), variables)
    return variables[prompt.metadata["entry_point"]](*args)  # type: ignore[operator]


def test_data_function_training_and_held_out_tasks_are_disjoint_and_complete() -> None:
    training, held_out = build_functions_prompts(config(num_constants=5, held_out=0.3), "functions", 7)
    uids = [[side[i].uid for i in range(len(side))] for side in (training, held_out)]
    assert (len(uids[0]), len(uids[1])) == (49, 21)  # 14 kinds x 5 constants, 30 % of them
    assert len(set(uids[0]) | set(uids[1])) == 70 == len(FUNCTION_KINDS) * 5
    again, _ = build_functions_prompts(config(num_constants=5, held_out=0.3), "functions", 7)
    assert again.fingerprint == training.fingerprint
    other, _ = build_functions_prompts(config(num_constants=5, held_out=0.3), "functions", 8)
    assert other.fingerprint != training.fingerprint


def test_data_function_every_reference_answer_solves_its_hidden_cases() -> None:
    training, held_out = build_functions_prompts(config(num_constants=3, num_cases=4), "functions", 0)
    prompts = [side[i] for side in (training, held_out) for i in range(len(side))]
    for prompt in prompts:
        assert len(prompt.metadata["tests"]) == 4
        for case in prompt.metadata["tests"]:
            assert solve(prompt, *case["args"]) == case["returns"], prompt.uid
        task = parse_task(prompt.metadata["tests"], entry=prompt.metadata["entry_point"])
        assert all(isinstance(case, CallCase) for case in task.cases)


def test_data_function_a_task_reads_as_it_should() -> None:
    training, held_out = build_functions_prompts(config(prompt_template="{prompt} Go."), "functions", 0)
    texts = {side[i].uid: side[i].messages[-1].text for side in (training, held_out) for i in range(len(side))}
    assert texts["functions/add_3"] == "Write a Python function add_3(x) that returns x plus 3. Go."


def test_data_function_holding_everything_out_is_refused() -> None:
    with pytest.raises(DataError, match=r"leaves no task .of 14. for training"):
        build_functions_prompts(config(num_constants=1, held_out=0.99), "functions", 0)
