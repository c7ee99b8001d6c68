"""What the dashboard says when people ask about a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unit.dashboard.conftest import client_of, ids

from roll.tracking.trace import TraceFile

MakeRun = Callable[..., Path]


def asked(run: Path, *others: Path) -> dict[str, Any]:
    """All answers about a run, by their ids."""
    client = client_of(run, *others)
    while "indexing" in (found := client.get(f"/api/runs/{ids(client)[run.name]}/answers").json()):
        pass
    return {answer["id"]: answer for answer in found["answers"]}


def rewrite(run: Path, **values: float) -> None:
    """Other metrics in every step; names with `__` for `/`."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    changed = {name.replace("__", "/"): value for name, value in values.items()}
    rows = [row | (changed if row["kind"] == "train" else {}) for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_dashboard_answers_every_question_has_an_answer_and_every_link_a_view(make_run: MakeRun) -> None:
    answers = asked(make_run())
    assert len(answers) == 11
    assert all(answer["question"].endswith("?") and answer["answer"] for answer in answers.values())
    views = {link["view"] for answer in answers.values() for link in answer["links"]}
    assert views <= {"overview", "rollouts", "rollout", "time", "health", "plan"}


def test_dashboard_answers_a_reward_that_rises_is_not_flat(make_run: MakeRun) -> None:
    run = make_run(num_steps=12)  # 0.1, 0.2, … 1.2: the first five have 0.3, the last five 1.0
    assert asked(run)["flat"]["answer"] == "The reward is not flat: it rose from 0.300 to 1.000."


def test_dashboard_answers_a_flat_reward_is_told_its_causes(make_run: MakeRun) -> None:
    run = make_run()
    rewrite(run, reward__mean=0.0, rollout__unfinished_share=0.9, data__groups_trained=0.0)
    flat = asked(run)["flat"]
    assert "90% of answers are truncated" in flat["answer"]
    assert "the rewards within each group are equal" in flat["answer"] and "too hard" in flat["answer"]
    assert {"text": "answers that were truncated", "view": "rollouts"}.items() <= flat["links"][1].items()


def test_dashboard_answers_filtered_answers_are_found_by_their_step(make_run: MakeRun) -> None:
    run = make_run()
    rewrite(run, data__groups_filtered=1.0)
    found = asked(run)["filtered"]
    assert "zero variance: every reward is 0 (1 draws)" in found["answer"]
    link = next(link for link in found["links"] if link["text"].startswith("step 2:"))
    client = client_of(run)
    query = "&".join(f"{name}={value}" for name, value in link["params"].items())
    rows = client.get(f"/api/runs/{ids(client)[run.name]}/rollouts?{query}").json()["rows"]
    # of the step's four rollouts one has an advantage: the first of draw 4
    assert [row["rollout_id"] for row in rows] == ["4.1", "5.0", "5.1"]


def test_dashboard_answers_staleness_is_compared_with_what_the_async_ratio_allows(make_run: MakeRun) -> None:
    run = make_run()
    rewrite(run, rollout__staleness_max=2.0, rollout__staleness_mean=0.5)
    found = asked(run)["off_policy"]
    assert found["answer"].startswith("Yes, by at most 2 updates, 0.50 on average; the async ratio allows 0.")
    assert found["tone"] == "bad"


def test_dashboard_answers_a_ledger_with_a_gap_is_told(make_run: MakeRun) -> None:
    run = make_run()
    assert "3 draws, numbered 0 to 2 without a gap" in asked(run)["once"]["answer"]
    ledger = next(run.glob("checkpoints/*/ledger.jsonl"))
    ledger.write_text(
        "".join(line for line in ledger.read_text().splitlines(keepends=True) if '"draw_id": 1' not in line)
    )
    assert asked(run)["once"]["tone"] == "bad"


def test_dashboard_answers_time_goes_into_the_longest_phase(make_run: MakeRun) -> None:
    found = asked(make_run())["time"]  # six of ten seconds generate
    assert found["answer"] == "Mostly to generate. A step takes 10.0 s; in 3 of 3 steps the bottleneck was generation."
    assert found["figures"][0] == {"name": "generate, s per step", "value": 6.0}


def test_dashboard_answers_take_a_ledger_whose_entries_have_values_of_any_kind(make_run: MakeRun) -> None:
    run = make_run()
    ledger = next(run.glob("checkpoints/*/ledger.jsonl"))
    odd = {"outcome": "filtered", "why": ["a", {"b": 1}], "uid": {"c": [2]}, "draw_id": [0]}
    ledger.write_text(json.dumps(odd) + "\n")
    assert "gaps or repeated draws" in asked(run)["once"]["answer"]
    assert asked(run)["filtered"]["answer"]


def test_dashboard_answers_about_time_count_a_step_once_and_whole(make_run: MakeRun) -> None:
    run = make_run()
    rewrite(run, time__step_s=7.0)  # without what each step spends on its checkpoint
    event = {"ts": 1_030_000_000, "name": "step 4", "ph": "X", "dur": 1_000_000, "pid": 7, "tid": 0}
    again = [
        {**event, "ts": 1_040_000_000, "name": "checkpoint", "dur": 18_000_000},
        {**event, "ts": 1_040_000_000, "dur": 20_000_000},
        {"ts": 1_060_000_000, "name": "reward", "ph": "C", "pid": 7, "args": {"value": 1.0}},
    ]
    TraceFile(run / "trace.json").append([event, *again])  # step 4 was interrupted after a second, and made again
    found = asked(run)["time"]  # (10 + 10 + 10 + 20) / 4; 18 s each for generating and the checkpoint
    assert "A step takes 12.5 s; in 3 of 4 steps the bottleneck was generation." in found["answer"]
    assert {"name": "checkpoint, s per step", "value": 4.5} in found["figures"]


def test_dashboard_answers_the_tokens_that_were_pushed_down_most_are_one_link_away(make_run: MakeRun) -> None:
    run = make_run()
    link = asked(run)["pushed"]["links"][0]
    client = client_of(run)
    tokens = client.get(f"/api/runs/{ids(client)[run.name]}/rollouts/{link['params']['row']}/tokens").json()
    # advantage -1, ratios exp(0) and exp(-1); the second is below 1 - 0.2, so clipped; the third was not trained
    assert tokens["columns"]["push"] == [-1.0, 0.0, None]


def test_dashboard_answers_a_run_is_told_which_other_is_nearest(make_run: MakeRun) -> None:
    first, second = make_run("first"), make_run("second")
    found = asked(first, second)["differs"]
    assert found["answer"] == "The most similar run is second: 1 keys differ, including the name."


def test_dashboard_answers_a_plan_beside_the_run_is_told(make_run: MakeRun) -> None:
    run = make_run()
    assert "This run has no plan" in asked(run)["cost"]["answer"]
    (run / "plan.txt").write_text("a plan\nexpected: 12.5 s per step\n")
    assert "expected: 12.5 s per step (plan.txt)" in asked(run)["cost"]["answer"]
