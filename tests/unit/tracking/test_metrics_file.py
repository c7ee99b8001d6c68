"""The file that records metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.tracking import read_metrics
from roll.tracking.metrics_file import MetricsFile


def test_metrics_file_a_line_holds_every_key_seen_before(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.append(1, "train", {"b": 1.0, "a": 2.0})
    file.append(1, "evaluation", {"eval/accuracy": 0.5})
    file.append(2, "train", {"c": 3.0})
    MetricsFile(tmp_path / "m.jsonl").append(3, "train", {"a": 1.0})  # also after a resume
    assert [list(row) for row in read_metrics(tmp_path / "m.jsonl")] == [
        ["step", "kind", "a", "b"],
        ["step", "kind", "eval/accuracy"],
        ["step", "kind", "a", "b", "c"],
        ["step", "kind", "a", "b", "c"],
    ]
    assert read_metrics(tmp_path / "m.jsonl")[2] == {"step": 2, "kind": "train", "a": None, "b": None, "c": 3.0}


def test_metrics_file_nan_and_infinity_become_null_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    for step in (1, 2):
        file.append(step, "train", {"loss": math.nan, "norm": math.inf})
    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines] == [None, None]
    assert sorted(r.args[0] for r in caplog.records) == ["loss", "norm"]


def test_metrics_file_a_step_recorded_again_replaces_its_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.append(2, "train", {"a": 1.0})
    file.append(2, "evaluation", {"eval/accuracy": 0.5})
    file.append(2, "evaluation", {"eval/accuracy": 0.75})
    rows = read_metrics(tmp_path / "m.jsonl")
    assert [(row["kind"], row.get("eval/accuracy")) for row in rows] == [("train", None), ("evaluation", 0.75)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), unique=True, max_size=6).map(sorted), st.integers(-1, 9), st.integers(0, 40))
def test_metrics_file_truncating_keeps_exactly_the_whole_lines_up_to_a_step(
    steps: list[int], last: int, torn_bytes: int
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "m.jsonl"
        file = MetricsFile(path)
        for step in steps:
            file.append(step, "train", {"reward/mean": step / 10})
        with path.open("ab") as handle:
            handle.write(b'{"step": 0, "kind": "train", "reward/mean": 0.5}\n'[: min(torn_bytes, 48)])
        resumed = MetricsFile(path)
        resumed.truncate(last)
        assert [row["step"] for row in read_metrics(path)] == [step for step in steps if step <= last]
        resumed.append(last + 1, "train", {"reward/mean": 0.0})
        assert path.read_bytes().count(b"\n") == len(read_metrics(path))


def test_metrics_file_a_line_that_does_not_fit_on_the_disk_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    path = tmp_path / "m.jsonl"
    file = MetricsFile(path)
    file.append(1, "train", {"a": 1.0})
    before = path.read_bytes()
    written = os.write

    def full_after_ten_bytes(descriptor: int, data: memoryview) -> int:
        if len(data) <= 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(descriptor, data[:10])

    monkeypatch.setattr(os, "write", full_after_ten_bytes)
    with pytest.raises(OSError, match="No space"):
        file.append(2, "train", {"a": 2.0})
    monkeypatch.undo()
    assert path.read_bytes() == before
    file.append(2, "train", {"a": 2.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
