"""`roll check` of a vision-language model, and of a model that reads only text where images are configured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from worlds.vision_models import picture, write_vision_model

from roll.config.load import load_config
from roll.pipelines.registry import CHECKS
from roll.preflight.inspection import needs_torch


@pytest.fixture(scope="module", name="world")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision")
    write_vision_model(directory / "model", "smolvlm")
    picture(0, 24, 40).save(directory / "0.png")
    rows = [{"prompt": f"Look: <image> What is {i}?", "answer": str(i), "images": "0.png"} for i in range(4)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def make_settings(world: Path, **changes: Any) -> dict[str, Any]:
    return {
        "pipeline": "rlvr",
        "name": "x",
        "output_dir": str(world / "runs"),
        "model": str(world / "model"),
        "data": [{"source": "file", "path": str(world / "rows.jsonl"), "reward": "exact", "held_out": 0}],
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4},
        "training": {"num_steps": 1},
        "inference": {"engine": "hf"},
        "evaluation": {"num_prompts": 2},
        **changes,
    }


@pytest.mark.integration
def test_cli_check_images_the_command_loads_the_image_processor(world: Path, tmp_path: Path) -> None:
    """Processors need torch, which other checks do not load."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(make_settings(world)))
    program = "import sys\nfrom roll.cli.main import run\nsys.exit(run(['check', 'config.yaml'], own_process=True))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "4 prompts to train on" in done.stdout
    assert "| Look: [image " in done.stdout  # the prompt is shown with its image
    assert "not installed" not in done.stderr


def test_cli_check_images_only_models_with_a_processor_need_torch(world: Path, tiny_model: Path) -> None:
    assert needs_torch(load_config(make_settings(world)))
    arithmetic = [{"source": "arithmetic", "reward": "math"}]
    for model, needed in ((world / "model", True), (tiny_model, False), ("nobody/nothing", False), ("./none", False)):
        assert needs_torch(load_config(make_settings(world, model=str(model), data=arithmetic))) is needed


@pytest.mark.parametrize("pipeline", ["rlvr", "sft"])
def test_cli_check_images_a_text_model_has_no_vision_parts(world: Path, tiny_model: Path, pipeline: str) -> None:
    changes: dict[str, Any] = {"model": {"path": str(tiny_model), "vision": {"freeze": ["tower"]}}}
    if pipeline == "rlvr":
        changes["data"] = [{"source": "arithmetic", "reward": "math"}]
        settings = make_settings(world, **changes)
    else:
        settings = {"pipeline": "sft", "name": "x", "output_dir": str(world / "runs"), **changes}
        settings |= {"data": [{"source": "arithmetic"}], "training": {"num_steps": 1}}
    problems = "\n".join(CHECKS.get(pipeline)(load_config(settings)).problems)
    assert f"model.vision is set, but model '{tiny_model}' has no vision tower: remove model.vision" in problems
