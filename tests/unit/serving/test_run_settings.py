"""`roll serve run.yaml`: the model, trainer and engine of a run's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from api_client import KEY, client, datum
from click.testing import CliRunner

from roll.cli.serve import serve
from roll.errors import ConfigError
from roll.serving import ServeSettings
from roll.serving.run_settings import read_run_settings
from roll.serving.startup import open_server

RAY = {
    "cluster__type": "ray",
    "cluster__devices_per_node": 4,
    "cluster__device_mapping": {"actor_train": [0, 1], "actor_infer": [2, 3]},
}


def write_config(tmp_path: Path, model: Path, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "pipeline": "rlvr",
        "name": "run",
        "model": {"path": str(model), "dtype": "float32", "lora": {"rank": 6, "alpha": 12.0}},
        "data": [{"source": "arithmetic", "reward": [{"type": "math"}]}],
        "rollout": {"max_new_tokens": 8},
        "training": {"num_steps": 1, "num_threads": 1, "learning_rate": 1e-3},
        "inference": {"engine": "hf", "max_context": 80, "max_num_seqs": 3},
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        content[section] = {**content.get(section, {}), key: value}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


async def test_serving_config_file_sets_model_trainer_and_engine(tiny_model: Path, tmp_path: Path) -> None:
    chosen = read_run_settings(write_config(tmp_path, tiny_model))
    settings = ServeSettings(name="tiny", directory=tmp_path / "served", port=0, keys={KEY: "alice"}, **chosen)
    assert (settings.model, settings.dtype, settings.engine) == (str(tiny_model), "float32", "hf")
    assert (settings.max_rank, settings.alpha, settings.max_context, settings.num_threads) == (6, 12.0, 80, 1)
    async with open_server(settings) as server, client(server) as one:
        assert server.service._sampler._engines.members[0]._running.engine._spec.max_num_seqs == 3
        model = await one.create_model(rank=6)
        each = datum([5, 6, 7], [6, 7, 8], weights=np.ones(3))
        first, _ = await one.forward_backward(model, [each])
        await one.step(model)
        assert (await one.forward_backward(model, [each]))[0] < first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__lora": {"use_dora": True}}, r"does not support model\.lora\.use_dora \(True\)"),
        ({"model__lora": {"target_modules": ["q_proj"]}}, r"does not support model\.lora\.target_modules"),
        ({"training__optimizer": "adamw_8bit"}, r"supports only training\.optimizer adamw, got adamw_8bit"),
        ({**RAY, "training__parallel": {"tp": 2}}, r"does not support training\.parallel\.tp \(2\)"),
        ({**RAY, "training__parallel": {"pp": 2}}, r"does not support training\.parallel\.pp \(2\)"),
        ({**RAY, "inference__tensor_parallel": [1, 2]}, "engines of one width"),
        ({**RAY, "cluster__address": "auto"}, r"does not support cluster\.address"),
        ({**RAY, "cluster__num_nodes": 2}, r"does not support cluster\.num_nodes"),
        ({"training__backend": "deepspeed"}, "supports only training.backend torch"),
        ({"training__nonsense": 1}, "training.nonsense"),
    ],
)
def test_serving_config_file_with_unsupported_settings_is_rejected(
    tiny_model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_run_settings(write_config(tmp_path, tiny_model, **changes))


def test_serving_config_file_sets_the_numbers_of_ranks_and_engines(tiny_model: Path, tmp_path: Path) -> None:
    chosen = read_run_settings(write_config(tmp_path, tiny_model, **RAY))
    assert chosen["num_engines"] == 2 and chosen["cluster"].type == "ray"
    assert {name: role.count for name, role in chosen["roles"].items()} == {"actor_train": 2, "actor_infer": 2}
    alone = read_run_settings(write_config(tmp_path, tiny_model))
    assert alone["num_engines"] == 1 and alone["cluster"].type == "local"


def test_serving_options_that_the_config_file_sets_are_rejected(tiny_model: Path, tmp_path: Path) -> None:
    file = write_config(tmp_path, tiny_model)
    found = CliRunner().invoke(serve, [str(file), "--max-rank", "4"])
    assert isinstance(found.exception, ConfigError) and "--max-rank cannot be given with" in str(found.exception)
