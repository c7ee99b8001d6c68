"""Runs of every pipeline and every kind of end, recorded for the tests of the dashboard.

    python tests/recorded/endings.py      trains them on tiny random models and writes endings.tar.xz (some minutes)

Each is a run directory without its models: configuration, metrics, summary, log, rollouts, trace and ledger.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
ARCHIVE = Path(__file__).with_name("endings.tar.xz")
KEPT = ("config.yaml", "metrics.jsonl", "summary.json", "trace.json", "logs/*.log", "rollouts/*.parquet")
WORDS = [f"{number} and then {number + 1}" for number in range(24)]
TEXTS = [{"prompt": w, "completion": w} for w in WORDS]
PAIRS = [{"prompt": w, "chosen": w + " yes", "rejected": w + " no"} for w in WORDS]
ROWS = {"sft": TEXTS, "preference": PAIRS, "reward_model": PAIRS, "distill_offline": TEXTS}
ONLINE: dict[str, dict[str, Any]] = {
    "rlvr": {},
    "agentic": {
        "data": None,
        "environments": [{"environment": "game:GuessTheNumber-v0-easy", "num_turns": 2}],
        "inference": {"engine": "hf", "max_context": 400},
    },
    "distill": {"teacher": "model"},
    "preference_online": {},
    "rejection_sampling": {"rejection": {"keep": 2}},
}
PIPELINES = (*ROWS, *ONLINE)
ENDS = ("finished", "alarm", "error", "interrupted", "killed", "reward-raises")
RAISING = """
def reward(text, answer, metadata):
    if text == answer:  # which is tried before the run starts
        return 1.0
    raise RuntimeError("the grader is down")
"""


def combinations() -> list[tuple[str, str]]:
    """Return pipelines and ends; a pipeline that generates nothing has no reward that could raise."""
    return [(p, end) for p in PIPELINES for end in ENDS if end != "reward-raises" or p in ONLINE]


def configuration(pipeline: str, end: str) -> dict[str, Any]:
    """Return the configuration of one run; paths are relative to the working directory."""
    from chaos.harness import tiny_config

    base = tiny_config(Path("model"), num_steps=4) | {"pipeline": pipeline, "output_dir": "runs"}
    base["name"] = f"{pipeline}-{end}"
    base["checkpoint"] = {"every_num_steps": 2}
    if pipeline in ROWS:
        base = {key: base[key] for key in ("name", "model", "checkpoint", "tracking", "pipeline", "output_dir")}
        base["data"] = [{"source": "file", "path": f"{pipeline}.jsonl", "held_out": 0.2}]
        base["training"] = {"num_epochs": 2, "examples_per_step": 5, "learning_rate": 1e-2, "num_threads": 1}
        base["evaluation"] = {"every_num_steps": 2}
        base |= {"teacher": "model"} if pipeline == "distill_offline" else {}
        if end == "alarm" and pipeline != "reward_model":  # which writes no answers
            answers = {
                "data": [{"source": "arithmetic", "reward": {"type": "python", "function": "raising.py:reward"}}]
            }
            base["evaluation"]["answers"] = answers | {"max_new_tokens": 4, "inference": {"engine": "hf"}}
        return base
    base |= ONLINE[pipeline]
    if base["data"] is None:
        del base["data"]
    raising = {"type": "python", "function": "raising.py:reward"}
    if end == "reward-raises":
        for source in base.get("environments", base.get("data", ())):
            source["reward"] = raising
        base["evaluation"]["before_training"] = False
    if end == "alarm":
        base["alarms"] = {"action": "stop", "patience": 2, "unfinished_above": 0.0}
    return base


def after_steps(end: str) -> Callable[[int, dict[str, float]], None] | None:
    """Return the function that ends the run in its third step."""

    def third(step: int, metrics: dict[str, float]) -> None:
        if step < 3:
            return
        if end == "error":
            raise OSError("the data server went away")
        os.kill(os.getpid(), signal.SIGINT if end == "interrupted" else signal.SIGKILL)

    return third if end in ("error", "interrupted", "killed") else None


def train(pipeline: str, end: str) -> None:
    """Train one run in this process; whatever ends it is what is recorded."""
    import roll

    try:
        roll.train(configuration(pipeline, end), on_step=after_steps(end))
    except BaseException as error:
        print(f"{pipeline}-{end}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)


def main() -> None:
    """Record all runs."""
    sys.path.insert(0, str(TESTS))
    from worlds.tiny_model import write_tiny_model

    import roll  # noqa: F401  (before torch, and once for all forked processes)

    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        write_tiny_model(Path("model"))
        Path("raising.py").write_text(RAISING)
        for name, rows in ROWS.items():
            Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for pipeline, end in combinations():
            process = multiprocessing.get_context("fork").Process(target=train, args=(pipeline, end))
            process.start()
            process.join(300)
            print(pipeline, end, process.exitcode, file=sys.stderr, flush=True)
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for run in sorted(Path("runs").iterdir()):
                _keep(archive, run, directory)


def _keep(archive: tarfile.TarFile, run: Path, directory: str) -> None:
    files = [file for pattern in KEPT for file in sorted(run.glob(pattern))]
    ledgers = sorted(run.glob("checkpoints/*/ledger.jsonl"))
    for file in (*files, *ledgers[-1:]):
        if file.suffix in {".log", ".json", ".yaml"}:
            file.write_text(file.read_text().replace(directory, "."))
        archive.add(file, file.relative_to("runs"))


if __name__ == "__main__":
    main()
