"""`metrics.jsonl` as columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.dashboard.metrics import Metrics
from roll.tracking.metrics_file import MetricsFile
from roll.tracking.reading.files import SafeDirectory


def read(path: Path) -> Metrics:
    metrics = Metrics(SafeDirectory(path))
    metrics.refresh()
    return metrics


def test_dashboard_metrics_columns_share_steps_and_times_and_a_missing_value_is_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(0, "evaluation", {"eval/accuracy": 0.5, "time/evaluate_s": 2.0})
    file.append(1, "train", {"a": 1.0, "time/step_s": 10.0})
    metrics = read(tmp_path)
    file.append(2, "train", {"a": float("nan"), "b": 3.0, "time/step_s": 5.0})
    metrics.refresh()
    assert metrics.build_series(["a", "b", "c"], "train", None) == {
        "steps": [1, 2], "time_s": [12.0, 17.0], "series": {"a": [1.0, None], "b": [None, 3.0]},
    }  # fmt: skip
    assert metrics.build_series(["a"], "train", since=1) == {"steps": [2], "time_s": [17.0], "series": {"a": [None]}}
    assert metrics.build_series(["eval/accuracy"], "eval", None)["series"] == {"eval/accuracy": [0.5]}
    assert {"name": "b", "kind": "train"} in metrics.build_overview()["names"]


def test_dashboard_metrics_a_resume_that_truncates_is_followed(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        file.append(step, "train", {"a": float(step)})
    metrics = read(tmp_path)
    file.truncate(1)
    file.append(2, "train", {"a": 20.0})
    metrics.refresh()
    assert metrics.build_series(["a"], "train", None)["series"] == {"a": [1.0, 20.0]}
    assert metrics.build_series(["a"], "train", None)["steps"] == [1, 2]


def test_dashboard_metrics_what_is_no_row_is_counted_and_left_out(tmp_path: Path) -> None:
    rows = [
        '{"step": 1, "kind": "train", "a": 1, "text": "no", "deep": [1], "huge": 1e999, "whole": ' + "9" * 400 + "}",
        "[" * 100_000, '"train"', "[]", "{}", "null", "\x00", '{"step": "1", "kind": "train"}',
        '{"step": -1, "kind": "train"}', '{"step": 1e3, "kind": "train"}', '{"step": 1, "kind": ["train"]}',
        '{"step": true, "kind": "train"}', '{"step": 99999999999999999999, "kind": "train"}',
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    metrics = read(tmp_path)
    assert metrics.problem == "12 lines of metrics.jsonl are malformed."
    found = metrics.build_series(["a", "text", "deep", "huge", "whole"], "train", None)["series"]
    assert found == {"a": [1.0], "text": [None], "deep": [None], "huge": [None], "whole": [None]}


def test_dashboard_metrics_many_points_are_thinned_and_keep_lows_and_highs(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(10_000):
            value = {3333: 50.0, 7777: -50.0}.get(step, (step % 7) / 7)
            file.write(json.dumps({"step": step, "kind": "train", "a": value, "b": -value}) + "\n")
    found = read(tmp_path).build_series(["a", "b"], "train", None)
    assert len(found["steps"]) <= 2002
    assert {0, 3333, 7777, 9999} <= set(found["steps"])
    assert (min(found["series"]["a"]), max(found["series"]["a"])) == (-50.0, 50.0)
    assert found["series"]["b"] == pytest.approx([-value for value in found["series"]["a"]])


def test_dashboard_metrics_all_points_come_where_they_are_asked_for(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(5000):
            file.write(json.dumps({"step": step, "kind": "train", "a": float(step)}) + "\n")
    found = read(tmp_path).build_series(["a"], "train", None, full=True)
    assert found["steps"] == list(range(5000))
    assert found["series"]["a"] == [float(step) for step in range(5000)]


def test_dashboard_metrics_few_bytes_do_not_become_very_many_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.dashboard.metrics._MAX_VALUES", 40)
    wide = {"step": 1, "kind": "train"} | {f"n{number}": 1.0 for number in range(9)}
    rows = [wide, *({"step": step, "kind": "train"} for step in range(2, 9)), {"step": 9, "kind": "train", "new": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = Metrics(SafeDirectory(tmp_path))
    metrics.refresh()
    table = metrics.tables["train"]
    assert (len(table.columns), list(table.steps)) == (9, [1, 2, 3, 4])
    assert metrics.problem == "5 lines of metrics.jsonl are too many to show."


def test_dashboard_metrics_time_stays_finite(tmp_path: Path) -> None:
    rows = [{"step": step, "kind": "train", "time/step_s": 1e308 if step > 1 else 2.0} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = Metrics(SafeDirectory(tmp_path))
    metrics.refresh()
    assert metrics.build_overview()["kinds"]["train"]["time_s"] == [2.0, 2.0, 2.0]
