"""Data, rewards and callbacks as Python objects, in whole runs on a tiny random model."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config

import roll
from roll.errors import CallbackError, CheckpointError, ConfigError, DataError

ROWS = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b), "a": a} for a in range(4) for b in range(4)]


def config(directory: Path, source: Path, /, **changes: Any) -> dict[str, Any]:
    whole = {**tiny_config(source, num_steps=2), "output_dir": str(directory), **changes}
    return {key: value for key, value in whole.items() if key != "data"}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_python_api_run_rows_and_a_closure_train_inside_a_running_loop_and_callbacks_hear_of_it(
    tmp_path: Path, tiny_model: Path
) -> None:
    wanted = "a"
    heard: list[tuple[str, int]] = []
    paths: list[Path] = []

    def reward(text, answer, metadata):
        assert metadata["a"] in range(4) and answer.isdigit()
        return text.count(wanted)

    async def notebook_cell() -> roll.api.Summary:
        return roll.train(
            config(tmp_path, tiny_model, evaluation={"num_prompts": 2, "samples_per_prompt": 1}),
            data=ROWS,
            reward=reward,
            on_step=lambda step, metrics: heard.append(("step", step)) or metrics["reward/mean"],
            on_evaluation=lambda step, metrics: heard.append(("evaluation", step)) or metrics["eval/num_answers"],
            on_save=lambda step, path: heard.append(("save", step)) or paths.append(path),
        )

    summary = asyncio.run(notebook_cell())
    assert summary.num_steps == 2
    assert heard == [("evaluation", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("save", 2)]
    assert [path.name for path in paths] == ["step-000002"] and (paths[0] / "model" / "config.json").is_file()
    assert "reward/python/reward" in rows_of(tmp_path / "run")[1]


def test_python_api_run_a_run_with_objects_is_continued_with_the_same_objects_alone(
    tmp_path: Path, tiny_model: Path
) -> None:
    def reward(text, answer, metadata):
        return len(text) % 3

    run = tmp_path / "run"
    roll.train(config(tmp_path, tiny_model), data=ROWS, reward=reward)
    more = ["training.num_steps=3"]
    with pytest.raises(
        DataError, match=r"rows of 'python' are Python objects, which are not stored in files: pass them again"
    ):
        roll.resume(run, more, reward=reward)
    with pytest.raises(
        ConfigError, match=r"the reward 'reward' is a Python object, which is not stored with the run: pass it again"
    ):
        roll.resume(run, more, data=ROWS)
    with pytest.raises(CheckpointError, match="the data changed since the checkpoint"):
        roll.resume(run, more, data=ROWS[1:], reward=reward)
    assert roll.resume(run, more, data=ROWS, reward=reward).num_steps == 3
    assert roll.evaluate(run / "config.yaml", model=run, data=ROWS, reward=reward)["eval/num_answers"] > 0


def test_python_api_run_a_failing_callback_is_named_with_its_step_and_its_place(
    tmp_path: Path, tiny_model: Path
) -> None:
    def watch(step: int, metrics: dict[str, float]) -> None:
        raise KeyError("accuracy of the day")

    with pytest.raises(
        CallbackError, match=r"callback on_step \(.*watch, .*test_objects_run\.py:\d+\) failed at step 1: KeyError"
    ):
        roll.train(config(tmp_path, tiny_model), data=ROWS, reward="math", on_step=watch)
    assert [row["step"] for row in rows_of(tmp_path / "run") if row["kind"] == "train"] == [1], "the step is recorded"


def test_python_api_run_an_evaluation_that_fails_beside_training_loses_no_step(
    tmp_path: Path, tiny_model: Path
) -> None:
    def watch(step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            raise KeyError("accuracy of the day")

    changes = {"evaluation": {"every_num_steps": 1, "num_prompts": 2}, "checkpoint": {}, "training": {"num_steps": 4}}
    settings = config(tmp_path, tiny_model, **changes)
    settings["rollout"] = {**settings["rollout"], "scheduling": {"async_ratio": 1.0}}
    with pytest.raises(CallbackError, match=r"on_evaluation .* failed at step 1: KeyError"):
        roll.train(settings, data=ROWS, reward=lambda text, answer, metadata: hash(text) % 97, on_evaluation=watch)
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == "step-000002", "the step that it ran beside is whole"


def test_python_api_run_a_reward_that_cannot_travel_runs_here_with_a_warning(
    tmp_path: Path, tiny_model: Path, caplog: Any
) -> None:
    lock = threading.Lock()
    seen: list[str] = []

    def locked(text, answer, metadata):
        with lock:
            seen.append(text)
        return 1.0 if "b" in text else 0.0

    roll.train(config(tmp_path, tiny_model, training={"num_steps": 1, "num_threads": 1}), data=ROWS, reward=locked)
    assert seen, "it ran in this process"
    assert (
        "reward 'locked' cannot be sent to worker processes (TypeError: cannot pickle '_thread.lock' object"
        in caplog.text
    )


def test_python_api_run_an_environment_of_the_users_own_is_played(tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "echo.py"
    file.write_text(
        "class Echo:\n"
        "    def __init__(self, word='x'):\n"
        "        self.word = word\n"
        "    def reset(self, seed=None):\n"
        "        return f'Say {self.word} {seed}', {}\n"
        "    def step(self, action):\n"
        "        return 'again', float(self.word in action), False, False, {}\n"
    )
    data = [{"source": "environment", "environment": f"{file}:Echo", "options": {"word": "a"}, "num_turns": 2,
             "num_episodes": 6, "num_held_out": 2}]  # fmt: skip
    roll.train(config(tmp_path, tiny_model) | {"data": data})
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2]
    assert "reward/environment/environment" in rows[1] or "reward/environment/environment" in rows[0]


def test_python_api_run_the_page_on_notebooks_shows_a_program_that_runs(
    tmp_path: Path, tiny_model: Path, monkeypatch: Any
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 15
    small = {
        '"smollm2-135m-instruct"': f'{{"path": "{tiny_model}", "dtype": "float32"}}, "inference": {{"engine": "hf"}}',
        '"num_steps": 20': '"num_steps": 1, "num_threads": 1',
        '"max_new_tokens": 16': '"max_new_tokens": 4, "prompts_per_step": 2, "group_size": 2',
    }
    for whole, part in small.items():
        assert program.count(whole) == 1
        program = program.replace(whole, part)
    monkeypatch.chdir(tmp_path)

    async def cell() -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(program, names)
        return names

    assert asyncio.run(cell())["summary"].num_steps == 1
