"""Every tracker through its own client, offline; what it received is read back with its own reader."""

from __future__ import annotations

import json
import math
import shutil
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll.cli.main import exit_process
from roll.config.pipelines.rlvr import RLVRConfig
from roll.errors import ConfigError
from roll.tracking import RunDirectory, Tracker, read_metrics
from roll.tracking.sinks import SINKS, GuardedSink, RolloutTable, build_rollout_table, guarded
from roll.tracking.sinks.base import flatten, get_run_id

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07 <script>alert(1)</script> | `x` \u202egnp.exe \ud800 [red]rich[/red]\n" + "long " * 3000
)


class Received:
    """What a tracker holds of one run."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.tables: dict[tuple[str, int], list[list[Any]]] = {}
        self.config: dict[str, Any] = {}
        self.num_runs = 0

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self.metrics.setdefault(step, {}).update(values)


def of_tensorboard(run: RunDirectory) -> Received:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.tensorboard_dir), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    received = Received()
    received.num_runs = 1
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            received.add(event.step, {tag: event.value})
    for tag in events.Tags()["tensors"]:
        for event in events.Tensors(tag):
            text = event.tensor_proto.string_val[0].decode()
            if tag == "configuration":
                import yaml

                received.config = yaml.safe_load(text)
                continue
            assert all(line.startswith("    ") for line in text.splitlines())
            parts = [part for part in text.split("    step: ") if part.strip()]
            received.tables[tag, event.step] = [part.splitlines() for part in parts]
    return received


def of_wandb(run: RunDirectory) -> Received:
    from wandb.proto.wandb_internal_pb2 import Record

    received, ids = Received(), set()
    for path in sorted(run.path.glob("wandb/offline-run-*/*.wandb")):
        for record in _ended(path, Record):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                received.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if kind == "history":
                step, rest = 0, {}
                for item in record.history.item:
                    name, value = "/".join(item.nested_key) or item.key, json.loads(item.value_json)
                    if name == "step":
                        step = value
                    elif not name.startswith("_"):
                        rest[name] = value
                for name in {key.rpartition("/")[0] for key in rest if key.endswith("/_type")}:
                    content = json.loads((path.parent / "files" / rest[f"{name}/path"]).read_text())
                    received.tables[name, step] = content["data"]
                    rest = {key: value for key, value in rest.items() if not key.startswith(f"{name}/")}
                received.add(step, rest)
    received.num_runs = len(ids)
    return received


def _ended(path: Path, record_type: Any) -> list[Any]:
    """Records of W&B's file, once it has that of the run's end: its process still writes when `finish` returns."""
    deadline = time.monotonic() + 60
    while True:
        records = [record_type.FromString(data) for data in _journal(path.read_bytes(), header=7)]
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < deadline, f"{path} has no end"
        time.sleep(0.05)


def _journal(data: bytes, header: int) -> Iterator[bytes]:
    """Records of a LevelDB log: blocks of 32 KiB, and in them chunks of checksum, length and kind."""
    position, parts = header, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if kind == 0:  # what pads a block
            position += left
            continue
        if position + 7 + length > len(data):  # still being written
            return
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def of_swanlab(run: RunDirectory) -> Received:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    received, ids = Received(), set()
    for path in sorted(run.path.glob("swanlog/run-*/*.swanlab")):
        ids.add(path.stem)
        reader = DataStoreReader()
        reader.open(str(path))
        while (data := reader.scan()) is not None:
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "scalar":
                received.add(record.scalar.step, {record.scalar.key: record.scalar.value.number})
            elif kind == "media":
                (item,) = record.media.value.items
                content = json.loads((path.parent / "media" / "echarts" / item.filename).read_text())
                received.tables[record.media.key, record.media.step] = [
                    list(row.values()) for row in content["rowData"]
                ]
        held = yaml.safe_load((path.parent / "files" / "config.yaml").read_text())
        received.config = {name: entry["value"] for name, entry in held.items()}
    received.num_runs = len(ids)
    return received


def of_mlflow(run: RunDirectory) -> Received:
    import yaml
    from mlflow import MlflowClient
    from mlflow.artifacts import download_artifacts

    client, received = MlflowClient(), Received()
    experiment = client.get_experiment_by_name("roll-tests")
    runs = client.search_runs([experiment.experiment_id])
    received.num_runs = len(runs)
    held = client.get_run(runs[0].info.run_id)
    for name in held.data.metrics:
        for metric in client.get_metric_history(held.info.run_id, name):
            received.add(metric.step, {name: metric.value})
    for folder in ("rollouts/train", "rollouts/evaluation"):
        for file in client.list_artifacts(held.info.run_id, folder):
            path = Path(download_artifacts(run_id=held.info.run_id, artifact_path=file.path))
            received.tables[folder, int(path.stem.rpartition("-")[2])] = json.loads(path.read_text())["data"]
    received.config = yaml.safe_load(
        Path(download_artifacts(run_id=held.info.run_id, artifact_path="config.yaml")).read_text()
    )
    assert held.data.params["data.0.source"] == "arithmetic"
    return received


def of_trackio(run: RunDirectory) -> Received:
    from trackio.sqlite_storage import SQLiteStorage

    received, project = Received(), "roll-tests"
    records = SQLiteStorage.get_run_records(project)
    received.num_runs = len(records)
    for row in SQLiteStorage.get_logs(project, records[0]["name"]):
        for name, value in row.items():
            if isinstance(value, dict):
                received.tables[name, row["step"]] = [list(cells.values()) for cells in value["_value"]]
            elif name not in ("step", "timestamp"):
                received.add(row["step"], {name: value})
    received.config = SQLiteStorage.get_run_config(project, records[0]["name"])
    return received


READERS: dict[str, Callable[[RunDirectory], Received]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "swanlab": of_swanlab,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client writes below the test's directory and talks to nobody."""
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_DISABLE_CODE": "true",
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_CONFIG_DIR": str(tmp_path / "settings"),
        "SWANLAB_MODE": "offline",
        "SWANLAB_SAVE_DIR": str(tmp_path / "swanlab"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)  # artifacts of MLflow lie in the current directory


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow takes seconds to make its tables: once for all tests."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(params=list(SINKS))
def sink(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "tensorboard":
        pytest.importorskip(
            request.param, reason=f"the tracker {request.param} is not installed: roll-rl[{request.param}]"
        )
    if request.param == "mlflow":
        shutil.copy(request.getfixturevalue("empty_database"), tmp_path / "mlflow.db")
    if request.param == "trackio":
        for module in ("trackio.utils", "trackio.sqlite_storage", "trackio"):
            monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    return request.param


def _rounded(name: str, value: float) -> float:
    """As the tracker keeps it: TensorBoard has 32 bits."""
    return float(np.float32(value)) if name == "tensorboard" else value


def _recorded(run: RunDirectory, sink: str) -> dict[int, dict[str, float]]:
    """`metrics.jsonl` without what is null."""
    found: dict[int, dict[str, float]] = {}
    for row in read_metrics(run.metrics_path):
        values = {n: _rounded(sink, v) for n, v in row.items() if n not in ("step", "kind") and v is not None}
        found.setdefault(row["step"], {}).update(values)
    return found


def test_tracker_what_a_tracker_received_is_what_the_run_recorded_also_over_a_resume(
    sink: str, tmp_path: Path, demo: SimpleNamespace
) -> None:
    own = {"tensorboard": True} if sink == "tensorboard" else {"tensorboard": False, sink: "roll-tests"}
    config: RLVRConfig = demo.config(tmp_path / "runs", **own, table_every_num_steps=2, table_num_rows=3)
    with (
        RunDirectory.create(config.run_dir, {}) as run,
        Tracker(run, config, num_steps=4) as tracker,
    ):
        demo.evaluation(tracker, 0)
        tracker.log_step(1, {"reward/mean": 1 / 3, "odd/nan": math.nan, "odd/small": 1e-30, "odd/name@8": 2.0})
        demo.step(tracker, 2)
        demo.step(tracker, 3)
        assert tracker.finish().tracker_failures == 0
    with (
        RunDirectory.open(config.run_dir, lock=True) as run,
        Tracker(run, config, num_steps=4, resumed_at=2) as tracker,
    ):
        demo.step(tracker, 3)
        demo.step(tracker, 4)
        assert tracker.finish().tracker_failures == 0

    received = READERS[sink](run)
    expected = _recorded(run, sink)
    if sink == "mlflow":
        expected[1]["odd/name_8"] = expected[1].pop("odd/name@8")
    assert received.metrics == expected
    assert received.num_runs == 1
    assert set(received.tables) == {
        ("rollouts/evaluation", 0), ("rollouts/evaluation", 2), ("rollouts/evaluation", 4),
        ("rollouts/train", 2), ("rollouts/train", 4),
    }  # fmt: skip
    assert len(received.tables["rollouts/train", 4]) == 3
    assert received.config["data"][0]["source"] == "arithmetic"
    assert received.config["training"]["num_steps"] == 4


def test_tracker_hostile_rollouts_reach_a_tracker_as_harmless_text(
    sink: str, tmp_path: Path, demo: SimpleNamespace
) -> None:
    group = demo.group(1)
    group = replace(group, rollouts=tuple(replace(rollout, text=HOSTILE) for rollout in group.rollouts))
    own = {"tensorboard": True} if sink == "tensorboard" else {"tensorboard": False, sink: "roll-tests"}
    config: RLVRConfig = demo.config(tmp_path / "runs", **own, rollouts=False, table_every_num_steps=1)
    with RunDirectory.create(config.run_dir, {}) as run, Tracker(run, config, num_steps=4) as tracker:
        tracker.log_rollouts(1, [group])
        tracker.log_step(1, {"reward/mean": 0.5})
        assert tracker.finish().tracker_failures == 0
    rows = READERS[sink](run).tables["rollouts/train", 1]
    said = "\n".join(str(cell) for row in rows for cell in row)
    assert "x1b" in said and not any(c in said for c in "\x1b\x07\u202e\ud800")
    assert "gnp.exe" in said and len(said) < 10_000
    if sink == "trackio":  # which shows cells as Markdown
        assert "<script>" not in said


def test_tracker_a_table_goes_from_the_best_rollout_to_the_worst_and_the_unscored(demo: SimpleNamespace) -> None:
    groups = [demo.group(1, (0.5, None)), demo.group(2, (1.0, 0.0))]
    table = build_rollout_table("rollouts/train", 7, groups, {"2.0": 1.5}, 3)
    assert [row[table.columns.index("rollout")] for row in table.rows] == ["2.0", "1.0", "1.1"]
    rewards, advantages = (table.columns.index(name) for name in ("reward", "advantage"))
    assert [(row[rewards], row[advantages]) for row in table.rows] == [(1.0, 1.5), (0.5, None), (None, None)]
    assert build_rollout_table("rollouts/train", 7, [], None, 3).rows == ()
    assert len(build_rollout_table("rollouts/train", 7, groups, None, 1).rows) == 1


def test_tracker_settings_are_flattened_to_their_leaves() -> None:
    assert flatten({"a": {"b": 1, "c": []}, "d": [{"e": None}, 2], "f": {}}) == {
        "a.b": 1, "a.c": [], "d.0.e": None, "d.1": 2, "f": {},
    }  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers that one test leaves behind are not another's."""
    monkeypatch.setattr(guarded, "_abandoned_trackers", set())
    monkeypatch.setattr("roll.running._detached_futures", set())


class _Blocked:
    """A tracker whose server answers nobody."""

    def __init__(self) -> None:
        self.free, self.steps = threading.Event(), []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.free.wait()
        self.steps.append(step)

    def log_table(self, step: int, table: RolloutTable) -> None:
        raise OSError("the server says no")

    def close(self) -> None: ...


def test_tracker_a_tracker_that_hangs_costs_a_run_a_limited_wait_and_is_counted() -> None:
    blocked = _Blocked()
    sink = GuardedSink("slow", lambda: blocked, max_waiting=3, close_limit_s=0.05)
    for step in range(6):
        sink.log(step, {"a": 1.0})
    sink.flush()
    sink.close()
    assert sink.num_failures >= 4  # at least two calls, the end of what is to arrive, and what still waits
    blocked.free.set()


def test_tracker_calls_arrive_in_order_and_failures_are_counted_but_not_raised() -> None:
    blocked = _Blocked()
    blocked.free.set()
    sink = GuardedSink("fine", lambda: blocked)
    for step in range(50):
        sink.log(step, {"a": 1.0})
    sink.log_table(50, RolloutTable(name="t", columns=(), rows=()))
    sink.log(51, {"a": math.inf})
    sink.flush()
    assert (blocked.steps, sink.num_failures) == ([*range(50), 51], 1)
    sink.close()
    sink.close()


def test_tracker_a_tracker_that_cannot_start_is_refused_with_what_to_do() -> None:
    def fail() -> Any:
        raise RuntimeError("no login.")

    with pytest.raises(ConfigError, match=r"tracking\.wandb: .*RuntimeError: no login\).*tracking\.wandb=null"):
        GuardedSink("wandb", fail)


def test_tracker_only_finite_values_are_sent() -> None:
    sent: list[Mapping[str, float]] = []

    class Kept(_Blocked):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            sent.append(metrics)

    sink = GuardedSink("kept", Kept)
    sink.log(1, {"a": 1.0, "b": math.inf, "c": math.nan})
    sink.close()
    assert sent == [{"a": 1.0}]


def test_tracker_a_tracker_that_is_left_behind_at_the_end_is_counted_once() -> None:
    blocked = _Blocked()
    sink = GuardedSink("slow", lambda: blocked, close_limit_s=0.05)
    sink.log(1, {"a": 1.0})
    sink.close()
    assert sink.num_failures == 1
    blocked.free.set()


def test_tracker_settling_and_closing_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked, waits = _Blocked(), []
    sink = GuardedSink("slow", lambda: blocked, close_limit_s=0.05)
    sink.log(1, {"a": 1.0})
    sink.flush()
    monkeypatch.setattr(sink._thread, "join", waits.append)
    sink.close()
    blocked.free.set()
    assert waits and waits[0] < 0.02


def test_tracker_a_client_that_would_end_the_process_is_a_failure_like_others() -> None:
    class Leaving(_Blocked):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            self.steps.append(step)
            sys.exit("no space left")

    leaving = Leaving()
    sink = GuardedSink("leaving", lambda: leaving, close_limit_s=10)
    sink.log(1, {"a": 1.0})
    sink.log(2, {"a": 1.0})
    sink.flush()
    sink.close()
    assert (leaving.steps, sink.num_failures) == ([1, 2], 2)

    def leave() -> Any:
        sys.exit("log in first")

    with pytest.raises(ConfigError, match=r"tracking\.swanlab: .*SystemExit: log in first"):
        GuardedSink("swanlab", leave)


def test_tracker_a_tracker_that_does_not_answer_is_refused_after_a_while() -> None:
    never = threading.Event()

    def hang() -> Any:
        never.wait()

    with pytest.raises(ConfigError, match=r"tracking\.mlflow: .*no response within 0\.05 s.*tracking\.mlflow=null"):
        GuardedSink("mlflow", hang, open_limit_s=0.05)
    never.set()


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_tracker_a_tracker_without_a_key_is_refused_and_asks_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo: SimpleNamespace
) -> None:
    pytest.importorskip(name, reason=f"the tracker's client is not here: roll-rl[{name}]")
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("WANDB_API_KEY", "SWANLAB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("WANDB_MODE", "SWANLAB_MODE"):
        monkeypatch.setenv(variable, "online")
    if name == "wandb":
        sys.modules[name].teardown()  # what it read of the environment before
    config = demo.config(tmp_path / "runs", **{name: "roll-tests"})
    with (
        RunDirectory.create(config.run_dir, {}) as run,
        pytest.raises(ConfigError, match=rf"tracking\.{name}: .*[kK]ey"),
        Tracker(run, config, num_steps=1),
    ):
        pass
    if name == "wandb":
        sys.modules[name].teardown()


def test_tracker_the_id_of_a_run_stays_the_same(run: RunDirectory) -> None:
    first = get_run_id(run)
    assert len(first) == 21 and first.isalnum() and first == first.lower()
    assert get_run_id(RunDirectory.open(run.path)) == first


def test_tracker_every_tracker_has_a_key_that_switches_it_on() -> None:
    from roll.config.operations import TrackingConfig

    assert set(SINKS) <= set(TrackingConfig.model_fields)


def test_tracker_who_was_left_behind_is_said_and_the_process_may_end(
    tmp_path: Path, demo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A client's own hook would hold Python up at its end: the command ends without it, with its code."""
    blocked = _Blocked()
    monkeypatch.setattr(
        "roll.tracking.tracker.open_sinks", lambda *_: [GuardedSink("slow", lambda: blocked, close_limit_s=0.05)]
    )
    assert not guarded.has_detached_threads()
    config = demo.config(tmp_path / "runs", console="plain")
    with RunDirectory.create(config.run_dir, {}) as run, Tracker(run, config, num_steps=1) as tracker:
        demo.step(tracker, 1)
    blocked.free.set()
    said = " ".join(capfd.readouterr().out.split())
    assert "tracking.slow did not finish in time and was abandoned" in said
    assert [row["step"] for row in read_metrics(run.metrics_path)] == [1]

    ends: list[int] = []
    monkeypatch.setattr("os._exit", ends.append)
    exit_process(3)
    assert ends == [3]
    monkeypatch.setattr(guarded, "_abandoned_trackers", set())
    with pytest.raises(SystemExit) as ended:
        exit_process(4)
    assert (ended.value.code, ends) == (4, [3])


def test_tracker_a_tracker_whose_files_were_removed_says_so(sink: str, tmp_path: Path, demo: SimpleNamespace) -> None:
    """Most clients would write on to what is gone."""
    own = {"tensorboard": True} if sink == "tensorboard" else {"tensorboard": False, sink: "roll-tests"}
    config: RLVRConfig = demo.config(tmp_path / "runs", **own, table_every_num_steps=1)
    with RunDirectory.create(config.run_dir, {}) as run, Tracker(run, config, num_steps=2) as tracker:
        demo.step(tracker, 1)
        for one in tracker._sinks:
            one.flush()
        kept = {
            "tensorboard": run.tensorboard_dir, "wandb": run.path / "wandb", "swanlab": run.path / "swanlog",
            "mlflow": tmp_path / "mlflow.db", "trackio": tmp_path / "trackio",
        }[sink]  # fmt: skip
        if sink == "trackio":  # whose own thread makes the file
            while not list(kept.glob("*.db")):
                threading.Event().wait(0.01)
            tracker.log_step(1, {"a": 1.0})
            for one in tracker._sinks:
                one.flush()
        kept.rename(tmp_path / "away")
        demo.step(tracker, 2)
        assert tracker.finish().tracker_failures >= 1
    assert [row["step"] for row in read_metrics(run.metrics_path) if row["kind"] == "train"][-1] == 2


def test_tracker_a_reason_of_many_lines_is_said_in_one() -> None:
    sink = GuardedSink("long", _Blocked)

    def fail() -> Any:
        raise RuntimeError("the database says\n  no\n" + "word " * 1000)

    with pytest.raises(ConfigError) as refused:
        GuardedSink("long", fail)
    sink.close()
    assert "RuntimeError: the database says no word" in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600
