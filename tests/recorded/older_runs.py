"""Runs of an earlier version, which later ones must resume, show, export and replay.

    git worktree add ../earlier COMMIT
    PYTHONPATH=../earlier/src python tests/recorded/older_runs.py ../earlier      writes older_runs.tar.xz

The archive has a tiny random model, two run directories with a checkpoint, and every example's configuration, all as
commit 7d4b603a wrote them. `DIRECTORY` stands in for the directory that the runs were made in.
"""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
ARCHIVE = Path(__file__).with_name("older_runs.tar.xz")
LETTERS = {"type": "regex", "pattern": "[a-m]", "require_finished": False}


def extract_older_runs(directory: Path) -> None:
    """Unpack the archive into `directory`, as if the runs had been made there."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    for origin in directory.glob("runs/*/.origin.yaml"):
        origin.write_text(origin.read_text().replace("DIRECTORY", str(directory)))


def _configurations() -> list[dict[str, Any]]:
    from chaos.harness import tiny_config

    base = tiny_config(Path("model"), num_steps=2) | {"output_dir": "runs"}
    quiet = {"console": "quiet", "tensorboard": False}
    played = {"environment": "guess_number", "num_turns": 2, "reward": [{"type": "environment"}, LETTERS]}
    return [
        base | {"name": "rlvr", "pipeline": "rlvr", "tracking": {**quiet, "record_rollouts": True}},
        {key: value for key, value in base.items() if key != "data"}
        | {
            "name": "agentic",
            "pipeline": "agentic",
            "tracking": quiet,
            "environments": [
                {**played, "domain": name, "options": {"max_number": most}} for name, most in (("near", 3), ("far", 9))
            ],
            "inference": {"engine": "hf", "max_context": 400},
            "curriculum": {"num_episodes": 8},
            "anchors": {},
            "algorithm": {"type": "ipa"},
        },
    ]


def main(earlier: Path) -> None:
    """Make the runs, and pack them with the examples of the checkout `earlier`."""
    sys.path.insert(0, str(TESTS))
    from worlds.tiny_model import write_tiny_model

    import roll

    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        write_tiny_model("model", hidden=16)
        for configuration in _configurations():
            roll.train(configuration)
        for origin in Path("runs").glob("*/.origin.yaml"):
            origin.write_text(origin.read_text().replace(directory, "DIRECTORY"))
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            archive.add("model")
            for file in sorted(Path("runs").rglob("*")):
                if file.is_file() and file.name not in (".lock", "reward.png"):
                    archive.add(file)
            for example in sorted((earlier / "examples").glob("*.yaml")):
                archive.add(example, Path("examples") / example.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
