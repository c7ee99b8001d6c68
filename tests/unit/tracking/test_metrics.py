"""Metric values and the file that records them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.tracking import Last, Max, Mean, Min, Quantiles, Sum, flatten, is_timing, read_metrics, reduce
from roll.tracking.metrics_file import MetricsFile

numbers = st.integers(-1000, 1000).map(float)  # integers add up exactly in any order
parts = st.lists(numbers, min_size=1, max_size=12)


def test_each_type_reduces_in_its_own_way() -> None:
    first = {"m": Mean(3.0, 4.0), "s": Sum(1), "x": Max(1), "n": Min(1), "l": Last(1), "q": Quantiles((1.0,))}
    second = {"m": Mean(3.0, 1.0), "s": Sum(2), "x": Max(2), "n": Min(2), "l": Last(2), "q": Quantiles((3.0,))}
    assert flatten(reduce([first, second])) == pytest.approx(
        {"m": 1.2, "s": 3, "x": 2, "n": 1, "l": 2, "q/p10": 1.2, "q/p50": 2, "q/p90": 2.8}
    )


@settings(deadline=None)
@given(parts, parts, parts)
def test_reducing_in_stages_gives_what_reducing_at_once_does(a: list, b: list, c: list) -> None:
    def part(values: list[float]) -> dict:
        return {
            "mean": Mean.of(values), "sum": Sum(sum(values)), "max": Max(max(values)),
            "min": Min(min(values)), "last": Last(values[-1]), "q": Quantiles(tuple(values)),
        }  # fmt: skip

    whole = flatten(reduce([part(a), part(b), part(c)]))
    assert whole == flatten(reduce([part(a), reduce([part(b), part(c)])]))
    assert whole == flatten(part(a + b + c))
    assert whole["q/p90"] == pytest.approx(float(np.quantile(a + b + c, 0.9)))
    assert whole["mean"] == pytest.approx(float(np.mean(a + b + c)))


def test_what_has_no_value_is_left_out() -> None:
    assert flatten({"a": Mean.of([]), "b": Quantiles(()), "c": 1}) == {"c": 1.0}


def test_nested_mappings_become_paths() -> None:
    assert flatten({"reward": {"math": {"form": Mean(1.0, 2.0)}, "mean": 3}}) == {
        "reward/math/form": 0.5,
        "reward/mean": 3.0,
    }


def test_nan_survives_max_and_min() -> None:
    for kind in (Max, Min):
        for pair in ((math.nan, 1.0), (1.0, math.nan)):
            assert math.isnan(flatten(reduce([{"a": kind(v)} for v in pair]))["a"])


def test_one_name_with_two_types_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="metric 'a' is a Sum in one part, a Max in another"):
        reduce([{"a": Sum(1)}, {"a": Max(1)}])


def test_durations_rates_and_memory_are_timing_and_nothing_else_is() -> None:
    timing = ["time/step_s", "throughput/generated_tokens_per_s", "memory/peak_rss_bytes", "weights/push_s"]
    assert all(map(is_timing, timing))
    assert not any(map(is_timing, ["reward/mean", "training/loss", "rollout/num_tokens", "policy_version"]))


def test_a_line_holds_every_key_seen_before(tmp_path: Path) -> None:
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


def test_nan_and_infinity_become_null_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    for step in (1, 2):
        file.append(step, "train", {"loss": math.nan, "norm": math.inf})
    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines] == [None, None]
    assert sorted(r.args[0] for r in caplog.records) == ["loss", "norm"]


def test_a_step_recorded_again_replaces_its_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.append(2, "train", {"a": 1.0})
    file.append(2, "evaluation", {"eval/accuracy": 0.5})
    file.append(2, "evaluation", {"eval/accuracy": 0.75})
    rows = read_metrics(tmp_path / "m.jsonl")
    assert [(row["kind"], row.get("eval/accuracy")) for row in rows] == [("train", None), ("evaluation", 0.75)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), unique=True, max_size=6).map(sorted), st.integers(-1, 9), st.integers(0, 40))
def test_truncating_keeps_exactly_the_whole_lines_up_to_a_step(steps: list[int], last: int, torn_bytes: int) -> None:
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


def test_a_line_that_does_not_fit_on_the_disk_leaves_the_file_as_it_was(
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
