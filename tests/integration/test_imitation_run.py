"""Demonstrations through the real engine, trainer and pipeline: a random model learns to play by imitation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config

import roll

GAME = {"source": "guess_number", "max_number": 3, "num_turns": 2, "prompt_template": "{prompt}"}
IPA: dict[str, Any] = {"type": "ipa"}


def config(directory: Path, source: Path, data: dict[str, Any], algorithm: dict[str, Any]) -> dict[str, Any]:
    base = tiny_config(source, num_steps=12)
    return {
        **base,
        "output_dir": str(directory),
        "algorithm": algorithm,
        "data": [data],
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 4},
        "training": {"num_steps": 12, "learning_rate": 1e-2, "num_threads": 1},
        "evaluation": {"every_num_steps": 0, "num_prompts": 3, "samples_per_prompt": 8, "before_training": False},
        "checkpoint": {"at_end": False},
    }


def rows(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.parametrize("updates", [1, 2])
def test_imitation_run_a_random_model_learns_the_game_from_an_expert(
    tmp_path: Path, tiny_model: Path, updates: int
) -> None:
    algorithm = {**IPA, "updates": {"num_epochs": updates}}
    roll.train(config(tmp_path, tiny_model, {**GAME, "demonstrations": True}, algorithm))
    train = rows(tmp_path, "train")
    assert [row["data/demonstrations"] for row in train] == [3] * 12
    assert train[0]["reward/mean"] < 0.1  # random bytes are no guesses
    (evaluation,) = rows(tmp_path, "evaluation")
    assert evaluation["eval/accuracy"] > 0.5


def test_imitation_run_without_demonstrations_it_does_not(tmp_path: Path, tiny_model: Path) -> None:
    roll.train(config(tmp_path, tiny_model, GAME, IPA))
    assert "data/demonstrations" not in rows(tmp_path, "train")[0]
    (evaluation,) = rows(tmp_path, "evaluation")
    assert evaluation["eval/accuracy"] < 0.3


@pytest.mark.parametrize("when", ["always", "unsolved"])
def test_imitation_run_a_column_of_answers_is_imitated_with_a_critic_and_a_penalty(
    tmp_path: Path, tiny_model: Path, when: str
) -> None:
    path = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"{i} + {i}?", "answer": str(2 * i), "how": str(2 * i) if i % 2 else None} for i in range(1, 9)]
    path.write_text("\n".join(map(json.dumps, lines)))
    data = {"source": "file", "path": str(path), "reward": "math", "held_out": 0.2, "expert_key": "how"}
    algorithm = {
        "type": "asy_ppo",
        "imitation": {"weight": 0.5, "when": when},
        "kl": {"coefficient": 0.01, "apply_to": "reward"},
    }
    roll.train(config(tmp_path, tiny_model, data, algorithm))
    train = rows(tmp_path, "train")
    shown = [row["data/demonstrations"] for row in train if "data/demonstrations" in row]
    assert 0 < sum(shown) < 3 * len(shown)  # half of the rows have one
    assert all(row["training/stepped"] for row in train)


def test_imitation_run_a_step_of_demonstrations_alone_trains_with_kl_in_the_reward_and_resumes(
    tmp_path: Path, tiny_model: Path
) -> None:
    """No random answer is right, so all groups are filtered, and nothing of the policy's own is trained."""
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}?", "answer": f"{2 * i}"}) + "\n" for i in range(1, 9)))
    data = {"source": "file", "path": str(path), "reward": "math", "expert_key": "answer"}
    algorithm = {"type": "grpo", "kl": {"coefficient": 0.1, "apply_to": "reward", "target": 0.5, "horizon": 4}}
    settings = config(tmp_path, tiny_model, data, algorithm)
    settings["training"]["num_steps"] = 1
    settings["checkpoint"] = {"at_end": True}
    roll.train(settings)
    roll.resume(tmp_path / "run", ["training.num_steps=2"])
    for row in rows(tmp_path, "train"):
        assert row["data/demonstrations"] == 3 and row["training/stepped"] == 1
        assert row["training/kl/coefficient"] == 0.1 and "training/kl/reference" not in row
