"""Whole runs of supervised fine-tuning on a tiny random model: what is learnt, recorded, left out, resumed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import Run
from chaos.test_kill_and_resume import assert_equal

import roll
from roll.errors import ConfigError, DataError

ROWS = [
    {"messages": [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}]}
    for word in ("ab", "ba", "cab", "abc", "bac", "aab", "bba", "cc", "bcb", "aca")
]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(directory: Path, model: Path, /, **changes: Any) -> dict[str, Any]:
    """A run of a second or two: ten examples, three epochs of them."""
    rows = directory / "rows.jsonl"
    if not rows.exists():
        write_rows(rows, ROWS)
    return {
        "pipeline": "sft",
        "name": "run",
        "output_dir": str(directory),
        "model": {"path": str(model), "dtype": "float32"},
        "data": [{"source": "file", "path": str(rows), "held_out_path": str(rows)}],
        "training": {"num_epochs": 3, "examples_per_step": 4, "learning_rate": 1e-2, "num_threads": 1},
        "evaluation": {"every_num_steps": 2},
        "checkpoint": {"every_num_steps": 2},
        "tracking": {"console": "quiet", "tensorboard": False},
    } | changes


@pytest.fixture
def apart(tmp_path: Path) -> list[dict[str, Any]]:
    """Data whose held-out rows are others than those that are trained on."""
    train, held_out = write_rows(tmp_path / "train.jsonl", ROWS), write_rows(tmp_path / "held_out.jsonl", ROWS[:1])
    held_out.write_text(held_out.read_text().replace("Say ab", "Write ab"))
    return [{"source": "file", "path": str(train), "held_out_path": str(held_out)}]


def rows_of(directory: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if row["kind"] == kind]


def test_sft_run_every_example_is_trained_once_in_every_epoch_and_the_loss_falls(
    tmp_path: Path, tiny_model: Path, apart: list[dict[str, Any]]
) -> None:
    summary = roll.train(config(tmp_path, tiny_model, data=apart))
    steps = rows_of(tmp_path, "train")
    assert [row["data/examples_trained"] for row in steps] == [4, 4, 4, 4, 4, 4, 4, 2]  # three times ten
    assert steps[-1]["data/epoch"] == 3.0
    run = Run.at(tmp_path / "run")
    uids = [entry["uid"] for entry in run.ledger()]
    for epoch in range(3):
        assert Counter(uids[10 * epoch : 10 * epoch + 10]) == Counter(f"file/{n}" for n in range(1, 11))
    assert {entry["outcome"] for entry in run.ledger()} == {"trained"}
    assert summary.measure == "loss"
    assert summary.score_after is not None and summary.score_before is not None
    assert summary.score_after < 0.5 * summary.score_before
    assert [row["step"] for row in rows_of(tmp_path, "evaluation")] == [0, 2, 4, 6, 8]


def test_sft_run_the_loss_is_transformers_own_on_the_same_examples(
    tmp_path: Path, tiny_model: Path, apart: list[dict[str, Any]]
) -> None:
    """The first step's loss, before any update, beside the mean over the assistants' tokens of an HF model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    roll.train(config(tmp_path, tiny_model, data=apart, training={"num_steps": 1, "examples_per_step": 10}))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    total, count = 0.0, 0
    for row in ROWS:
        head = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
        text = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        last = max(i for i, token in enumerate(text) if token in tokenizer.all_special_ids) + 1
        with torch.no_grad():
            logprobs = model(torch.tensor([text])).logits[0].double().log_softmax(-1)
        total -= sum(float(logprobs[i - 1, text[i]]) for i in range(len(head), last))
        count += last - len(head)
    (step,) = rows_of(tmp_path, "train")
    assert step["training/num_loss_tokens"] == count
    assert step["training/loss"] == pytest.approx(total / count, rel=1e-5)


def test_sft_run_a_run_ends_with_its_steps_or_its_epochs_whichever_come_first(
    tmp_path: Path, tiny_model: Path, apart: list[dict[str, Any]]
) -> None:
    training = {"num_epochs": 3, "num_steps": 5, "examples_per_step": 4, "num_threads": 1}
    summary = roll.train(config(tmp_path, tiny_model, data=apart, training=training))
    assert summary.num_steps == 5
    with pytest.raises(ConfigError, match="must be <= the number of steps, got 4 and 3"):
        training = {"num_epochs": 1, "examples_per_step": 4, "warmup_steps": 4}
        roll.train(config(tmp_path, tiny_model, name="other", data=apart, training=training))


def test_sft_run_a_resumed_run_goes_on_to_more_epochs(
    tmp_path: Path, tiny_model: Path, apart: list[dict[str, Any]]
) -> None:
    training = {"num_epochs": 1, "examples_per_step": 5, "num_threads": 1}
    assert roll.train(config(tmp_path, tiny_model, data=apart, training=training)).num_steps == 2
    assert roll.resume(tmp_path / "run", ["training.num_epochs=2"]).num_steps == 4


@pytest.mark.parametrize(("per_step", "num_epochs", "num_steps"), [(4, 2, 6), (3, 1, 3), (8, 2, 5)])
def test_sft_run_what_remains_of_the_epochs_is_counted_from_where_a_run_stands(
    tmp_path: Path, tiny_model: Path, apart: list[dict[str, Any]], per_step: int, num_epochs: int, num_steps: int
) -> None:
    """An epoch that ended inside a step, and steps that had another size, leave no example out."""
    training = {"num_epochs": 1, "examples_per_step": 4, "num_threads": 1}
    first = {**training, "num_steps": 2} if num_epochs == 1 else training
    roll.train(config(tmp_path, tiny_model, data=apart, training=first, evaluation={"before_training": False}))
    changes = ["training.num_steps=0", f"training.num_epochs={num_epochs}", f"training.examples_per_step={per_step}"]
    assert roll.resume(tmp_path / "run", changes).num_steps == num_steps
    uses = Counter(entry["uid"] for entry in Run.at(tmp_path / "run").ledger())
    assert uses == {f"file/{n}": num_epochs for n in range(1, 11)}
    with pytest.raises(ConfigError, match="is already at step"):
        roll.resume(tmp_path / "run", ["training.num_epochs=0.1"])


def test_sft_run_adapters_are_trained_alone(tmp_path: Path, tiny_model: Path, apart: list[dict[str, Any]]) -> None:
    model = {"path": str(tiny_model), "dtype": "float32", "lora": {"rank": 4}}
    summary = roll.train(config(tmp_path, tiny_model, data=apart, model=model))
    assert summary.score_after is not None and summary.score_before is not None
    assert summary.score_after < summary.score_before
    assert (Run.at(tmp_path / "run").checkpoint() / "adapter" / "adapter_model.safetensors").exists()


def test_sft_run_rows_that_cannot_be_learnt_from_are_counted_and_named_before_anything_starts(
    tmp_path: Path, tiny_model: Path
) -> None:
    bad = [*ROWS, {"messages": [{"role": "user", "content": "Hm?"}]}, {"text": None}]
    data = [{"source": "file", "path": str(write_rows(tmp_path / "bad.jsonl", bad))}]
    with pytest.raises(DataError, match=r"line 11(.|\n)*line 12"):
        roll.train(config(tmp_path, tiny_model, data=data))
    assert not (tmp_path / "run").exists()
    skipping = [{**data[0], "on_bad_row": "skip", "held_out": 0.0}]
    roll.train(config(tmp_path, tiny_model, data=skipping))
    assert {entry["uid"] for entry in Run.at(tmp_path / "run").ledger()} == {f"file/{n}" for n in range(1, 11)}


def test_sft_run_a_model_is_measured_without_training(
    tmp_path: Path, tiny_model: Path, apart: list[dict[str, Any]]
) -> None:
    roll.train(config(tmp_path, tiny_model, data=apart))
    found = roll.evaluate(config(tmp_path, tiny_model, data=apart))
    assert found["eval/loss"] == pytest.approx(rows_of(tmp_path, "evaluation")[0]["eval/loss"], rel=1e-6)
    trained = roll.evaluate(config(tmp_path, tiny_model, data=apart), model=tmp_path / "run")
    assert trained["eval/loss"] == pytest.approx(rows_of(tmp_path, "evaluation")[-1]["eval/loss"], rel=1e-6)


@pytest.mark.slow  # and engines beside it: `test_kill_pipelines`
def test_sft_run_a_killed_and_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, tiny_model: Path) -> None:
    reference = Run(tmp_path / "reference", settings(tmp_path, tiny_model))
    reference.finish()
    run = Run(tmp_path / "killed", settings(tmp_path, tiny_model))
    run.kill_after_a_checkpoint(0.2)
    run.finish()
    assert_equal(run, reference)


def settings(directory: Path, model: Path) -> dict[str, Any]:
    rows = write_rows(directory / "rows.jsonl", ROWS)
    found = config(directory, model, data=[{"source": "file", "path": str(rows), "held_out": 0.2}])
    return {name: value for name, value in found.items() if name != "output_dir"}


def test_sft_run_rows_may_be_python_objects(tmp_path: Path, tiny_model: Path) -> None:
    plain = {name: value for name, value in config(tmp_path, tiny_model).items() if name != "data"}
    rows = [{"prompt": f"Say {word}.", "completion": word} for word in ("ab", "ba", "cab")]
    summary = roll.train(plain, data=rows, held_out=[{"prompt": "Say abc.", "completion": "abc"}])
    assert summary.score_after is not None and summary.num_steps == 3
    with pytest.raises(ConfigError, match=r"the pipeline sft, which does not score answers"):
        roll.train({**plain, "name": "other"}, data=rows, reward="math")


def test_sft_run_engines_answer_prompts_with_the_weights_of_that_step(
    tmp_path: Path, tiny_model: Path, apart: list[dict[str, Any]]
) -> None:
    reward = {"type": "regex", "pattern": "[a-c]", "require_finished": False}
    answers = {
        "data": [{"source": "arithmetic", "reward": [reward]}],
        "num_prompts": 4,
        "max_new_tokens": 4,
        "inference": {"engine": "hf"},
    }
    given = config(tmp_path, tiny_model, data=apart, evaluation={"every_num_steps": 4, "answers": answers})
    summary = roll.train(given)
    evaluations = rows_of(tmp_path, "evaluation")
    assert [row["step"] for row in evaluations] == [0, 4, 8]
    assert all({"eval/loss", "eval/score", "eval/length_mean"} <= set(row) for row in evaluations)
    assert summary.measure == "mean reward" and summary.score_after == evaluations[-1]["eval/score"]
    assert (tmp_path / "run" / "rollouts" / "eval-step-000008.parquet").exists()
    again = roll.evaluate(given, model=tmp_path / "run")
    assert again["eval/score"] == evaluations[-1]["eval/score"]  # the engines had the last step's weights
    assert again["eval/loss"] == pytest.approx(evaluations[-1]["eval/loss"], rel=1e-6)


def test_sft_run_a_look_before_the_run_counts_its_steps_and_the_engines_that_answer(
    tmp_path: Path, tiny_model: Path, apart: list[dict[str, Any]]
) -> None:
    answers = {"data": [{"source": "arithmetic", "reward": "math"}], "max_new_tokens": 4, "inference": {"engine": "hf"}}
    report = roll.check(config(tmp_path, tiny_model, data=apart, evaluation={"answers": answers}))
    assert not report.problems
    assert [role.role for role in report.memory] == ["actor_train", "actor_infer", "processes"]
    assert report.batch[0] == "10 examples to train on, 4 per step: 8 steps, 3.2 epochs"
