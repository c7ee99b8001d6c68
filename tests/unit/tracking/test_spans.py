"""Spans measure with a clock that the test turns; the trace is read back as JSON."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.tracking import Spans
from roll.tracking.trace import TraceFile


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def events(path: Path, kind: str = "X") -> list[dict]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == kind]


def test_trace_a_step_is_divided_into_its_phases(clock: Clock) -> None:
    spans = Spans(clock=clock)
    with spans.step(1):
        with spans.phase("generate"):
            clock.now += 3
        with spans.phase("train"):
            clock.now += 1
            with spans.phase("forward"):
                clock.now += 0.5
        clock.now += 0.25
        assert spans.get_metrics() == {
            "time/generate_s": 3, "time/train_s": 1.5, "time/forward_s": 0.5, "time/step_s": 4.75
        }  # fmt: skip
        assert spans.get_phases() == {"generate": 3, "train": 1.5}
        assert spans.find_bottleneck() == "generate"


def test_trace_every_step_starts_from_zero_and_a_phase_entered_twice_adds_up(clock: Clock) -> None:
    spans = Spans(clock=clock)
    with spans.phase("sync"):
        clock.now += 9
    for _ in range(2):
        with spans.step(1):
            for _ in range(2):
                with spans.phase("generate"):
                    clock.now += 1
            assert spans.get_metrics() == {"time/generate_s": 2, "time/step_s": 2}


def test_trace_an_open_phase_counts_up_to_now(clock: Clock) -> None:
    spans = Spans(clock=clock)
    with spans.phase("evaluate"):
        clock.now += 2
        assert spans.get_elapsed("evaluate") == 2
    assert spans.get_elapsed("never") == 0


async def test_trace_overlapping_phases_of_one_name_are_not_counted_twice(tmp_path: Path, clock: Clock) -> None:
    spans = Spans(tmp_path / "trace.json", clock=clock)
    first_may_end, second_may_end = asyncio.Event(), asyncio.Event()

    async def work(may_end: asyncio.Event) -> None:
        with spans.phase("generate"):
            await may_end.wait()

    with spans.step(1):
        first = asyncio.create_task(work(first_may_end))
        await asyncio.sleep(0)
        clock.now += 2
        second = asyncio.create_task(work(second_may_end))
        await asyncio.sleep(0)
        clock.now += 3
        first_may_end.set()
        await first
        clock.now += 4
        second_may_end.set()
        await second
        assert spans.get_metrics() == {"time/generate_s": 9, "time/step_s": 9}
    spans.close()
    generate = [e for e in events(tmp_path / "trace.json") if e["name"] == "generate"]
    assert [e["dur"] for e in generate] == [5_000_000, 7_000_000]
    assert generate[0]["tid"] != generate[1]["tid"]


def test_trace_phases_end_also_when_they_fail(tmp_path: Path, clock: Clock) -> None:
    spans = Spans(tmp_path / "trace.json", clock=clock)
    with pytest.raises(RuntimeError), spans.step(1), spans.phase("train"):
        clock.now += 1
        raise RuntimeError
    assert spans.get_elapsed("train") == 1
    assert [e["name"] for e in events(tmp_path / "trace.json")] == ["train", "step 1"]


def test_trace_the_display_is_told_of_phases_but_not_of_their_parts() -> None:
    told: list[str] = []
    spans = Spans(on_phase=told.append)
    with spans.step(1), spans.phase("train"), spans.phase("forward"):
        pass
    assert told == ["train", ""]


def test_trace_the_trace_is_whole_after_every_phase_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for session in range(2):
        spans = Spans(path)  # never closed, as after a kill
        for step in range(2):
            with spans.step(step):
                with spans.phase("generate"):
                    pass
                names = [e["name"] for e in events(path)]
                assert names.count("generate") == session * 2 + step + 1
        spans.add_counter_value("reward", 0.5)
    assert len(events(path, "M")) == 2


@settings(deadline=None)
@given(st.integers(0, 400))
def test_trace_a_trace_torn_anywhere_is_mended_and_keeps_its_whole_events(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        trace = TraceFile(path)
        for index in range(8):
            trace.append([{"ph": "X", "name": f"event {index}"}])
        trace.close()
        content = path.read_bytes()
        path.write_bytes(content[:cut])
        survivors = content[:cut].count(b"}")
        trace = TraceFile(path)
        trace.append([{"ph": "X", "name": "after"}])
        trace.close()
        names = [e["name"] for e in json.loads(path.read_text())]
        assert names == [f"event {i}" for i in range(survivors)] + ["after"]


def test_trace_a_trace_that_cannot_be_written_is_given_up_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    spans = Spans(tmp_path, clock=clock)  # a directory
    with spans.step(1), spans.phase("train"):
        clock.now += 1
    assert spans.get_elapsed("train") == 1
    assert len(caplog.records) == 1
