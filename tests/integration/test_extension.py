"""The example package in `examples/extension`: installed, and trained with by the names of its entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "examples" / "extension"
SMALL = ["training.num_steps=1", "evaluation.num_prompts=1", "rollout.prompts_per_step=2", "rollout.group_size=2"]

UNSCORED = ["algorithm.filters.skip_zero_variance=false"]
"""A random model's answers all get a reward of 0; they are trained on all the same."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the package is installed, built from a copy: a build leaves files behind."""
    copy, site = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("site")
    subprocess.run(["cp", "-r", EXTENSION / "src", EXTENSION / "pyproject.toml", copy], check=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", site, copy], check=True)
    return site


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        (EXTENSION / "run.yaml", UNSCORED),
        (EXTENSION / "episodes.yaml", UNSCORED),
        (EXTENSION / "longest.yaml", []),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_extension_trains_by_the_names_of_its_entry_points(
    file: Path, changes: list[str], site: Path, tmp_path: Path, tiny_model: Path
) -> None:
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    changes = [
        *SMALL,
        *changes,
        f"model={tiny_model}",
        "name=run",
        "tracking.tensorboard=false",
        "inference.engine=plain",
    ]
    for command in ("check", "train"):
        done = subprocess.run(
            [sys.executable, "-m", "roll", command, file, *changes],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    [trained] = [
        row
        for row in map(json.loads, (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines())
        if row["kind"] == "train"
    ]
    resolved = yaml.safe_load((tmp_path / "runs" / "run" / "config.yaml").read_text())
    if file.stem == "run":
        assert resolved["inference"]["engine"] == "plain" and trained["training/own/kl"] == 0  # one update: on-policy
        assert resolved["data"][0]["reward"][0]["function"] == "roll_example.reward:sum_distance"
    assert trained["step"] == 1
