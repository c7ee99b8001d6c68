"""Runs that begin in the midst of successful episodes, end to end on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.harness import tiny_config

import roll
from roll.errors import DataError

WORLD = """
    import os

    class Corridor:  # every action leads on; what is said in the right places counts
        def reset(self, seed=None):
            self.seed, self.place, self.right = seed, 0, True
            return f"Room 0 of {seed}.", {"state": "0"}

        def step(self, action):
            self.place += 1
            self.right = self.right and (self.place > 2 or action == f"go {self.seed}")
            noise = os.urandom(4).hex() if NOISE else ""
            reward = float(self.right) if self.place == 3 else 0.0
            return f"Room {self.place}{noise}.", reward, self.place == 3, False, {"state": str(self.place)}
"""


def world(directory: Path, noise: str = "False") -> str:
    import textwrap

    name = "noisy" if noise == "True" else "corridor"  # a class is imported once
    (directory / f"{name}.py").write_text(textwrap.dedent(WORLD).replace("NOISE", noise))
    return f"{directory}/{name}.py:Corridor"


def shown(directory: Path, *rows: dict[str, Any]) -> str:
    path = directory / "shown.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(directory: Path, source: Path, environment: str, **anchors: Any) -> dict[str, Any]:
    base = tiny_config(source, num_steps=2)
    del base["data"]
    entry = {"environment": environment, "num_turns": 3, "host": "loop", "num_episodes": 4, "num_held_out": 0}
    entry["reward"] = [{"type": "environment"}, {"type": "regex", "pattern": "[a-m]", "require_finished": False}]
    return base | {
        "pipeline": "agentic",
        "output_dir": str(directory),
        "environments": [entry],
        "anchors": {"share": 0.6, **anchors},
        "algorithm": {"type": "ipa"},
        "rollout": {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 4},
        "inference": {"engine": "hf", "max_context": 400},
        "evaluation": {"every_num_steps": 0},
        "checkpoint": {"every_num_steps": 1},
    }


def rows(directory: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if row["kind"] == "train"]


def table(directory: Path, step: int) -> list[dict[str, Any]]:
    from pyarrow import parquet

    path = directory / "run" / "rollouts" / f"step-{step:06d}.parquet"
    return parquet.read_table(path).drop_columns(["reward_duration_s"]).to_pylist()


GO = [{"seed": seed, "actions": [f"go {seed}", f"go {seed}", "done"]} for seed in (2, 0)]


@pytest.mark.parametrize("kind", ["parallel", pytest.param("rollback", marks=pytest.mark.slow)])
def test_anchor_run_groups_begin_at_anchors_are_trained_and_a_resumed_run_goes_on_bit_for_bit(
    tmp_path: Path, tiny_model: Path, kind: str
) -> None:
    environment = world(tmp_path)
    settings = {"type": kind, "demonstrations": shown(tmp_path, *GO), "num_rollouts": 2, "passed_at": 1.0}
    whole = config(tmp_path / "whole", tiny_model, environment, **settings)
    roll.train(whole)
    metrics = rows(tmp_path / "whole")
    assert sum(row["anchors/groups"] for row in metrics) >= 3 and metrics[0]["anchors/kept"] == 2
    assert any(row["data/demonstrations"] > 0 and row["training/stepped"] for row in metrics)
    assert all(row["rollout/infra_errors"] == row["anchors/not_repeated"] == 0 for row in metrics)
    prompts: dict[int, set[tuple[int, ...]]] = {}
    for row in table(tmp_path / "whole", 1):
        prompts.setdefault(row["draw_id"], set()).add(tuple(row["prompt_token_ids"]))
    assert all(len(found) == 1 for found in prompts.values())
    assert len({len(found) for one in prompts.values() for found in one}) > 1  # contexts at anchors are longer

    part = config(tmp_path / "part", tiny_model, environment, **settings)
    part["training"] = {**part["training"], "num_steps": 1}
    roll.train(part)
    roll.resume(tmp_path / "part" / "run", ["training.num_steps=2"])
    # tokens that the environment wrote have no log-prob: NaN
    np.testing.assert_equal(table(tmp_path / "part", 2), table(tmp_path / "whole", 2))
    states = [
        json.loads((tmp_path / f"{name}/run/checkpoints/step-000002/state.json").read_text())
        for name in ("whole", "part")
    ]
    assert all(states[0][key] == states[1][key] for key in ("kept", "begun", "unrepeated", "data", "pending"))


def test_anchor_run_mistakes_in_demonstrations_are_named_before_training(tmp_path: Path, tiny_model: Path) -> None:
    def refused(row: dict[str, Any], words: str, noise: str = "False") -> None:
        environment = world(tmp_path, noise)
        with pytest.raises(DataError, match=words):
            roll.train(config(tmp_path / words[:5], tiny_model, environment, demonstrations=shown(tmp_path, row)))

    refused({"seed": 4, "actions": ["a", "b"]}, r"line 1: seed must be from 0 to 3 .*got 4")
    refused({"seed": 0, "actions": ["a"]}, r"a demonstration must have 2 to num_turns .3. actions, got 1.")
    refused({"seed": 0, "action": ["a", "b"]}, r"unknown keys \['action'\]")
    refused(
        {"seed": 0, "actions": ["no", "go 0", "x"]},
        r"does not succeed in .*: 3 of 3 actions were played, and the reward",
    )
    refused(GO[0], r"responded differently when the demonstration was played again", noise="True")
