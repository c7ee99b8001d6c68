"""The `algorithm` section: presets under the user's keys, and settings that cannot work or have no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from roll.config.algorithm import AlgorithmConfig
from roll.config.base import Section
from roll.config.distillation import DistillationConfig
from roll.config.load import dump_yaml, load_config
from roll.config.pipelines.distill import DistillConfig
from roll.config.presets import PRESET_NAMES, describe_preset, load_preset
from roll.config.rollout import RolloutConfig
from roll.config.truncation import (
    describe_distillation_truncation,
    describe_truncation,
    find_distillation_truncation_problem,
)
from roll.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
GUESS = QUICKSTART.with_name("guess.yaml")
"""Episodes of several turns, so that every preset has what it needs."""


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result = {}
    for name, value in tree.items():
        inner = leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
        result |= inner
    return result


def at(config: Section, dotted: str) -> Any:
    value: Any = config
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, [f"algorithm.{o}" if not o.startswith("rollout.") else o for o in overrides])
    return str(caught.value)


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_config_algorithm_a_preset_sets_its_keys_and_nothing_else(name: str) -> None:
    config = AlgorithmConfig(type=name)
    own, plain = leaves(load_preset(name)), leaves(AlgorithmConfig().model_dump())
    for dotted, value in own.items():
        assert at(config, dotted) == value, dotted
    expanded = leaves(config.model_dump())
    kind = config.gate.type != "min_clip"  # another gate has other keys
    changed = {k for k, v in expanded.items() if plain.get(k, v) != v or (k not in plain and not kind)}
    assert {k for k in changed if not (kind and k.startswith("gate."))} <= own.keys() | {"type"}


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_config_algorithm_a_preset_survives_being_written_out(name: str, tmp_path: Path) -> None:
    config = load_config(GUESS, [f"algorithm.type={name}", "algorithm.filters={}"])
    (tmp_path / "resolved.yaml").write_text(dump_yaml(config))
    again = load_config(tmp_path / "resolved.yaml")
    assert again == config
    assert again.algorithm.type == name


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_config_algorithm_the_users_keys_win(name: str) -> None:
    own = leaves(load_preset(name))
    others: dict[str, Any] = {"aggregation": "constant_length", "advantage.clip": 3.0, "reward.scale": 2.0}
    numbers = {k: v for k, v in own.items() if isinstance(v, float) and "drop" not in k}
    changed = {k: v / 2 if v else 0.25 for k, v in numbers.items() if k != "gate.bound"} | others
    tree: dict[str, Any] = {"type": name}
    for dotted, value in changed.items():
        section, _, key = dotted.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[key] = value
    config = AlgorithmConfig.model_validate(tree)
    for dotted, value in (own | changed).items():
        assert at(config, dotted) == value, dotted


def test_config_algorithm_another_gate_keeps_nothing_of_the_presets() -> None:
    config = AlgorithmConfig.model_validate({"type": "dapo", "gate": {"type": "min_clip"}})
    assert at(config, "gate.high") == 0.28
    config = AlgorithmConfig.model_validate({"type": "dapo", "gate": {"type": "dual_clip"}})
    assert (at(config, "gate.high"), at(config, "gate.bound")) == (0.2, 3.0)


def test_config_algorithm_an_unknown_preset_is_answered_with_the_known_ones() -> None:
    assert "grpo" in refusal("type=grop")


def test_config_algorithm_presets_are_described() -> None:
    assert describe_preset("grpo").startswith("GRPO: group-relative policy optimization (DeepSeekMath")


IMPOSSIBLE = {
    "a discount without time": (["advantage.gamma=0.9"], "advantage.gamma 0.9 has no effect", "outcome"),
    "lambda without a critic": (["advantage.gae_lambda=0.5"], "gae_lambda 0.5 has no effect", "outcome"),
    "step weight without states": (["advantage.step_weight=0.5"], "step_weight 0.5 has no effect", "outcome"),
    "a critic's clip without one": (["critic.value_clip=0.5"], "no critic is used", "estimator to gae"),
    "a critic's rate without one": (["critic.learning_rate=1e-4"], "no critic is used", "estimator to gae"),
    "several critics without one": (["critic.num_critics=2"], "no critic is used", "estimator to gae"),
    "agreement of one critic": (
        ["type=ppo", "critic.drop_agreed=0.2"], "drop_agreed and entropy.drop_divergent require", "num_critics >= 2",
    ),
    "bonus by agreement of one": (
        ["type=ppo", "entropy.drop_divergent=0.2"], "drop_agreed and entropy.drop_divergent require", "got 1",
    ),
    "turns of tokens": (
        ["advantage.estimator=token", "advantage.whiten=turn"], "whose advantages are per token", "to token",
    ),
    "turns of a critic": (["type=ppo", "advantage.whiten=turn"], "whose advantages are per token", "whiten to token"),
    "states without groups": (
        ["advantage.estimator=anchor_state", "advantage.mean=none"], "advantage.mean group", "got none",
    ),
    "two corrections": (["ratio.against=rollout"], "correct for them twice", "correction.upper to null"),
    "a product of one token": (["ratio.reduce=product"], "has no effect", "chunk or sequence"),
    "a limit before no mean": (["ratio.max_token_log_ratio=0.4"], "has no effect", "set it to sequence"),
    "a level without a ratio": (["type=rloo", "ratio.level=sequence"], "log_prob has no ratio", "ratio.level"),
    "a refill without a filter": (
        ["filters.refill=true", "filters.skip_zero_variance=false"], "requires a filter", "skip_zero_variance: true",
    ),
    "a refill that never ends": (["filters.refill=true", "filters.top_variance=0.5"], "always drops", "default"),
    "no mean can pass": (["filters.min_mean=0.5", "filters.max_mean=0.5"], "no group would pass", "0.5"),
    "no factor can pass": (
        ["correction.mask_low=2", "correction.mask_high=1"], "token would be masked out", "mask_low",
    ),
    "weights upside down": (["type=tis", "gate.lower=2"], "lower must be <= upper, got 2.0 and 1.0", "gate"),
    "full divergence in the reward": (
        ["kl.coefficient=0.1", "kl.estimator=full", "kl.apply_to=reward"], "works only in the loss", "apply_to: loss",
    ),
    "a target for no penalty": (["kl.target=0.1"], "above 0", "such as 0.1"),
    "groups of one": (["rollout.group_size=1"], "group_size >= 2", "raise group_size"),
    "leave one out of one": (["type=rloo", "rollout.group_size=1"], "leave_one_out", "group_size >= 2"),
    "the optimal baseline of one": (["type=opo", "rollout.group_size=1"], "length_weighted", "size >= 2"),
    "variance of one": (
        ["type=reinforce", "filters.skip_zero_variance=true", "rollout.group_size=1"], "every group if rollout.group_size is 1", "false",  # noqa: E501
    ),
    "critics without rollouts": (["type=asy_ppo", "rollout.group_size=1"], "learns from different rollouts", "raise"),
    "states without turns": (["type=gi_gpo"], "requires a source under data with several turns", "guess_number"),
    "parts of nothing": (["updates.num_minibatches=9"], "<= rollout.prompts_per_step", "got 9 and 8"),
    "a buffer over the answer": (["reward.overlong_buffer=33"], "<= rollout.max_new_tokens, got 33 and 32", "lower"),
    "a horizon upside down": (["type=attention_credit", "credit.horizon_start=101"], "horizon", "101"),
    "a function that is no path": (["loss=my_loss"], "algorithm.loss", "my_loss"),
    "a shared critic of its own": (["type=asy_ppo", "critic.shared=true"], "critic.num_critics", "remove"),
    "a shared critic's own rate": (
        ["type=ppo", "critic.shared=true", "critic.learning_rate=1e-4"], "cannot be set with critic.shared", "critic.learning_rate",  # noqa: E501
    ),
    "a coefficient not shared": (["type=ppo", "critic.coefficient=0.5"], "critic.shared is false", "coefficient"),
    "a nucleus in a product": (
        ["correction.level=sequence", "rollout.top_p=0.9"], "with rollout.top_p 0.9, the ratio old", "correction.level to token",  # noqa: E501
    ),
    "a top k in a ratio's product": (
        ["type=topr", "ratio.level=sequence", "ratio.reduce=product", "rollout.top_k=50"], "tokens of an answer", "reduce",  # noqa: E501
    ),
    "penalties in the run's moments": (
        ["kl.coefficient=0.1", "kl.apply_to=reward", "advantage.std=running"], "running means and standard deviations", "group or batch",  # noqa: E501
    ),
    "imitation of nobody": (["imitation.weight=0.5"], "no source under data has demonstrations", "expert_key"),
    "a clip of nothing": (["advantage.clip=0"], "advantage.clip", "> 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_config_algorithm_impossible_settings_are_refused_with_the_reason_and_the_fix(name: str) -> None:
    overrides, reason, fix = IMPOSSIBLE[name]
    text = refusal(*overrides)
    assert reason in text, text
    assert fix in text, text
    assert len(text.splitlines()) <= 3, text


@pytest.mark.parametrize(
    "overrides",
    [
        ["type=ipa", "advantage.estimator=outcome"],
        ["type=ppo", "advantage.estimator=outcome", "advantage.mean=group"],
        ["type=gspo", "ratio.level=token"],
        ["type=gmpo", "ratio.level=token"],
        ["type=topr", "gate.type=log_prob"],
    ],
    ids=" ".join,
)
def test_config_algorithm_what_a_preset_leaves_behind_is_no_mistake(overrides: list[str], tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [f"algorithm.{o}" for o in overrides])
    (tmp_path / "resolved.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.type=raft_pp", "algorithm.filters.refill=true"],
        ["algorithm.type=reinforce", "rollout.group_size=1"],
        ["algorithm.type=remax", "rollout.group_size=1"],
        ["algorithm.type=ppo", "rollout.group_size=1"],
        ["algorithm.ratio.against=rollout", "algorithm.correction.upper=null"],
        ["algorithm.advantage.estimator=turn", "algorithm.advantage.whiten=turn", "algorithm.advantage.gamma=0.9"],
        ["algorithm.reward.overlong_buffer=32"],
        ["algorithm.updates.num_minibatches=8"],
        ["rollout.top_p=0.9"],
        ["algorithm.type=gspo", "rollout.top_k=50"],
        ["algorithm.correction.level=sequence", "algorithm.correction.upper=null", "rollout.top_p=0.9"],
        ["algorithm.ratio.level=sequence", "algorithm.ratio.reduce=product", "rollout.top_p=0.9"],
    ],
    ids=" ".join,
)
def test_config_algorithm_what_can_work_is_accepted_and_stays_as_it_was_said(overrides: list[str]) -> None:
    config = load_config(QUICKSTART, overrides)
    for override in overrides:
        dotted, _, said = override.partition("=")
        assert at(config, dotted) == yaml.safe_load(said), dotted


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rollout.top_p=0.9"],
            "rollout.top_p 0.9: the ratio old/rollout equals the probability mass that the engine kept (at least 0.9",
        ),
        (
            ["rollout.top_k=5", "algorithm.type=tis"],
            "below 1 for every token), even if engine and trainer agree; the rat",
        ),
        (["rollout.top_p=0.9", "algorithm.correction.upper=null"], ""),
        (["algorithm.type=tis"], ""),
        (["rollout.top_p=0.9", "algorithm.loss=examples/algorithms/my_loss.py:loss"], ""),
    ],
    ids=str,
)
def test_config_algorithm_truncated_sampling_is_explained_where_it_enters_a_ratio(
    overrides: list[str], words: str
) -> None:
    config = load_config(QUICKSTART, overrides)
    note = describe_truncation(config.algorithm, config.rollout)
    assert words in note and bool(note) == bool(words)


@pytest.mark.parametrize(
    ("rollout", "distillation", "refused", "noted"),
    [
        ({"top_p": 0.9}, {"mode": "reward"}, True, False),
        ({"top_k": 5}, {"mode": "reward", "reward_weight": 1.0}, True, True),
        ({"top_k": 5}, {"mode": "loss"}, False, False),
        ({"top_p": 0.9, "top_k": 5}, {"mode": "loss", "reward_weight": 1.0}, False, True),
        ({}, {"mode": "reward", "reward_weight": 1.0}, False, False),
    ],
    ids=str,
)
def test_config_algorithm_truncated_sampling_is_refused_where_a_teacher_is_a_reward(
    rollout: dict[str, Any], distillation: dict[str, Any], refused: bool, noted: bool
) -> None:
    given = {
        "pipeline": "distill", "name": "x", "model": "m", "teacher": "t", "distillation": distillation,
        "data": [{"source": "arithmetic", "reward": "math"}], "rollout": rollout, "training": {"num_steps": 1},
    }  # fmt: skip
    if refused:
        with pytest.raises(ValidationError, match=r"every advantage would be biased .* set rollout\.top_p to 1"):
            DistillConfig.model_validate(given)
    else:
        DistillConfig.model_validate(given)
    settings = DistillationConfig.model_validate(distillation), RolloutConfig.model_validate(rollout)
    assert bool(find_distillation_truncation_problem(*settings)) == refused
    assert bool(describe_distillation_truncation(*settings)) == noted


def test_config_algorithm_numbers_that_are_none_are_refused() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValidationError, match="finite"):
            AlgorithmConfig.model_validate({"advantage": {"clip": value}})
