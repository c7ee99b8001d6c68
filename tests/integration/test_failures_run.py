"""Runs in which something of the user's fails: each says so, saves what it has, and does not look like a result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from chaos.harness import tiny_config

import roll
from roll.cli.main import run as command
from roll.errors import AlarmError, LossError
from roll.pipelines.checkpoint_files import list_checkpoints, read_checkpoint
from roll.pipelines.state import RunState

OWN = """
from pathlib import Path
from roll.types import LossOutputs

CALLS = Path(__file__).with_name("calls")

def fails(text, answer, metadata):
    if text != answer:  # before a run, the correct answer is tried, too
        raise ConnectionError("the judge is not there")
    return 1.0

def loss(inputs):
    with CALLS.open("a") as file:
        file.write("x")
    if CALLS.stat().st_size > 2 and not Path(__file__).with_name("mended").exists():
        raise IndexError("no such column")
    return LossOutputs(loss=-(inputs.logprobs * inputs.advantages).sum() / inputs.num_tokens)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def config(directory: Path, model: Path, **changes: Any) -> dict[str, Any]:
    base = {**tiny_config(model, num_steps=5), "output_dir": str(directory), "evaluation": {"every_num_steps": 0}}
    base["checkpoint"] = {}
    base["rollout"] = {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 6, "retry_wait_s": 0.0}
    return base | changes


def failing(own: Path) -> list[dict[str, Any]]:
    return [
        {
            "source": "arithmetic",
            # a limit that a machine under load keeps, too: a time-out is a reward of 0, not a failure
            "reward": {"type": "python", "function": f"{own}:fails", "require_finished": False, "time_limit_s": 100},
        }
    ]


def test_failure_run_a_reward_that_always_fails_stops_the_run_in_its_first_step_and_names_why(
    tmp_path: Path, tiny_model: Path, own: Path
) -> None:
    settings = config(tmp_path, tiny_model, data=failing(own), evaluation={"before_training": False})
    with pytest.raises(AlarmError, match=r"12 of 12 answers got no reward: .*own\.py:9\): ConnectionError"):
        roll.train(settings)
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert (row["rollout/infra_error_share"], row["rollout/retries"], row["data/groups_failed"]) == (1.0, 24, 3)
    assert "reward/mean" not in row
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["num_trained_steps"], summary["infra_errors"]) == (0, 12)


def test_failure_run_with_the_alarms_off_such_a_run_ends_but_not_with_0(
    tmp_path: Path, tiny_model: Path, own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path, tiny_model, data=failing(own), alarms={"stop_on": []}, training={"num_steps": 1})
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    assert command(["train", str(file)]) == 1
    said = capfd.readouterr().err
    assert "none of 1 steps updated the weights; 12 answers got no reward" in said


def test_failure_run_a_run_without_held_out_prompts_says_that_it_is_not_evaluated(
    tmp_path: Path, tiny_model: Path
) -> None:
    said: list[int] = []
    data = [{"source": "arithmetic", "reward": "math", "held_out": 0}]
    settings = config(tmp_path, tiny_model, data=data, training={"num_steps": 1}, checkpoint={"keep_best": True})
    summary = roll.train(settings, on_evaluation=lambda step, _: said.append(step))
    assert (said, summary.empty_evaluations, summary.score_after) == ([], 0, None)
    log = (tmp_path / "run" / "logs" / "controller-0.log").read_text()
    assert "the run is not evaluated, and keep_best cannot compare checkpoints" in log


def test_failure_run_a_loss_that_fails_is_named_and_what_was_learnt_is_saved(
    tmp_path: Path, tiny_model: Path, own: Path
) -> None:
    settings = config(tmp_path, tiny_model, algorithm={"loss": f"{own}:loss"})
    with pytest.raises(LossError, match=rf"loss '{own}:loss' failed at {own}:16: IndexError: no such column"):
        roll.train(settings)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    saved = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert list(saved) == [last] and last >= 2
    ledger = read_checkpoint(saved[last], RunState).ledger
    assert len(list(ledger)) == 3 * last  # the failed step's draws will be made again
    (tmp_path / "mended").touch()
    assert roll.resume(tmp_path / "run").num_steps == 5


def test_failure_run_eval_prints_one_json_object_and_nothing_else(
    tmp_path: Path, tiny_model: Path, own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config(tmp_path, tiny_model)))
    assert command(["eval", str(file)]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["eval/num_answers"] > 0 and "eval/score" in found
    file.write_text(yaml.safe_dump(config(tmp_path, tiny_model, data=failing(own))))
    assert command(["eval", str(file)]) == 1
    said = capfd.readouterr()
    empty = json.loads(said.out)
    assert empty["eval/num_answers"] == 0 and "eval/score" not in empty
    assert "no answers" in said.err and "ConnectionError: the judge is not there" in said.err
