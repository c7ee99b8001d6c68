"""What is known of a run before any role starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from worlds.tiny_model import write_tiny_model

import roll
from roll.config.pipelines.rlvr import RLVRConfig
from roll.errors import ConfigError, ModelError
from roll.pipelines.preparation import prepare

OBSERVATION = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path)
    return path


def game(model: Path, num_turns: int, sent: str = "none", **inference: Any) -> RLVRConfig:
    return RLVRConfig.model_validate(
        {
            "name": "x",
            "model": str(model),
            "training": {"num_steps": 1},
            "rollout": {"max_new_tokens": 8, "episodes": {"observation_tokens": OBSERVATION}},
            "inference": inference,
            "weight_sync": {"quantization": sent},
            "data": [{"source": "guess_number", "max_number": 3, "num_turns": num_turns}],
        }
    )


@pytest.mark.parametrize("num_turns", [1, 2, 5])
def test_preparation_engines_hold_every_turn_and_the_observations_between_them(model: Path, num_turns: int) -> None:
    material = prepare(game(model, num_turns))
    assert material.data.longest_prompt is not None
    assert material.max_context == material.data.longest_prompt + 8 * num_turns + OBSERVATION * (num_turns - 1)


def test_preparation_a_context_that_the_user_chose_is_kept_also_where_not_all_turns_fit(model: Path) -> None:
    enough = prepare(game(model, 3)).max_context
    assert prepare(game(model, 3, max_context=enough - 1)).max_context == enough - 1


def test_preparation_no_text_may_be_so_long_that_others_are_turned_otherwise(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings | {"rope_parameters": rope}))
    limit = settings["max_position_embeddings"]
    assert prepare(game(tmp_path / "model", 3, max_context=limit)).max_context == limit
    with pytest.raises(ConfigError, match=f"set inference.max_context to at most {limit}"):
        prepare(game(tmp_path / "model", 3, max_context=limit + 1))


def test_preparation_a_reward_function_that_is_not_there_is_missed_before_any_engine_starts(model: Path) -> None:
    settings = game(model, 1).model_dump(mode="json")
    reward = {"type": "python", "function": "there/rewards.py:good"}
    settings["data"] = [{"source": "arithmetic", "reward": reward}]
    with pytest.raises(ConfigError, match=r"file 'there/rewards\.py' does not exist"):
        prepare(RLVRConfig.model_validate(settings))


def test_preparation_experts_in_one_tensor_cannot_go_to_engines_in_8_bits(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    save_file({"model.layers.0.mlp.experts.up": np.zeros((2, 3, 4))}, tmp_path / "model" / "extra.safetensors")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "first.safetensors")
    files = dict.fromkeys(load_file(tmp_path / "model" / "first.safetensors"), "first.safetensors")
    files |= {"model.layers.0.mlp.experts.up": "extra.safetensors"}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    prepare(game(tmp_path / "model", 1))
    prepare(game(model, 1, "int8"))
    with pytest.raises(ModelError, match=r"experts\.up' of all experts in one tensor"):
        prepare(game(tmp_path / "model", 1, "int8"))
    report = roll.check(game(tmp_path / "model", 1, "int8"))
    assert any("weight_sync.quantization" in problem for problem in report.problems)
    dense = roll.check(game(model, 1, "int8", engine="hf"))
    assert not dense.problems
    assert "a weight sync sends 0 MB, linear weights as int8; engines convert" in "\n".join(dense.batch)
