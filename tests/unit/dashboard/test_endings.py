"""The page Answers on recorded runs of every pipeline and every kind of end (`recorded/endings.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recorded.endings import ONLINE, ROWS, combinations
from unit.dashboard.conftest import client_of, ids
from worlds.recorded_endings import extract_endings

SUPERVISED_PIPELINES = tuple(ROWS)
NO_ALARM = ("reward_model",)
"""Pipelines without anything that an alarm looks at: the run that should have met one finished."""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return all answers about each run, by the name of the run and the id of the answer."""
    runs = extract_endings(tmp_path_factory.mktemp("endings"))
    client = client_of(runs)
    found = {}
    for name, run in ids(client).items():
        while "indexing" in (page := client.get(f"/api/runs/{run}/answers").json()):
            pass
        found[name] = {answer["id"]: answer for answer in page["answers"]} | {"path": runs / name}
    return found


def last_step(path: Path) -> int:
    """Return the last trained step of a run."""
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return max((row["step"] for row in rows if row["kind"] == "train"), default=0)


def test_dashboard_endings_answers_know_at_least_27_recorded_runs(asked: dict[str, Any]) -> None:
    assert set(asked) == {f"{pipeline}-{end}" for pipeline, end in combinations()} and len(asked) >= 27


@pytest.mark.parametrize(("pipeline", "end"), combinations())
def test_dashboard_endings_answers_say_how_a_recorded_run_ended(asked: dict[str, Any], pipeline: str, end: str) -> None:
    found = asked[f"{pipeline}-{end}"]
    stopped, step = found["stopped"], last_step(found["path"])
    figures = {figure["name"]: figure["value"] for figure in stopped["figures"]}
    assert figures["last step"] == step
    if end == "finished" or (end == "alarm" and pipeline in NO_ALARM):
        assert stopped["answer"] == f"The run finished all {step} steps." and stopped["tone"] == "good"
        assert figures["configured steps"] == step > 0
    elif end == "alarm":
        assert stopped["answer"].startswith("An alarm stopped the run") and "alarms." in stopped["answer"]
    elif end == "reward-raises":
        assert stopped["answer"].startswith("An alarm stopped the run after step 1 of 4: ")
        assert "the grader is down" in stopped["answer"]
    elif end == "error":
        assert stopped["answer"].startswith("The run failed after step 3 of ") and stopped["tone"] == "bad"
        assert "the data server went away" in stopped["answer"]
    elif end == "interrupted":
        assert (
            stopped["answer"].startswith("The run was interrupted after step 3 of ") and "SIGINT" in stopped["answer"]
        )
    else:
        assert (
            stopped["answer"].startswith("The run ended after step 3")
            and "no summary with the cause" in stopped["answer"]
        )


@pytest.mark.parametrize(("pipeline", "end"), combinations())
def test_dashboard_endings_answers_follow_the_pipeline_of_a_recorded_run(
    asked: dict[str, Any], pipeline: str, end: str
) -> None:
    found = asked[f"{pipeline}-{end}"]
    learning = found["flat"]
    if pipeline in SUPERVISED_PIPELINES:
        assert learning["question"] == "Why does my loss not fall?" and "reward" not in learning["answer"]
        assert "examples" in found["pushed"]["answer"] and "no reward" in found["fooled"]["answer"]
        assert "generates nothing" in found["off_policy"]["answer"]
    else:
        assert pipeline in ONLINE and learning["question"] == "Why is my reward flat?"
    if end == "reward-raises":
        assert learning["answer"].startswith("Answers of ") and learning["tone"] == "bad"
        assert "the grader is down" in learning["answer"]
    assert "ended without a word" not in json.dumps({key: value for key, value in found.items() if key != "path"})
