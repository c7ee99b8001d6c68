"""What runs that learn from fresh rollouts refuse, and the roles that they have."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.load import load_config
from roll.errors import ConfigError

BASE: dict[str, Any] = {
    "name": "run",
    "model": "smollm2-135m-instruct",
    "data": [{"source": "arithmetic", "reward": "math"}],
    "training": {"num_steps": 3},
}
DISTILL = {**BASE, "pipeline": "distill", "teacher": "runs/quickstart"}
PREFER = {**BASE, "pipeline": "preference_online"}
REJECT = {**BASE, "pipeline": "rejection_sampling"}
IN_ENGINE = {"teacher": {"model": "t", "backend": "engine"}}
AS_REWARD = {"distillation": {"mode": "reward"}}
TWO = [{"source": "arithmetic", "domain": name, "reward": "math"} for name in ("a", "b")]


@pytest.mark.parametrize("base", [DISTILL, PREFER, REJECT])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tracking": {"record_rollouts": True}}, r"`roll replay` does not support"),
        ({"updates": {"num_minibatches": 9}}, r"num_minibatches must be <= rollout.prompts_per_step.* got 9 and 8"),
        ({"data": [{"source": "guess_number", "demonstrations": True}]}, r"has demonstrations"),
    ],
)
def test_config_online_what_none_of_them_does_is_refused(
    base: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({**base, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (IN_ENGINE, r"distillation.mode loss is not supported with teacher.backend engine"),
        ({**IN_ENGINE, **AS_REWARD, "rollout": {"temperature": 0.8}}, r"requires rollout.temperature 1, got 0.8"),
        ({"distillation": {"mode": "reward", "divergence": "jsd"}}, r"divergence jsd requires full distributions"),
        ({"distillation": {"limit": 2.0}}, r"limit is not supported with `mode: loss`"),
        ({"distillation": {"reward_weight": 1.0}, "rollout": {"group_size": 1}}, r"group_size >= 2, got 1: raise group_size"),  # noqa: E501
        ({"teacher": ["a", "b"]}, r"teachers 'a' and 'b' both have no domains"),
        ({"teacher": {"model": "a", "domains": ["x"]}}, r"contains 'x', which is not a source: choose from arithmetic"),
        ({"data": TWO, "teacher": {"model": "a", "domains": ["a"]}}, r"'b' has no teacher"),
        ({"data": TWO, "teacher": [{"model": "m", "domains": ["a"]}, {"model": "n", "domains": ["a", "b"]}]},
         r"'a' has 2 teachers"),
        ({"data": TWO, "teacher": [{"model": "m", "domains": ["a"]}, {"model": "n", "backend": "engine"}]},
         r"all teachers must have the same backend"),
        ({"data": TWO, **AS_REWARD, "cluster": {"type": "ray"}, "teacher": [
            {"model": "m", "domains": ["a"], "backend": "engine"}, {"model": "n", "backend": "engine"}]},
         r"2 teachers in engines require 2 devices \(1 each\), but only 1"),
        ({"cluster": {"device_mapping": {"teacher": [0]}}}, r"the teachers are in the student's trainer"),
    ],
)  # fmt: skip
def test_config_online_a_distillation_that_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({**DISTILL, **change})


def test_config_online_teachers_are_a_role_where_the_students_trainer_does_not_hold_them() -> None:
    assert "teacher" not in load_config(DISTILL).roles
    assert load_config({**DISTILL, **AS_REWARD}).roles["teacher"].kind == "trainer"
    assert load_config({**DISTILL, **AS_REWARD, **IN_ENGINE}).roles["teacher"].kind == "engine"


def test_config_online_every_source_has_the_teacher_that_names_it_or_the_one_that_names_none() -> None:
    config: Any = load_config({**DISTILL, "data": TWO, "teacher": ["m", {"model": "n", "domains": ["b"]}]})
    assert config.teacher_by_domain == {"a": 0, "b": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"preference": {"type": "kto"}}, r"kto is not supported, because it learns from single answers"),
        ({"rollout": {"group_size": 1}}, r"group_size must be >= 2 to form pairs"),
        (
            {"preference": {"type": "simpo"}, "cluster": {"device_mapping": {"reference": [0]}}},
            r"does not use a reference",
        ),
    ],
)
def test_config_online_pairs_that_cannot_be_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({**PREFER, **change})


def test_config_online_a_reference_is_a_role_where_a_method_needs_one_and_no_adapters_are_trained() -> None:
    assert "reference" in load_config(PREFER).roles
    assert "reference" not in load_config({**PREFER, "preference": {"type": "simpo"}}).roles
    lora = {"path": "smollm2-135m-instruct", "lora": {"rank": 4}}
    assert "reference" not in load_config({**PREFER, "model": lora}).roles


def test_config_online_no_more_answers_can_be_kept_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"rejection\.keep must be <= rollout\.group_size, got 9 and 8: lower"):
        load_config({**REJECT, "rejection": {"keep": 9}})
