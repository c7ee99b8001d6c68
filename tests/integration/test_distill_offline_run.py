"""Whole runs of offline distillation on tiny random models: what is learnt, asked, kept, shared, resumed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import Run
from chaos.test_kill_and_resume import assert_equal
from worlds.tiny_model import write_tiny_model

import roll

WORDS = ("ab", "ba", "cab", "abc", "bac", "aab", "bba", "cc", "bcb", "aca")


@pytest.fixture(scope="module", name="teacher")
def _teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=7)


def settings(directory: Path, model: Path, teacher: Path, /, **changes: Any) -> dict[str, Any]:
    """A run of a second or two: eight examples, three epochs of them, two held out."""
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Say {w}.", "completion": w}) + "\n" for w in WORDS))
    return {
        "pipeline": "distill_offline",
        "name": "run",
        "model": {"path": str(model), "dtype": "float32"},
        "teacher": str(teacher),
        "data": [{"source": "file", "path": str(rows), "held_out": 0.2}],
        "training": {"num_epochs": 3, "examples_per_step": 4, "learning_rate": 1e-2, "num_threads": 1},
        "evaluation": {"every_num_steps": 2},
        "checkpoint": {"every_num_steps": 2},
        "tracking": {"console": "quiet", "tensorboard": False},
    } | changes


def evaluations(run: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if row["kind"] == "evaluation"]


@pytest.mark.parametrize(
    "changes",
    [
        {"distillation": {"top_k": 64}},
        {"distillation": {"weight": 0.5}},
        {"distillation": {"mode": "loss", "divergence": "jsd"}},
        {"distillation": {"top_k": 8}, "lora": {"rank": 4}},
    ],
    ids=["kept", "mixed", "loss", "adapters"],
)
def test_distill_offline_run_the_student_comes_near_its_teacher_and_uses_every_example_once_an_epoch(
    tmp_path: Path, tiny_model: Path, teacher: Path, changes: dict[str, Any]
) -> None:
    model = {"path": str(tiny_model), "dtype": "float32", "lora": changes.pop("lora", None)}
    config = settings(tmp_path, tiny_model, teacher, model=model, output_dir=str(tmp_path), **changes)
    roll.train(config)
    first, *_, last = evaluations(tmp_path / "run")
    assert last["eval/loss"] < (0.95 if model["lora"] else 0.8) * first["eval/loss"]
    ledger = Run.at(tmp_path / "run").ledger()
    assert set(Counter(entry["uid"] for entry in ledger).values()) == {3}
    assert {entry["outcome"] for entry in ledger} == {"trained"}
    measured = roll.evaluate(config, model=str(tmp_path / "run"))
    assert measured["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-4)


def test_distill_offline_run_that_share_a_directory_ask_the_teacher_once(
    tmp_path: Path, tiny_model: Path, teacher: Path
) -> None:
    distillation = {"top_k": 4, "directory": str(tmp_path / "kept")}
    config = settings(tmp_path, tiny_model, teacher, output_dir=str(tmp_path), distillation=distillation)
    roll.train(config)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("*.np?")}
    assert len(files) == 2
    training = {**config["training"], "learning_rate": 1e-3}
    roll.train({**config, "name": "other", "training": training})
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("*.np?")} == files
    assert not (tmp_path / "other" / "teacher").exists()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["precomputed", "loss"])
def test_distill_offline_run_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, tiny_model: Path, teacher: Path, place: str
) -> None:
    config = settings(tmp_path, tiny_model, teacher, distillation={"mode": place})
    reference = Run(tmp_path / "reference", config)
    reference.finish()
    run = Run(tmp_path / "killed", config)
    run.kill_after_a_checkpoint(0.2)
    run.finish()
    assert_equal(run, reference)


def test_distill_offline_run_a_check_names_a_teacher_with_another_vocabulary_and_what_is_kept(
    tmp_path: Path, tiny_model: Path, teacher: Path
) -> None:
    report = roll.check(settings(tmp_path, tiny_model, teacher, output_dir=str(tmp_path)))
    assert not report.problems
    assert report.disk is not None
    assert report.disk.stored_bytes == pytest.approx(10 * 3.7 * 32 * (2 + 4), rel=0.1)  # answers and their ends
    other = write_tiny_model(tmp_path / "other")
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"]["a"], vocabulary["model"]["vocab"]["b"] = 69, 70
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    report = roll.check(settings(tmp_path, tiny_model, other, output_dir=str(tmp_path)))
    assert any("the tokenizer of teacher" in problem for problem in report.problems)
