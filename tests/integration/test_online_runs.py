"""Whole runs that learn from fresh rollouts without an algorithm, on tiny random models: what they learn and record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos.harness import tiny_config
from worlds.tiny_model import write_tiny_model

import roll

DISTILL = {"pipeline": "distill", "rollout": {"prompts_per_step": 6, "group_size": 2, "max_new_tokens": 6}}
FAST = {"num_steps": 12, "learning_rate": 1e-2, "num_threads": 1}
LETTERS = {"rollout": {"prompts_per_step": 6, "group_size": 6, "max_new_tokens": 6}, "checkpoint": {"at_end": False}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "teacher", seed=1)


def config(directory: Path, source: Path, /, **changes: Any) -> dict[str, Any]:
    return {**tiny_config(source, num_steps=3), "output_dir": str(directory), **changes}


def steps(directory: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "train"]


def ledger(directory: Path) -> list[dict[str, Any]]:
    newest = max((directory / "run" / "checkpoints").glob("step-*"))
    return [json.loads(line) for line in (newest / "ledger.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "method",
    [
        {"pipeline": "rejection_sampling", "rejection": {"keep": 2}},
        {"pipeline": "preference_online", "preference": {"type": "dpo"}},
    ],
    ids=["rejection_sampling", "preference_online"],
)
def test_online_run_a_rewarded_letter_becomes_more_frequent(
    tmp_path: Path, tiny_model: Path, method: dict[str, Any]
) -> None:
    summary = roll.train(config(tmp_path, tiny_model, training=FAST, **LETTERS, **method))
    assert summary.reward_first5 is not None and summary.reward_last5 is not None
    assert summary.reward_last5 > summary.reward_first5 + 0.2


@pytest.mark.parametrize(
    "change",
    [
        {"distillation": {"divergence": "reverse"}},
        pytest.param({"distillation": {"divergence": "forward"}}, marks=pytest.mark.slow),
        pytest.param({"distillation": {"divergence": "jsd", "beta": 0.3}}, marks=pytest.mark.slow),
        {
            "distillation": {"mode": "reward"},
            "rollout": {"prompts_per_step": 6, "group_size": 24, "max_new_tokens": 6},
        },
    ],
    ids=["reverse", "forward", "jsd", "reward"],
)
def test_online_run_the_student_comes_near_its_teacher(
    tmp_path: Path, tiny_model: Path, teacher: Path, change: dict[str, Any]
) -> None:
    training = {**FAST, "num_steps": 16, "learning_rate": 3e-3}
    roll.train(config(tmp_path, tiny_model, **{**DISTILL, **change}, training=training, teacher=str(teacher)))
    rows = [row["training/distill/divergence"] for row in steps(tmp_path)]
    assert sum(rows[-3:]) < 0.8 * sum(rows[:3])


def test_online_run_teachers_in_a_trainer_and_in_an_engine_say_the_same(
    tmp_path: Path, tiny_model: Path, teacher: Path
) -> None:
    for place in ("trainer", "engine"):
        where = {"teacher": {"model": str(teacher), "backend": place}, "distillation": {"mode": "reward"}}
        roll.train(config(tmp_path / place, tiny_model, **DISTILL, **where))
    found, other = (steps(tmp_path / place) for place in ("trainer", "engine"))
    name = "training/distill/divergence"
    assert [row[name] for row in found] == pytest.approx([row[name] for row in other], abs=1e-4)


def test_online_run_the_model_that_a_run_trained_teaches(tmp_path: Path, tiny_model: Path) -> None:
    roll.train(config(tmp_path, tiny_model, name="run"))
    roll.train(config(tmp_path / "next", tiny_model, **DISTILL, teacher=str(tmp_path / "run")))
    assert steps(tmp_path / "next")[0]["training/distill/divergence"] > 0


def test_online_run_the_student_is_its_own_teacher_at_no_distance(tmp_path: Path, tiny_model: Path) -> None:
    roll.train(config(tmp_path, tiny_model, **DISTILL, teacher=str(tiny_model)))
    assert steps(tmp_path)[0]["training/distill/divergence"] == pytest.approx(0.0, abs=1e-6)


def test_online_run_rewards_count_beside_the_teacher(tmp_path: Path, tiny_model: Path, teacher: Path) -> None:
    mixed = {"distillation": {"reward_weight": 0.5}, "teacher": str(teacher)}
    roll.train(config(tmp_path, tiny_model, **DISTILL, **mixed))
    row = steps(tmp_path)[0]
    assert row["training/policy/loss_scale"] > 0 and row["training/distill/divergence"] > 0


def test_online_run_a_reference_is_compared_with_and_stays_as_it_was(tmp_path: Path, tiny_model: Path) -> None:
    """Before the first update the policy is the reference, whose rewards are then 0; with adapters too."""
    model = {"path": str(tiny_model), "dtype": "float32"}
    for name, lora in (("whole", None), ("adapters", {"rank": 4})):
        changes = {"model": {**model, "lora": lora}, "training": {**FAST, "num_steps": 4}}
        roll.train(config(tmp_path / name, tiny_model, pipeline="preference_online", **{**LETTERS, **changes}))
        rows = [r for r in steps(tmp_path / name) if r.get("training/stepped")]
        assert rows[0]["training/preference/margin"] == pytest.approx(0.0, abs=1e-5)
        assert rows[0]["training/loss"] == pytest.approx(0.693147, abs=1e-4)
        assert abs(rows[-1]["training/preference/margin"]) > 1e-3


def test_online_run_adapters_alone_are_distilled_into(tmp_path: Path, tiny_model: Path, teacher: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = {"path": str(tiny_model), "dtype": "float32", "lora": {"rank": 4}}
    roll.train(config(tmp_path, tiny_model, **DISTILL, model=model, teacher=str(teacher)))
    saved = tmp_path / "run" / "checkpoints" / "step-000003" / "model"
    trained, before = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (saved, tiny_model))
    changed = [name for name in before if not torch.equal(before[name], trained[name])]
    assert any("q_proj" in name for name in changed) and not any("embed" in name for name in changed)


@pytest.mark.parametrize("pipeline", ["rejection_sampling", "preference_online"])
def test_online_run_every_draw_has_one_fate_and_a_reason_where_it_was_not_trained(
    tmp_path: Path, tiny_model: Path, pipeline: str
) -> None:
    roll.train(config(tmp_path, tiny_model, pipeline=pipeline))
    entries = ledger(tmp_path)
    assert [entry["draw_id"] for entry in entries] == list(range(9))
    assert {entry["outcome"] for entry in entries} <= {"trained", "filtered"}
    why = {"rejection_sampling": "is below 1", "preference_online": "zero variance"}[pipeline]
    assert all((entry["outcome"] == "trained") != (why in entry["why"]) for entry in entries)


def test_online_run_a_step_without_a_pair_changes_nothing(tmp_path: Path, tiny_model: Path) -> None:
    never = [{"source": "arithmetic", "reward": [{"type": "regex", "pattern": "(?!)", "require_finished": False}]}]
    roll.train(config(tmp_path, tiny_model, pipeline="preference_online", data=never))
    rows = steps(tmp_path)
    assert [row["policy_version"] for row in rows] == [0, 0, 0]
    assert [row["data/groups_filtered"] for row in rows] == [3, 3, 3]


def test_online_run_several_updates_of_a_step_are_made_of_whole_groups(
    tmp_path: Path, tiny_model: Path, teacher: Path
) -> None:
    updates = {"num_minibatches": 2, "num_epochs": 2}
    where = {"teacher": str(teacher), "distillation": {"mode": "reward"}}
    roll.train(config(tmp_path, tiny_model, **DISTILL, updates=updates, **where))
    assert [row["training/num_updates"] for row in steps(tmp_path)] == [4, 4, 4]


def test_online_run_a_model_is_measured_as_in_any_run(tmp_path: Path, tiny_model: Path, teacher: Path) -> None:
    found = roll.evaluate(config(tmp_path, tiny_model, **DISTILL, teacher=str(teacher)))
    assert found["eval/num_answers"] == 6
