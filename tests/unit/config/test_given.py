"""Which place in a configuration the objects of a script take."""

from __future__ import annotations

import pytest

from roll.config.load import dump_config, load_config
from roll.config.python_objects import load_with_python_objects, with_python_objects
from roll.errors import ConfigError

BASE = {"name": "run", "model": "tiny", "training": {"num_steps": 4}}
ARITHMETIC = BASE | {"data": [{"source": "arithmetic", "reward": "math"}]}
ROWS = [{"prompt": "3 + 4", "answer": "7"}]


def score(text, answer, metadata):
    return 1.0


def load(config=BASE, overrides=(), *, data=None, held_out=None, reward=None):
    return load_with_python_objects(config, overrides, data, held_out, reward)


def test_config_python_objects_rows_take_the_place_of_the_sources_and_a_function_that_of_every_reward():
    config = load(ARITHMETIC, {"data.0.held_out": 0.5}, data=ROWS, held_out=ROWS, reward=score)
    (entry,) = config.data
    assert (entry.source, entry.held_out, entry.answer_key) == ("python", 0.5, "answer")
    assert entry.passed_rows == (ROWS, ROWS)
    assert [(part.type, part.name, part.passed_function) for part in entry.reward] == [("python", "score", score)]


def test_config_python_objects_one_of_several_sources_may_take_the_rows():
    mixed = BASE | {"data": [*ARITHMETIC["data"], {"source": "python", "prompt_key": "q", "reward": "math"}]}
    config = load(mixed, data=[{"q": "3 + 4", "answer": "7"}])
    assert [entry.source for entry in config.data] == ["arithmetic", "python"]
    assert config.data[1].passed_rows[0] == [{"q": "3 + 4", "answer": "7"}]


def test_config_python_objects_a_reward_may_be_anything_that_a_configuration_takes():
    parts = [lambda text, answer, metadata: 1, "math", {"type": "python", "function": score, "weight": 0.5}]
    (entry,) = load(data=ROWS, reward=parts).data
    assert [(part.type, part.name, part.weight) for part in entry.reward] == [
        ("python", "", 1.0),
        ("math", "", 1.0),
        ("python", "score", 0.5),
    ]
    assert entry.reward[0].passed_function is parts[0] and entry.reward[2].passed_function is score


def test_config_python_objects_rows_without_an_answer_need_none():
    assert load(data=["Say a"], reward=score).data[0].answer_key is None
    assert load(data=[{"prompt": "Say a"}], reward=score).data[0].answer_key is None
    assert load(data=iter(ROWS), reward=score).data[0].answer_key == "answer", "a generator is not looked into"


def test_config_python_objects_a_data_frame_is_its_rows():
    import pandas

    config = load(data=pandas.DataFrame(ROWS), held_out=pandas.DataFrame(ROWS), reward=score)
    assert config.data[0].passed_rows == (ROWS, ROWS) and config.data[0].answer_key == "answer"
    assert with_python_objects(config, pandas.DataFrame(ROWS), None, score).data[0].passed_rows == (ROWS, None)


def test_config_python_objects_are_no_part_of_the_resolved_configuration_and_are_taken_again():
    config = load(data=ROWS, reward=score)
    plain = load_config(dump_config(config))
    assert plain.data[0].passed_rows == (None, None) and plain.data[0].reward[0].passed_function is None
    again = with_python_objects(plain, ROWS, None, score)
    assert again.data[0].passed_rows == (ROWS, None) and again.data[0].reward[0].passed_function is score
    assert dump_config(again) == dump_config(config) == dump_config(plain)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": ROWS}, "so reward= must be set as well"),
        ({"held_out": ROWS}, "also pass the training rows as data="),
        ({"reward": score}, "the configuration has none: also pass the rows as data="),
        (
            {"data": ROWS, "reward": 7},
            "reward= must be a function of (text, answer, metadata), a reward's type such as",
        ),
    ],
)
def test_config_python_objects_what_does_not_fit_is_refused_with_what_to_give(given, message):
    with pytest.raises(ConfigError) as refused:
        load(**given)
    assert message in str(refused.value)


def test_config_python_objects_a_resumed_run_refuses_objects_that_it_has_no_place_for():
    with pytest.raises(ConfigError, match="this run does not read Python objects: remove data="):
        with_python_objects(load_config(ARITHMETIC), ROWS, None, None)
    with pytest.raises(ConfigError, match=r"reward= must have 0 functions for the rewards of 'arithmetic', got 1"):
        with_python_objects(load_config(ARITHMETIC), None, None, score)


SFT = {"name": "run", "pipeline": "sft", "model": "tiny"}
CHATS = [{"prompt": "3 + 4", "completion": "7"}]


def test_config_python_objects_examples_need_no_reward():
    config = load(SFT, data=CHATS, held_out=CHATS)
    (entry,) = config.data
    assert (entry.source, entry.passed_rows) == ("python", (CHATS, CHATS))
    again = with_python_objects(load_config(dump_config(config)), CHATS, None, None)
    assert again.data[0].passed_rows == (CHATS, None)


def test_config_python_objects_examples_may_be_beside_others():
    mixed = SFT | {"data": [{"source": "arithmetic"}, {"source": "python", "completion_key": "a"}]}
    config = load(mixed, data=[{"prompt": "3 + 4", "a": "7"}])
    assert [entry.source for entry in config.data] == ["arithmetic", "python"] and config.data[1].passed_rows[0]


def test_config_python_objects_a_pipeline_without_rewards_is_given_none():
    with pytest.raises(ConfigError, match=r"reward= .*the pipeline sft, which does not score answers"):
        load(SFT, data=CHATS, reward=score)
