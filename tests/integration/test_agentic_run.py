"""Runs in environments, end to end on a tiny random model: shipped ones, a class of one's own, and both mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config

import roll
from roll.errors import CallbackError, ConfigError, DataError

REWARD = [{"type": "environment"}, {"type": "regex", "pattern": "[a-m]", "require_finished": False}]
"""The model hardly ever ends an answer: with the second part, answers differ all the same."""
OWN = """
    class Letters:  # as an environment of a user is: five values, and nothing of ROLL
        def reset(self, seed=None):
            self.turn = 0
            return f"Say the letter {'abc'[(seed or 0) % 3]}.", {"state": str((seed or 0) % 3)}

        def step(self, action):
            self.turn += 1
            return "Again.", float(len(set(action)) % 3), self.turn == 3, False, {"state": str(self.turn)}
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    import textwrap

    (tmp_path / "letters.py").write_text(textwrap.dedent(OWN))
    return f"{tmp_path}/letters.py:Letters"


def config(directory: Path, source: Path, environments: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    base = tiny_config(source, num_steps=2)
    del base["data"]
    base |= {
        "pipeline": "agentic",
        "output_dir": str(directory),
        "environments": environments,
        "algorithm": {"type": "star_po"},
        "rollout": {"prompts_per_step": 3, "group_size": 3, "max_new_tokens": 4},
        "inference": {"engine": "hf", "max_context": 400},
        "evaluation": {"every_num_steps": 0, "num_prompts": 2, "samples_per_prompt": 1},
    }
    return base | changes


def rows(directory: Path, kind: str = "train") -> list[dict[str, Any]]:
    found = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if row["kind"] == kind]


def test_agentic_run_a_users_own_class_is_trained_in_processes_of_its_own(
    tmp_path: Path, tiny_model: Path, own: str
) -> None:
    roll.train(config(tmp_path, tiny_model, [{"environment": own, "num_turns": 2, "reward": REWARD}]))
    first, last = rows(tmp_path)
    assert any(row.get("training/stepped") for row in (first, last))
    assert first["env/letters.py:Letters/num_episodes"] == 9
    assert first["env/letters.py:Letters/turns_mean"] <= 2
    assert first["env/letters.py:Letters/failures"] == 0
    assert first["rollout/infra_errors"] == 0
    assert len(rows(tmp_path, "evaluation")) == 2


def test_agentic_run_that_an_error_ends_keeps_success_rates_of_its_last_boundary(
    tmp_path: Path, tiny_model: Path
) -> None:
    """What is saved is of one boundary: step, draws, and what the curriculum knows after them."""
    names = ("near", "far")
    environments = [{"environment": "guess_number", "domain": name, "num_turns": 2, "reward": REWARD} for name in names]

    def fail(step: int, metrics: dict[str, float]) -> None:
        raise OSError("the data server went away")

    with pytest.raises(CallbackError, match="went away"):
        roll.train(config(tmp_path, tiny_model, environments, curriculum={}), on_step=fail)
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-000001" / "state.json").read_text())
    assert state["step"] == 1
    assert set(state["success_rates"]) <= set(names) and state["success_rates"]


def table(directory: Path, step: int) -> list[dict[str, Any]]:
    from pyarrow import parquet

    return parquet.read_table(directory / "run" / "rollouts" / f"step-{step:06d}.parquet").to_pylist()


def test_agentic_run_a_groups_rollouts_begin_alike_and_the_prompt_is_what_the_environment_says(
    tmp_path: Path, tiny_model: Path, own: str
) -> None:
    entry = {"environment": own, "num_turns": 2, "host": "loop", "system_prompt": "S", "prompt_template": "<{prompt}>"}
    tools = {"tools": ["calculator"], "tool_calls": {"explain": False}}
    roll.train(config(tmp_path, tiny_model, [entry | tools]))
    assert rows(tmp_path)[0]["env/letters.py:Letters/tool_uses"] == 0
    prompts: dict[int, set[tuple[int, ...]]] = {}
    for row in table(tmp_path, 1):
        prompts.setdefault(row["draw_id"], set()).add(tuple(row["prompt_token_ids"]))
    assert len(prompts) == 3
    assert all(len(found) == 1 for found in prompts.values())


@pytest.mark.parametrize("async_ratio", [0, 1])
def test_agentic_run_environments_are_mixed_by_a_curriculum_and_a_resumed_run_goes_on_alike(
    tmp_path: Path, tiny_model: Path, own: str, async_ratio: float
) -> None:
    environments = [{"environment": own, "num_turns": 3, "host": "loop"},
                    {"environment": "guess_number", "num_turns": 2, "options": {"max_number": 3}}]  # fmt: skip
    changes = {"curriculum": {"num_episodes": 4}, "algorithm": {"type": "gi_gpo"}}
    whole = config(tmp_path / "whole", tiny_model, environments, **changes)
    whole["rollout"]["scheduling"] = {"async_ratio": async_ratio}
    whole["checkpoint"] = {"every_num_steps": 1}
    roll.train(whole)
    state = json.loads((tmp_path / "whole/run/checkpoints/step-000002/state.json").read_text())
    assert set(state["success_rates"]) <= {"letters.py:Letters", "guess_number"}
    if async_ratio:
        return
    halves = {**whole, "output_dir": str(tmp_path / "halves"), "training": {**whole["training"], "num_steps": 1}}
    roll.train(halves)
    roll.resume(tmp_path / "halves" / "run", ["training.num_steps=2"])
    assert [row["token_ids"] for row in table(tmp_path / "halves", 2)] == [
        row["token_ids"] for row in table(tmp_path / "whole", 2)
    ]
    resumed = json.loads((tmp_path / "halves/run/checkpoints/step-000002/state.json").read_text())
    assert resumed["success_rates"] == state["success_rates"]


def test_agentic_run_mistakes_are_named_before_anything_starts(tmp_path: Path, tiny_model: Path, own: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown environment 'game:GuessTheNumber-v0-eazy'.*-easy"):
        roll.train(config(tmp_path, tiny_model, [{"environment": "game:GuessTheNumber-v0-eazy"}]))
    with pytest.raises(DataError, match=r"max_numbr"):
        roll.train(config(tmp_path, tiny_model, [{"environment": "guess_number", "options": {"max_numbr": 3}}]))
    with pytest.raises(ConfigError, match=r"environment names must be unique"):
        roll.train(config(tmp_path, tiny_model, [{"environment": own}, {"environment": own}]))
    with pytest.raises(ConfigError, match="unknown wrapper 'time_limits'"):
        roll.train(config(tmp_path, tiny_model, [{"environment": "guess_number", "wrappers": ["time_limits"]}]))
