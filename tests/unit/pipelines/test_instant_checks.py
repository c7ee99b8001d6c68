"""What is found of a run before any of its roles starts: a disk that is too small, rewards that do not work."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

import roll
from roll.config.data import ArithmeticData, FileData
from roll.config.sandbox import SandboxConfig
from roll.errors import ConfigError, RunDirectoryError, UserError
from roll.preflight import rewards as preflight
from roll.preflight.rewards import check_rewards, try_rewards
from roll.types import Message, Prompt

OWN = """
import asyncio

def always(text, answer, metadata): raise KeyError("column")
def unless_right(text, answer, metadata):
    if text != answer: raise KeyError("column")
    return 1.0
async def never_answers(text, answer, metadata): await asyncio.sleep(3600)
def kills(text, answer, metadata): __import__("os")._exit(3)
def works(text, answer, metadata): return 0.5
"""
PROMPT = Prompt(uid="sums/1", domain="sums", messages=(Message(role="user", content="3 + 4"),), answer="7")
Usage = namedtuple("Usage", ("total", "used", "free"))


def source(**reward: Any) -> ArithmeticData:
    return ArithmeticData(source="arithmetic", domain="sums", reward=[reward])  # type: ignore[arg-type]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own_rewards.py"
    path.write_text(OWN)
    return path


def supervised(directory: Path, model: Path, **changes: Any) -> dict[str, Any]:
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(4)))
    return {
        "pipeline": "sft",
        "name": "run",
        "output_dir": str(directory),
        "model": {"path": str(model), "dtype": "float32"},
        "data": [{"source": "file", "path": str(rows), "held_out": 0}],
        "training": {"num_steps": 2, "examples_per_step": 2, "num_threads": 1},
        "tracking": {"console": "quiet", "tensorboard": False},
    } | changes


@pytest.mark.parametrize("name", ["always", "kills"])
async def test_check_fast_a_reward_that_always_fails_is_found_before_a_run(own: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="the reward of 'sums' failed: "):
        await check_rewards(SandboxConfig(), [(source(type="python", function=f"{own}:{name}"), PROMPT)])


@pytest.mark.parametrize("name", ["unless_right", "works"])
async def test_check_fast_a_reward_that_works_for_an_answer_is_not_refused(own: Path, name: str) -> None:
    await check_rewards(SandboxConfig(), [(source(type="python", function=f"{own}:{name}"), PROMPT)])


async def test_check_fast_a_reward_that_takes_long_is_left_for_the_run(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "TRIAL_TIMEOUT_S", 0.5)
    await check_rewards(SandboxConfig(), [(source(type="python", function=f"{own}:never_answers"), PROMPT)])


async def test_check_fast_rewards_of_the_library_start_nothing_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "LocalWorkerPool", None)
    await check_rewards(SandboxConfig(), [(source(type="math"), PROMPT)])


async def test_check_fast_a_sandbox_service_that_is_not_there_is_found_before_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLL_SANDBOX_TOKEN", "roll_abc_def")
    entry = FileData(source="file", path="rows.jsonl", domain="sums", reward=[{"type": "code"}])  # type: ignore[list-item]
    prompt = Prompt(uid="sums/1", domain="sums", messages=(), metadata={"tests": [{"stdin": "", "stdout": ""}]})
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9"):
        await check_rewards(SandboxConfig(url="http://127.0.0.1:9"), [(entry, prompt)])


def test_check_fast_a_reward_that_always_fails_ends_a_run_before_its_roles_start(
    tmp_path: Path, tiny_model: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.pipelines.online.opening.open_cluster", None)
    settings = {
        "name": "run",
        "output_dir": str(tmp_path),
        "model": {"path": str(tiny_model), "dtype": "float32"},
        "data": [{"source": "arithmetic", "reward": {"type": "python", "function": f"{own}:always"}}],
        "training": {"num_steps": 2},
        "rollout": {"max_new_tokens": 8},
        "inference": {"engine": "hf"},
        "tracking": {"console": "quiet"},
    }
    with pytest.raises(ConfigError, match=r"the reward of 'arithmetic' failed: .*KeyError"):
        roll.train(settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ("float(int(text) == int(answer))", "I do not know."),
        ("float(text.splitlines()[0] == answer)", ""),
    ],
)
async def test_check_fast_a_reward_function_must_score_answers_in_any_form(
    tmp_path: Path, body: str, answer: str
) -> None:
    (tmp_path / "own.py").write_text(f"def score(text, answer, metadata):\n    return {body}\n")
    reward = {"type": "python", "function": f"{tmp_path / 'own.py'}:score"}
    entry = FileData(source="file", path="rows.jsonl", domain="sums", reward=[reward])  # type: ignore[list-item]
    prompt = Prompt(uid="sums/1", domain="sums", messages=(), answer="3")
    with pytest.raises(ConfigError) as caught:
        await try_rewards(SandboxConfig(), [(entry, prompt)], lambda note: None)
    assert f"the reward of 'sums' failed for the answer {answer!r}: " in str(caught.value)
    assert "must return a number for every answer, such as 0 if it cannot parse the answer" in str(caught.value)


def test_check_fast_a_checkpoint_is_no_larger_than_it_is_expected_to_be(tmp_path: Path, tiny_model: Path) -> None:
    settings = supervised(tmp_path, tiny_model)
    expected = roll.check(settings).disk
    assert expected is not None
    roll.train(settings)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    size = sum(path.stat().st_size for path in saved.rglob("*.safetensors"))
    size += sum(path.stat().st_size for path in saved.rglob("*.distcp"))
    assert 0.7 * size < expected.checkpoint_bytes < 1.3 * size


@pytest.mark.parametrize(("checkpoint", "number"), [({}, 1), ({"every_num_steps": 1}, 2)])
def test_check_fast_a_disk_without_room_for_checkpoints_is_refused_before_a_run(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: dict[str, Any], number: int
) -> None:
    settings = supervised(tmp_path, tiny_model, checkpoint=checkpoint)
    use = roll.check(settings).disk
    assert use is not None and use.num_scheduled == number
    free = number * use.checkpoint_bytes

    def usage(path: object) -> Usage:
        return Usage(2 * free, free, free)

    monkeypatch.setattr("shutil.disk_usage", usage)
    assert roll.check(settings).problems == []
    free -= 1
    assert any("but the run needs space for" in problem for problem in roll.check(settings).problems)
    with pytest.raises(
        RunDirectoryError, match=r"the disk has .* of free space, but the run needs .*: choose another output_dir"
    ):
        roll.train(settings)
    assert not (tmp_path / "run").exists()


def test_check_fast_a_run_that_saves_nothing_needs_no_room_for_checkpoints(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(2, 2, 2**15))
    roll.train(supervised(tmp_path, tiny_model, checkpoint={"at_end": False}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm": {"loss": "gone.py:loss"}}, "loss: file 'gone.py' does not exist"),
        ({"algorithm": {"loss": "own_rewards.py:nothing"}}, "loss 'own_rewards.py:nothing' is called with (inputs)"),
        ({"algorithm": {"gate": {"type": "python", "gate": "gone.py:G"}}}, "gate: file 'gone.py' does not exist"),
        ({"algorithm": {"advantage": {"function": "gone.py:f"}}}, "advantage function: file 'gone.py' does not exist"),
        ({"training": {"num_steps": 1, "backend": "gone.py:B"}}, "training back-end: file 'gone.py' does not exist"),
        (
            {"training": {"num_steps": 1, "backend": "own_rewards.py:Kind"}},
            "'own_rewards.py:Kind' does not define train_step, forward_backward, ",
        ),
        ({"rollout": {"loop": "own_rewards.py:nothing"}}, "rollout loop 'own_rewards.py:nothing' is called with"),
    ],
)
def test_check_fast_own_functions_that_cannot_be_used_are_named_by_a_check(
    own: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    own.write_text(OWN + "def nothing(): pass\nclass Kind:\n    def __init__(self, spec): pass\n")
    monkeypatch.chdir(own.parent)
    sections = {"rollout": {}, "training": {"num_steps": 1}, "data": [{"source": "arithmetic", "reward": "math"}]}
    run = {"name": "run", "model": str(tiny_model), **sections, **changes}
    (problem,) = (each for each in roll.check(run).problems if words in each)
    assert "\n" not in problem
