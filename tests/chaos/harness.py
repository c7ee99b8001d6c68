"""Runs of ROLL in processes of their own, that can be killed and compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from worlds.forked import ForkedCommand
from worlds.timing import is_timing

__all__ = ["Run", "tiny_config"]

TIMEOUT_S = 300.0


def tiny_config(model: Path, *, engine: str = "hf", num_steps: int = 6) -> dict[str, Any]:
    """A run of a few seconds whose rewards vary, on a random model."""
    return {
        "name": "run",
        "model": {"path": str(model), "dtype": "float32"},
        "data": [
            {
                "source": "arithmetic",
                "reward": [{"type": "regex", "pattern": "[a-m]", "require_finished": False}],
            }
        ],
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 6},
        "training": {"num_steps": num_steps, "learning_rate": 1e-3, "num_threads": 1},
        "inference": {"engine": engine},
        "evaluation": {"every_num_steps": 2, "num_prompts": 3, "samples_per_prompt": 2},
        "checkpoint": {"every_num_steps": 2},
        "tracking": {"console": "quiet", "tensorboard": False},
    }


class Run:
    """One run directory, driven from outside.

    Its commands run in processes that are forked from one which has imported what they need, save those that start
    vLLM or a Ray cluster, and save where a test asks for processes of a new interpreter.
    """

    _forks = False

    def __init__(self, directory: Path, config: dict[str, Any], *, forks: bool = True) -> None:
        starts_programs = (
            config.get("cluster", {}).get("type") == "ray" or config.get("inference", {}).get("engine") == "vllm"
        )
        self._forks = forks and not starts_programs
        directory.mkdir(parents=True)
        self._file = directory / "config.yaml"
        self._file.write_text(yaml.safe_dump({**config, "output_dir": str(directory)}))
        self.path = directory / config["name"]

    @classmethod
    def at(cls, path: Path) -> Run:
        """A run that is there already, to read."""
        run = cls.__new__(cls)
        run.path = path
        return run

    def start(self, *command: str) -> subprocess.Popen[bytes] | ForkedCommand:
        """Start a command of `roll` in a process group of its own."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if self._forks:
            return ForkedCommand(*command, environment=environment)
        return subprocess.Popen(
            [sys.executable, "-c", "from roll.cli import main; main()", *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def begin(self) -> subprocess.Popen[bytes] | ForkedCommand:
        """`roll train`, or `roll resume` where the run exists."""
        if (self.path / "config.yaml").is_file():
            return self.start("resume", str(self.path))
        return self.start("train", str(self._file))

    def finish(self) -> float:
        """Run to the end; returns the seconds it took."""
        started = time.monotonic()
        process = self.begin()
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, errors.decode()
        return time.monotonic() - started

    def kill_after(self, seconds: float) -> bool:
        """Run, and kill -9 after so many seconds; false where it had ended before."""
        process = self.begin()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        return process.returncode == -signal.SIGKILL

    def kill_after_a_checkpoint(self, seconds: float) -> bool:
        """Begin, and kill -9 so many seconds after the first new checkpoint is there."""

        def checkpoints() -> set[Path]:
            return set((self.path / "checkpoints").glob("step-*/ledger.jsonl"))

        before = checkpoints()
        process = self.begin()
        while process.poll() is None and not checkpoints() - before:
            time.sleep(0.01)
        time.sleep(seconds)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        return process.returncode == -signal.SIGKILL

    def metrics(self) -> list[dict[str, Any]]:
        """What was recorded, without durations and memory."""
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not is_timing(k)} for line in lines]

    def rollouts(self) -> dict[str, list[Any]]:
        """Tokens, rewards and advantages of every recorded rollout, by file."""
        from pyarrow import parquet

        found = {}
        for path in sorted((self.path / "rollouts").glob("*.parquet")):
            table = parquet.read_table(path).to_pydict()
            found[path.name] = [table[name] for name in ("token_ids", "logprobs", "reward", "advantage")]
        return found

    def checkpoint(self) -> Path:
        """The newest one."""
        return max((self.path / "checkpoints").glob("step-*"))

    def ledger(self) -> list[dict[str, Any]]:
        """Entries of the newest checkpoint's ledger."""
        return [json.loads(line) for line in (self.checkpoint() / "ledger.jsonl").read_text().splitlines()]
