"""Runs of an earlier version, which later ones must resume, show, export and replay.

    git worktree add ../earlier COMMIT
    PYTHONPATH=../earlier/src python tests/recorded/older_runs.py ../earlier ARCHIVE

| archive             | commit   | what it has                                                                       |
|---------------------|----------|-----------------------------------------------------------------------------------|
| older_runs.tar.xz   | 7d4b603a | runs of `rlvr` and `agentic`, every example's configuration                       |
| older_names.tar.xz  | 1f697b90 | runs of `rlvr` and `sft`, and configurations, with names that were renamed since  |

Each has a tiny random model, and run directories with a checkpoint. `DIRECTORY` stands in for the directory that the
runs were made in.
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
LETTERS = {"type": "regex", "pattern": "[a-m]", "require_finished": False}


def extract_older_runs(directory: Path, name: str = "older_runs.tar.xz") -> None:
    """Unpack an archive into `directory`, as if the runs had been made there."""
    with tarfile.open(Path(__file__).with_name(name)) as archive:
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


def _renamed_configurations() -> list[dict[str, Any]]:
    """Return runs whose configuration and metrics have names that were renamed since."""
    from chaos.harness import tiny_config

    base = tiny_config(Path("model"), num_steps=2) | {"output_dir": "runs"}
    tracking = {"console": "quiet", "tensorboard": False}
    training = {**base["training"], "mlp_slice_tokens": 64, "close_heap": True}
    rows = [{"prompt": f"What is {n} + 1?", "completion": str(n + 1)} for n in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        base
        | {
            "name": "rlvr",
            "tracking": {**tracking, "record_rollouts": True},
            "training": training,
            "algorithm": {
                "correction": {"mask_low": 0.01},
                "ratio": {"level": "sequence", "token_limit": 5.0},
            },
            "rollout": {
                **base["rollout"],
                "scheduling": {"rollout_redundancy": 1.5, "stop_doomed_groups": True, "reward_range": [0.0, 1.0]},
            },
            "sandbox": {"patience_s": 30.0},
        },
        {key: value for key, value in base.items() if key in ("model", "output_dir", "checkpoint")}
        | {
            "name": "sft",
            "pipeline": "sft",
            "tracking": tracking,
            "training": {**training, "examples_per_step": 4},
            "data": [{"source": "file", "path": "rows.jsonl", "held_out": 0.25}],
            "evaluation": {"every_num_steps": 2},
        },
    ]


def _write_renamed_files(directory: Path) -> None:
    """Write configurations of what the runs do not use: tools, agents, judges, reward models."""
    from roll.config.load import dump_yaml, load_config

    base = {"name": "x", "model": "model", "training": {"num_steps": 1}}
    tools = [{"tool": "calculator"}]
    judge = {"type": "judge", "verdict": "likeliest", "mode": "pointwise"}
    configurations = {
        "tools": {
            **base,
            "pipeline": "agentic",
            "environments": [
                {
                    "source": "environment",
                    "environment": "guess_number",
                    "tools": tools,
                    "num_turns": 4,
                    "tool_calls": {"form": "hermes", "reads_reasoning": True},
                },
                {"source": "environment", "environment": "guess_number", "domain": "other"},
            ],
            "curriculum": {"least_share": 0.2},
        },
        "agent": {
            **base,
            "data": [{"source": "arithmetic", "reward": "math"}],
            "rollout": {"agent": {"command": ["cat"], "demands": "refuse", "when_it_fails": "score"}},
        },
        "judge": {**base, "data": [{"source": "arithmetic", "reward": [judge]}], "judge": {"model": "model"}},
        "scores": {
            **base,
            "pipeline": "reward_model",
            "data": [{"source": "file", "path": "pairs.jsonl"}],
            "reward_model": {"centring": 0.01},
        },
        "teacher": {
            **base,
            "pipeline": "distill_offline",
            "data": [{"source": "file", "path": "rows.jsonl"}],
            "teacher": [{"model": "model"}],
            "distillation": {"place": "kept", "num_top": 8},
        },
        "pairs": {
            **base,
            "pipeline": "preference",
            "data": [{"source": "file", "path": "pairs.jsonl"}],
            "preference": {"reference": "kept"},
        },
    }
    directory.mkdir()
    for name, configuration in configurations.items():
        (directory / f"{name}.yaml").write_text(dump_yaml(load_config(configuration)))


def main(earlier: Path, name: str) -> None:
    """Make the runs, and pack them with the examples of the checkout `earlier`."""
    sys.path.insert(0, str(earlier / "tests"))
    from worlds.tiny_model import write_tiny_model

    import roll

    renamed = name == "older_names.tar.xz"
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        write_tiny_model("model", hidden=16)
        for configuration in _renamed_configurations() if renamed else _configurations():
            roll.train(configuration)
        for origin in Path("runs").glob("*/.origin.yaml"):
            origin.write_text(origin.read_text().replace(directory, "DIRECTORY"))
        with tarfile.open(Path(__file__).with_name(name), "w:xz") as archive:
            archive.add("model")
            for file in sorted(Path("runs").rglob("*")):
                if file.is_file() and file.name not in (".lock", "reward.png"):
                    archive.add(file)
            if renamed:
                _write_renamed_files(Path("configurations"))
                archive.add("rows.jsonl")
                archive.add("configurations")
            for example in sorted((earlier / "examples").glob("simulation/*.yaml" if renamed else "*.yaml")):
                archive.add(example, Path("examples") / example.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
