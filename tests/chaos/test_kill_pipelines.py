"""Runs of every pipeline that is not rlvr, ended at random moments and resumed: bit for bit as if they never were."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import TIMEOUT_S, Run, tiny_config
from chaos.test_kill_and_resume import assert_equal
from worlds.tiny_model import write_tiny_model

NUM_ROWS = 30
MEMORY = {"cluster": {"sharing": "colocated"}}
ADAPTERS = {"lora": {"rank": 4, "dropout": 0.1}}
ANSWERS = {
    "data": [{"source": "arithmetic", "reward": [{"type": "regex", "pattern": "[a-m]", "require_finished": False}]}],
    "num_prompts": 4,
    "max_new_tokens": 6,
    "temperature": 1.0,
    "inference": {"engine": "hf"},
}
ANSWERED = {
    "evaluation": {"every_num_steps": 2, "answers": ANSWERS},
    "checkpoint": {"every_num_steps": 3, "keep_best": True},
}

EXAMPLES: dict[str, dict[str, Any]] = {
    "sft": {"pipeline": "sft", "model": ADAPTERS},
    "sft_background": {
        "pipeline": "sft",
        "model": ADAPTERS,
        "checkpoint": {"every_num_steps": 1, "keep_last": 2, "asynchronous": True},
    },
    "sft_answers": {"pipeline": "sft", **ANSWERED},
    "sft_hand_over": {"pipeline": "sft", **ANSWERED, **MEMORY},
    "dpo": {"pipeline": "preference", "preference": {"type": "dpo"}},
    "kto_adapters": {
        "pipeline": "preference",
        "preference": {"type": "kto", "reference": "adapters"},
        "model": ADAPTERS,
        **ANSWERED,
        **MEMORY,
    },
    "reward_model": {"pipeline": "reward_model"},
}
ONLINE: dict[str, dict[str, Any]] = {
    "distill_engine": {"pipeline": "distill", "distillation": {"mode": "reward"}, "engine": True},
    "distill_held": {"pipeline": "distill", "distillation": {"reward_weight": 0.5}, **MEMORY},
    "distill_trainer": {"pipeline": "distill", "distillation": {"mode": "reward"}, **MEMORY},
    "preference_online": {"pipeline": "preference_online", **MEMORY},
    "rejection_sampling": {"pipeline": "rejection_sampling", "model": ADAPTERS, **MEMORY},
}


def write_rows(path: Path, kind: str) -> Path:
    """Rows that are longer and shorter, so that batches differ."""
    rng, found = random.Random(0), []
    for number in range(NUM_ROWS):
        good, bad = ("".join(rng.choice(letters) for _ in range(rng.randint(2, 9))) for letters in ("abc", "xyz"))
        answers: dict[str, Any] = {"chosen": good, "rejected": bad}
        if kind == "labelled":
            answers = {"completion": good if number % 2 else bad, "label": bool(number % 2)}
        elif kind == "supervised":
            answers = {"completion": good}
        found.append({"prompt": f"say {number}"} | answers)
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def configuration(name: str, directory: Path, model: Path) -> dict[str, Any]:
    """Of a run of a few steps."""
    base = tiny_config(model)
    if name in ONLINE:
        changes = dict(ONLINE[name])
        teacher = {
            "model": str(directory / "teacher"),
            "backend": "engine" if changes.pop("engine", False) else "trainer",
        }
        if changes["pipeline"] == "distill":
            held = changes["distillation"].get("mode") != "reward"
            changes["teacher"] = teacher["model"] if held else teacher
            write_tiny_model(directory / "teacher", seed=1)
    else:
        changes = dict(EXAMPLES[name])
        kind = "labelled" if "kto" in name else "supervised" if "sft" in name else "pair"
        path = write_rows(directory / f"{kind}.jsonl", kind)
        for section in ("rollout", "inference"):
            del base[section]
        base["data"] = [{"source": "file", "path": str(path), "held_out": 0.2}]
        base["training"] = {"num_epochs": 2, "examples_per_step": 7, "learning_rate": 1e-3, "num_threads": 1}
        base["evaluation"] = {"every_num_steps": 2}
    changes["model"] = base["model"] | changes.get("model", {})
    return base | changes


def end_after(run: Run, seconds: float, number: signal.Signals) -> bool:
    """Run, and send a signal after so many seconds; false where it had ended before.

    What is asked to stop says how to go on, or had not begun.
    """
    process = run.begin()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, number)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    if process.returncode == 0:
        return False
    if number is signal.SIGKILL:
        assert process.returncode == -number, errors.decode()
    elif process.returncode != -number:  # it had begun to listen
        assert process.returncode == 128 + number, errors.decode()
        assert "Traceback" not in errors.decode()
    return True


def end_and_compare(
    directory: Path, settings: dict[str, Any], reference: Run, duration: float, seed: int, *signals: signal.Signals
) -> int:
    """End a run some times at random moments, let it end by itself, and compare; returns how often it was ended."""
    rng = random.Random(seed)
    run = Run(directory, settings)
    ended = 0
    for _ in range(rng.choice([1, 2, 3])):
        ended += end_after(run, rng.uniform(0.3, 1.0) * duration, rng.choice(signals))
    run.finish()
    assert_equal(run, reference)
    return ended


def check_draws(run: Run) -> None:
    """Every draw has exactly one outcome, and of examples each comes once in an epoch."""
    entries = run.ledger()
    assert [entry["draw_id"] for entry in entries] == list(range(len(entries)))
    assert {entry["outcome"] for entry in entries} <= {"trained", "filtered"}
    if (run.path / "rollouts").exists() and any((run.path / "rollouts").glob("step-*")):
        return
    size = len({entry["uid"] for entry in entries})
    for begin in range(0, len(entries), size):
        assert set(Counter(entry["uid"] for entry in entries[begin : begin + size]).values()) == {1}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param("reward_model", marks=pytest.mark.slow), "sft_hand_over"])
def test_resume_after_kill_pipeline_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, tiny_model: Path, name: str, seed: int
) -> None:
    settings = configuration(name, tmp_path, tiny_model)
    reference = Run(tmp_path / "reference", settings)
    duration = reference.finish()
    check_draws(reference)
    end_and_compare(tmp_path / "run", settings, reference, duration, seed, signal.SIGKILL)


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [*EXAMPLES, *ONLINE])
def test_resume_after_kill_pipeline_ten_ends_at_random_moments(tmp_path: Path, tiny_model: Path, name: str) -> None:
    settings = configuration(name, tmp_path, tiny_model)
    reference = Run(tmp_path / "reference", settings)
    duration = reference.finish()
    check_draws(reference)
    seed = ended = 0
    while ended < 10:
        signals = signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM
        found = end_and_compare(tmp_path / str(seed), settings, reference, duration, 100 + seed, *signals)
        ended += found
        if not found:  # it ended first: the reference was slow, so the next ends come earlier
            duration *= 0.8
        seed += 1
