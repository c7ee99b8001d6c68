"""The commands on a tiny model, each in a process of its own, as a user runs them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

ROLL = [sys.executable, "-c", "from roll.cli import main; main()"]


@pytest.fixture
def place(tmp_path, tiny_model):
    config = {
        "name": "trial",
        "model": {"path": str(tiny_model), "dtype": "float32"},
        "data": [{"source": "arithmetic", "reward": {"type": "python", "function": "own.py:score"}}],
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4},
        "training": {"num_steps": 2, "num_threads": 1},
        "evaluation": {"num_prompts": 3, "samples_per_prompt": 2, "before_training": False},
        "inference": {"engine": "hf"},
        "tracking": {"console": "plain", "tensorboard": False},
    }
    config["data"][0]["reward"]["require_finished"] = False
    (tmp_path / "own.py").write_text("def score(text, answer, metadata):\n    return float(hash(text) % 7)\n")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def roll(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ROLL, *arguments], cwd=place, capture_output=True, text=True, timeout=200, check=False)


def test_cli_train_export_eval_resume(place):
    trained = roll(place, "train", "config.yaml")
    assert trained.returncode == 0, trained.stderr
    run = place / "runs" / "trial"
    assert json.loads((run / "summary.json").read_text())["num_steps"] == 2

    again = roll(place, "train", "config.yaml")
    assert again.returncode == 2
    assert "roll resume runs/trial" in again.stderr

    exported = roll(place, "export", "runs/trial", "model")
    assert (exported.returncode, exported.stdout) == (0, "model\n")
    assert (place / "model" / "model.safetensors").is_file()
    assert roll(place, "export", "runs/trial", "model").returncode == 2

    evaluated = roll(place, "eval", "config.yaml", "--model", "runs/trial")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["eval/num_answers"] == 6

    resumed = roll(place, "resume", "runs/trial", "training.num_steps=3")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((run / "summary.json").read_text())["num_steps"] == 3
    assert yaml.safe_load((run / "config.yaml").read_text())["training"]["num_steps"] == 3
    assert [entry["from_step"] for entry in yaml.safe_load((run / "config_history.yaml").read_text())] == [3]

    (run / "summary.json").unlink()
    plain = roll(place, "resume", "runs/trial")
    assert plain.returncode == 0, plain.stderr
    assert json.loads((run / "summary.json").read_text())["num_steps"] == 3

    fewer = roll(place, "resume", "runs/trial", "training.num_steps=2")
    assert fewer.returncode == 2
    assert (
        "'runs/trial' is already at step 3, but the configuration has only 2 steps: raise training.num_steps"
        in fewer.stderr
    )
    refused = roll(place, "resume", "runs/trial", "data.0={source: file, path: none.jsonl, reward: exact}")
    assert refused.returncode == 2, refused.stderr
    assert yaml.safe_load((run / "config.yaml").read_text())["data"][0]["source"] == "arithmetic"


def test_cli_ctrl_c_saves_and_says_how_to_go_on(place):
    command = [*ROLL, "train", "config.yaml", "training.num_steps=100000"]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=place, text=True, **both) as process:
        try:
            assert process.stdout is not None
            next(line for line in process.stdout if line.startswith("step "))
            process.send_signal(signal.SIGINT)
            shown, _ = process.communicate(timeout=120)
        finally:
            process.kill()  # whatever went wrong, nothing is left behind
    assert process.returncode == 130, shown
    assert "roll resume runs/trial" in shown
    assert "Traceback" not in shown
    assert len(list((place / "runs" / "trial" / "checkpoints").glob("step-*"))) == 1
