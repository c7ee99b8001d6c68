"""Every method through the real engine, trainer and pipeline, on a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config

import roll
from roll.config.presets import PRESET_NAMES

MULTI_TURN = ("star_po", "gi_gpo", "rebn", "ipa")
TRAINED_HERE = ("attention_credit", "asy_ppo", "dapo", "gspo", "remax", "gi_gpo")
"""The presets that differ most in what a run does; `make test SUITE=matrices` trains with the others."""
GAME = [{"source": "guess_number", "max_number": 3, "num_turns": 2}]


def presets(names: Iterable[str]) -> list[Any]:
    """Those that are not trained in `make test` are marked."""
    marks = (pytest.mark.matrix, pytest.mark.slow)
    return [name if name in TRAINED_HERE else pytest.param(name, marks=marks) for name in names]


def config(directory: Path, source: Path, algorithm: dict[str, Any], **changes: Any) -> dict[str, Any]:
    base = tiny_config(source, num_steps=2)
    base["evaluation"] = {"every_num_steps": 0, "num_prompts": 2, "samples_per_prompt": 1, "before_training": False}
    return {**base, "output_dir": str(directory), "algorithm": algorithm, **changes}


def steps(directory: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize("preset", presets(name for name in PRESET_NAMES if name not in MULTI_TURN))
def test_algorithm_run_a_preset_trains(tmp_path: Path, tiny_model: Path, preset: str) -> None:
    roll.train(config(tmp_path, tiny_model, {"type": preset}, checkpoint={"at_end": False}))
    rows = steps(tmp_path)
    stepped = [row for row in rows if row.get("training/stepped")]
    assert len(rows) == 2
    assert stepped, rows
    assert any(row["training/grad_norm"] > 0 for row in stepped)  # all rewards of a batch may be equal


@pytest.mark.parametrize("preset", presets(MULTI_TURN))
def test_algorithm_run_a_method_with_turns_trains_on_the_game(tmp_path: Path, tiny_model: Path, preset: str) -> None:
    from pyarrow import parquet

    changes = {
        "data": [{**GAME[0], "reward": [{"type": "environment"}, {"type": "regex", "pattern": "[a-m]",
                                                                 "require_finished": False}]}],
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 6},
        "checkpoint": {"at_end": False},
    }  # fmt: skip
    roll.train(config(tmp_path, tiny_model, {"type": preset}, **changes))
    rows = steps(tmp_path)
    assert any(row.get("training/stepped") for row in rows), rows
    table = parquet.read_table(tmp_path / "run" / "rollouts" / "step-000001.parquet").to_pylist()
    assert all(row["token_ids"] for row in table)


def test_algorithm_run_several_updates_hold_old_logprobs_fixed_and_clip(tmp_path: Path, tiny_model: Path) -> None:
    algorithm = {
        "type": "grpo",
        "updates": {"num_minibatches": 2, "num_epochs": 2},
        "gate": {"low": 0.01, "high": 0.01},
    }
    training = {"num_steps": 2, "learning_rate": 1e-2, "num_threads": 1}
    roll.train(config(tmp_path, tiny_model, algorithm, training=training, checkpoint={"at_end": False}))
    rows = [row for row in steps(tmp_path) if row.get("training/stepped")]
    assert rows
    assert all(row["training/num_updates"] > 1 for row in rows)
    assert any(row["training/policy/clip_fraction"] > 0 for row in rows)  # the second epoch has left ratio 1


def test_algorithm_run_a_kl_penalty_in_the_reward_reaches_the_target_coefficient(
    tmp_path: Path, tiny_model: Path
) -> None:
    algorithm = {
        "type": "reinforce_pp",
        "kl": {"coefficient": 0.1, "target": 1e-9, "horizon": 12, "estimator": "k3"},
    }
    training = {"num_steps": 3, "learning_rate": 1e-2, "num_threads": 1}
    roll.train(config(tmp_path, tiny_model, algorithm, training=training, checkpoint={"at_end": False}))
    found = [row["training/kl/coefficient"] for row in steps(tmp_path)]
    # 12 rollouts of a horizon of 12: the first step's divergence of 0 lowers it by 20 %, the next raises it by 20 %
    assert found == pytest.approx([0.1, 0.08, 0.096])


def test_algorithm_run_refills_are_bounded_and_every_draw_has_an_outcome(tmp_path: Path, tiny_model: Path) -> None:
    never = [{"source": "arithmetic", "reward": [{"type": "regex", "pattern": "(?!)", "require_finished": False}]}]
    algorithm = {"type": "dapo", "filters": {"max_refills": 2}}
    roll.train(config(tmp_path, tiny_model, algorithm, data=never))
    rows = steps(tmp_path)
    assert [row["data/refills"] for row in rows] == [6, 6]  # twice the step's three groups
    assert [row["data/groups_filtered"] for row in rows] == [9, 9]
    assert rows[-1]["ledger/in_flight"] == 0


def test_algorithm_run_an_alarm_stops_the_run_at_a_boundary(tmp_path: Path, tiny_model: Path) -> None:
    from roll.errors import AlarmError

    never = [{"source": "arithmetic", "reward": [{"type": "regex", "pattern": "(?!)", "require_finished": False}]}]
    alarms = {"action": "stop", "patience": 2}
    base = config(tmp_path, tiny_model, {"type": "grpo"}, data=never, alarms=alarms)
    base["training"] = {**base["training"], "num_steps": 5}
    with pytest.raises(AlarmError, match=r"no group has a learning signal.*alarms\.no_signal"):
        roll.train(base)
    assert [row["step"] for row in steps(tmp_path)] == [1, 2]
    assert not list((tmp_path / "run" / "checkpoints").iterdir())  # nothing was trained


def test_algorithm_run_a_loss_and_an_advantage_of_the_users_own_are_used(tmp_path: Path, tiny_model: Path) -> None:
    directory = Path(__file__).parents[2] / "examples" / "algorithms"
    algorithm = {
        "advantage": {"function": f"{directory}/median_baseline.py:advantages"},
        "loss": f"{directory}/pulled_loss.py:loss",
        "kl": {"coefficient": 0.1},  # brings the reference's log-probs, should the loss want them
    }
    roll.train(config(tmp_path, tiny_model, algorithm, checkpoint={"at_end": False}))
    rows = [row for row in steps(tmp_path) if row.get("training/stepped")]
    assert rows
    assert all("training/own/pull" in row for row in rows)


@pytest.mark.parametrize("key", ["loss", "advantage.function"])
def test_algorithm_run_a_function_that_is_not_there_is_refused_before_anything_starts(
    tmp_path: Path, tiny_model: Path, key: str
) -> None:
    from roll.errors import ConfigError

    missing = f"{tmp_path}/none.py:f"
    algorithm = {"loss": missing} if key == "loss" else {"advantage": {"function": missing}}
    with pytest.raises(ConfigError, match="does not exist"):
        roll.train(config(tmp_path, tiny_model, algorithm))
    assert not (tmp_path / "run").exists()
