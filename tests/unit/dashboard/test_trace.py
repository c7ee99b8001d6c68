"""`trace.json` as lanes and steps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from unit.dashboard.conftest import trace_of

from roll.dashboard.trace import Trace
from roll.tracking.reading.files import SafeDirectory
from roll.tracking.trace import TraceFile


def read(path: Path) -> Trace:
    trace = Trace(SafeDirectory(path))
    trace.refresh(60.0)
    return trace


def spans(found: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    lanes = [lane["name"] for lane in found["lanes"]]
    return [(lanes[span["lane"]], span["name"], span["start_s"], span["end_s"]) for span in found["spans"]]


def test_dashboard_trace_spans_lie_in_the_lanes_of_who_did_them(tmp_path: Path) -> None:
    TraceFile(tmp_path / "trace.json").append(trace_of(1))
    found = read(tmp_path).build_lanes(None, None, 4000)
    assert sorted(spans(found)) == [
        ("controller", "generate", 0.0, 6.0), ("controller", "step 1", 0.0, 10.0),
        ("rollouts 0", "generating", 0.0, 5.0),
        ("trainer", "forward_backward", 6.0, 9.0), ("trainer", "train", 6.0, 9.0),
    ]  # fmt: skip
    assert found["merged"] is False
    assert [lane["kind"] for lane in found["lanes"]] == ["controller", "trainer", "rollout"]
    generating = next(span for span in found["spans"] if span["name"] == "generating")
    assert generating["args"] == {"id": "train-0.0"}


def test_dashboard_trace_a_trace_that_grows_is_read_on_from_where_it_was(tmp_path: Path) -> None:
    events = trace_of(3)
    file = TraceFile(tmp_path / "trace.json")
    file.append(events[:10])
    trace = read(tmp_path)
    before = len(trace.build_lanes(None, None, 4000)["spans"])
    file.append(events[10:])
    trace.refresh(60.0)
    assert spans(trace.build_lanes(None, None, 4000)) == spans(read(tmp_path).build_lanes(None, None, 4000))
    assert before == 6
    assert len(trace.build_lanes(None, None, 4000)["spans"]) == 15


def test_dashboard_trace_a_trace_that_is_rewritten_while_it_is_read_shows_only_what_stands_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.tracking.reading.files._CHUNK_BYTES", 300)
    path = tmp_path / "trace.json"
    TraceFile(path).append(trace_of(2))
    trace = Trace(SafeDirectory(tmp_path))
    clock = iter((0.0, 0.5, 2.0))
    with monkeypatch.context() as patch:
        patch.setattr("roll.dashboard.trace.time.monotonic", lambda: next(clock))
        trace.refresh(1.0)
    assert trace.is_reading
    path.write_bytes(b"")
    TraceFile(path).append([event | {"name": "after"} for event in trace_of(5) if event["ph"] == "X"])
    for _ in range(2):
        trace.refresh(60.0)
    assert {name for _, name, *_ in spans(trace.build_lanes(None, None, 4000))} == {"after"}


def test_dashboard_trace_a_window_holds_what_touches_it(tmp_path: Path) -> None:
    TraceFile(tmp_path / "trace.json").append(trace_of(3))
    found = read(tmp_path).build_lanes(16.5, 18.0, 4000)
    assert {name for _, name, _, _ in spans(found)} == {"forward_backward", "train", "step 2"}


def test_dashboard_trace_the_phase_that_held_a_step_back_is_named_and_inner_ones_are_not_counted(
    tmp_path: Path,
) -> None:
    TraceFile(tmp_path / "trace.json").append(trace_of(2))
    said = {"phases": {"generate": 6.0, "train": 3.0}, "held_back_by": "generate"}
    assert [asdict(step) for step in read(tmp_path).build_steps()] == [
        {"step": step, "start_s": start, "end_s": start + 10, **said}
        for step, start in ((1, 0.0), (2, 10.0))
    ]  # fmt: skip


def test_dashboard_trace_many_spans_are_joined_lane_by_lane_and_long_ones_stay(tmp_path: Path) -> None:
    short = [
        {"ts": 1_000_000 + 100 * i, "name": "prefill", "ph": "X", "dur": 50, "pid": 1_000_000_002, "tid": 1 + i % 2}
        for i in range(5000)
    ]
    long = {"ts": 1_000_000, "name": "step 1", "ph": "X", "dur": 500_000, "pid": 7, "tid": 0}
    TraceFile(tmp_path / "trace.json").append([*short, long, long | {"name": "end"}])
    found = read(tmp_path).build_lanes(None, None, 100)
    assert found["merged"] and len(found["spans"]) <= 100
    kept = spans(found)
    assert ("controller", "step 1", 0.0, 0.5) in kept
    engines = [span for span in kept if span[0] == "engine-0"]
    assert min(span[2] for span in engines) == 0.0
    assert max(span[3] for span in engines) == 0.49985
    assert read(tmp_path).build_lanes(0.1, 0.1005, 100)["merged"] is False


def test_dashboard_trace_rollouts_take_over_lanes_of_those_that_ended(tmp_path: Path) -> None:
    common = {"pid": 1_000_000_003, "tid": 0, "cat": "rollout"}
    events = [
        {"ts": ts, "name": name, "ph": phase, "id": rollout, **common}
        for ts, name, phase, rollout in (
            (0, "queued", "b", "a"), (0, "queued", "b", "b"), (10, "queued", "e", "a"), (10, "trained", "n", "a"),
            (20, "queued", "b", "c"), (30, "queued", "e", "c"), (40, "queued", "e", "b"), (50, "trained", "n", "b"),
        )
    ]  # fmt: skip
    TraceFile(tmp_path / "trace.json").append(events)
    assert sorted(span[0] for span in spans(read(tmp_path).build_lanes(None, None, 100))) == [
        "rollouts 0", "rollouts 0", "rollouts 1",
    ]  # fmt: skip


def test_dashboard_trace_what_is_no_event_is_left_out(tmp_path: Path) -> None:
    lines = [
        "[",
        "null,",
        "{},",
        '{"ts":"x","ph":"X","name":"n"},',
        "[" * 100_000 + ",",
        '{"ts":1e400,"ph":"X","name":"n"},',
    ]
    lines += ['{"ts":1,"ph":"X","name":[]},', '{"ts":5,"ph":"X","name":"n","dur":"x","tid":-7,"pid":null,"args":[1]},']
    (tmp_path / "trace.json").write_text("\n".join(lines) + "\n{")
    assert spans(read(tmp_path).build_lanes(None, None, 100)) == [("controller", "n", 0.0, 0.0)]


def test_dashboard_trace_spans_that_never_end_take_no_more_than_their_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.dashboard.trace._MAX_OPEN_SPANS", 3)
    rollout = {"pid": 1_000_000_003, "tid": 0, "cat": "rollout", "name": "generating" + "g" * 1000}
    events: list[dict[str, Any]] = [{"ts": i, "ph": "b", "id": f"train-{i}.0", **rollout} for i in range(10)]
    events += [{"ts": 20, "ph": "e", "id": f"train-{i}.0", **rollout} for i in range(11)]
    TraceFile(tmp_path / "trace.json").append(events)
    trace = read(tmp_path)
    found = trace.build_lanes(None, None, 100)
    assert [span["args"]["id"] for span in found["spans"]] == ["train-7.0", "train-8.0", "train-9.0"]
    assert len({span["lane"] for span in found["spans"]}) == 3
    assert {len(span["name"]) for span in found["spans"]} == {200}
    assert len(trace._open) <= 3 and len(trace._slots) <= 3
