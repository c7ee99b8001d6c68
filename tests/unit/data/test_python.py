"""Rows that Python makes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from roll.config.data import EnvironmentData, PythonData
from roll.data.build import load_source
from roll.errors import ConfigError, DataError


def source(rows=None, held_out=None, /, **settings):
    config = PythonData(source="python", reward=[{"type": "math"}], **settings)
    return config if rows is None else config.with_rows(rows, held_out)


def prompts(config, seed=0):
    return [[*map(side.__getitem__, range(len(side)))] for side in load_source(config, "own", seed)]


def test_data_python_dictionaries_become_prompts_and_their_other_keys_metadata():
    rows = [{"prompt": f"{n} + 1", "answer": n + 1, "level": n} for n in range(40)]
    training, held_out = prompts(source(rows))
    assert len(training) + len(held_out) == 40 and 0 < len(held_out) < 12
    first = next(prompt for prompt in training if prompt.metadata["level"] == 3)
    assert (first.uid, first.answer, first.messages[-1].text) == ("own/3", "4", "3 + 1")


def test_data_python_texts_generators_and_datasets_are_rows_too():
    import datasets

    texts = ["Say a", "Say b"]
    for rows in (texts, (t for t in texts), datasets.Dataset.from_dict({"prompt": texts})):
        training, _ = prompts(_without_answers(rows))
        assert [prompt.messages[-1].text for prompt in training] == texts


def _without_answers(rows):
    reward = [{"type": "python", "function": None}]
    return PythonData(source="python", reward=reward, answer_key=None, held_out=0.0).with_rows(rows)


def test_data_python_rows_held_out_are_not_trained_on():
    rows = [{"prompt": str(n), "answer": "1"} for n in range(6)]
    training, held_out = prompts(source(rows, rows[4:]))
    assert {p.messages[0].text for p in training} == set("0123")
    assert {p.messages[0].text for p in held_out} == set("45")


def test_data_python_a_changed_row_changes_the_fingerprint():
    rows = [{"prompt": str(n), "answer": "1"} for n in range(6)]
    same, again = (load_source(source(list(rows)), "own", 0)[0].fingerprint for _ in range(2))
    other = load_source(source([*rows[:5], {"prompt": "5", "answer": "2"}]), "own", 0)[0].fingerprint
    assert same == again != other


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_data_python_numbers_of_numpy_are_numbers():
    rows = [{"prompt": "a", "answer": np.float32(0.5)}, {"prompt": "b", "answer": np.int64(7)}]
    training, _ = prompts(source(rows, held_out=0.0))
    assert [prompt.answer for prompt in training] == ["0.5", "7"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("3 + 4", "data of 'own' must be a list of dictionaries"),
        (3, "data of 'own' must be a list of dictionaries"),
        ([], "data of 'own' has no rows"),
        ([{"prompt": "a", "answer": "1"}, 3], "data of 'own', row 1 must be a dictionary"),
        ([{"question": "a", "answer": "1"}], "row 0: column 'prompt' does not exist"),
        ([{"prompt": "a", "answer": math.nan}], "row 0: column 'answer' is nan: provide an answer, or remove the row"),
        (
            [{"prompt": "a", "answer": 10**5_000}],
            "row 0: column 'answer' has a number that is too long: provide it as a string",
        ),
        ([{"prompt": nested(100_000), "answer": "1"}], "row 0, message 1: a chat message must be {role, content}"),
        ((1 / 0 for _ in range(2)), "data of 'own' cannot be read: ZeroDivisionError"),
    ],
)
def test_data_python_rows_that_are_none_are_refused_with_their_number(rows, message):
    with pytest.raises(DataError) as refused:
        load_source(source(rows), "own", 0)
    assert message in str(refused.value)


def test_data_python_a_function_or_class_of_the_users_own_makes_rows(tmp_path):
    file = tmp_path / "tasks.py"
    file.write_text(
        "class Sums(list):\n"
        "    def __init__(self, count):\n"
        "        super().__init__({'prompt': f'{n} + 1', 'answer': str(n + 1)} for n in range(count))\n"
        "        self.held_out = [{'prompt': '100 + 1', 'answer': '101'}]\n"
        "def broken():\n"
        "    raise KeyError('no file')\n"
    )
    training, held_out = prompts(source(function=f"{file}:Sums", options={"count": 5}))
    assert [p.answer for p in training] == ["1", "2", "3", "4", "5"] and [p.answer for p in held_out] == ["101"]
    with pytest.raises(DataError, match=r"data function '.*tasks\.py:broken' failed: KeyError: 'no file'"):
        load_source(source(function=f"{file}:broken"), "own", 0)
    with pytest.raises(ConfigError, match=r"'.*tasks\.py' has no 'Sum'\. Did you mean 'Sums'\?"):
        load_source(source(function=f"{file}:Sum"), "own", 0)


def test_data_python_episodes_of_an_environment_differ_by_their_seed_and_it_says_itself_what_is_asked():
    config = EnvironmentData(
        environment="mazes.py:Maze",
        options={"size": 3},
        num_episodes=3,
        num_held_out=2,
        num_turns=2,
        system_prompt="Be brief.",
        prompt_template="Task: {prompt}",
        wrappers=["episode_tracking", {"time_limit": {"max_turns": 5}}],
        step_time_limit_s=2.0,
    )
    training, held_out = load_source(config, "own", 0)
    assert [p.environment.seed for p in training] == [0, 1, 2] and [p.environment.seed for p in held_out] == [3, 4]
    assert [p.uid for p in held_out] == ["own/3", "own/4"]
    assert [m.text for m in training[0].messages] == ["Be brief.", "Task: "]
    settings = training[1].environment
    assert (settings.name, settings.options, settings.opening) == ("mazes.py:Maze", {"size": 3}, "Task: {prompt}")
    assert settings.wrappers == (("episode_tracking", {}), ("time_limit", {"max_turns": 5}))
    assert (settings.host, settings.step_time_limit_s) == (None, 2.0)
    assert {p.turns for p in [*training, *held_out]} == {2}  # a limit on length is that of all turns
    with pytest.raises(IndexError):
        training[3]
    other, _ = load_source(config.model_copy(update={"options": {"size": 4}}), "own", 0)
    assert other.fingerprint != training.fingerprint == load_source(config, "own", 0)[0].fingerprint
