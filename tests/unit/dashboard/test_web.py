"""Every endpoint; hostile names, texts and directories; nothing outside the given directories."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient
from unit.dashboard.conftest import client_of, endpoints, ids
from unit.dashboard.spoiling import spoil
from unit.tracking.conftest import make_group

from roll.dashboard.changes import CpuLimiter, stream_changes
from roll.dashboard.health import _ALARM_PATTERN
from roll.dashboard.rollouts import encode_row
from roll.dashboard.runs import Run
from roll.dashboard.vocabulary import Vocabularies
from roll.tracking.rollout_table import write_rollouts
from roll.types import Message

MakeRun = Callable[..., Path]
SECRET = "s3cret-outside-of-every-run"
HOSTILE = (
    "<script>alert(1)</script>",
    "'\"><img src=x onerror=alert(1)>",
    "\u202e\u0000\ud800",
    "](javascript:alert(1))",
)


def strict(answer: Any) -> Any:
    """As JSON that has no NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(answer.text, parse_constant=refuse)


def test_dashboard_web_every_endpoint_answers_for_a_run(make_run: MakeRun) -> None:
    client = client_of(make_run().parent)
    (run,) = strict(client.get("/api/runs"))
    expected = {
        "name": "demo", "pipeline": "rlvr", "status": "stopped", "problem": None, "step": 3, "num_steps": 4,
        "model": "smollm2-135m-instruct", "reward": 0.3, "held_out": 0.25,
    }  # fmt: skip
    assert expected.items() <= run.items()
    for url in endpoints(run["id"], encode_row(1, "train", 0)):
        answer = client.get(url)
        assert answer.status_code == 200, (url, answer.text)
        assert answer.headers["content-type"] == "application/json"
        strict(answer)
    assert strict(client.get(f"/api/runs/{run['id']}/series?names=reward/mean&since=1"))["steps"] == [2, 3]
    assert strict(client.get(f"/api/runs/{run['id']}/config"))["values"]["rollout.group_size"] == 2


def test_dashboard_web_health_names_alarms_draws_and_failures(make_run: MakeRun) -> None:
    client = client_of(make_run())
    (run,) = ids(client).values()
    found = strict(client.get(f"/api/runs/{run}/health"))
    (alarm,) = found["alarms"]
    assert (alarm["step"], alarm["alarm"]) == (3, "no_signal")
    assert alarm["message"] == "nothing is learnt (3 steps in a row; alarms.no_signal)"
    assert alarm["rows"][0] == encode_row(3, "train", 3) and len(alarm["rows"]) == 12
    assert found["ledger"]["fates"] == {"trained": 6, "filtered": 3}
    assert [step["trained"] for step in found["ledger"]["by_step"]] == [2.0, 2.0, 2.0]
    assert found["ledger"]["reasons"] == {
        "filtered: zero variance: every reward is 0": 1,
        "expired: no reason recorded": 1,
    }
    assert found["failures"] == [{"cause": "engine died", "count": 3, "first_step": 1, "last_step": 3}]
    assert found["syncs"][0] == {"step": 1, "version": 1.0, "bytes": 5.0}
    assert found["log_tail"][0].endswith("it begins")


def test_dashboard_web_a_long_log_is_read_in_time_that_grows_with_it() -> None:
    line = "2026-01-01 10:00:01,000 WARNING roll.x: " + "alarms.x" * 10_000
    began = time.process_time()
    assert _ALARM_PATTERN.match(line) is None
    assert time.process_time() - began < 10  # with two greedy gaps before the name it takes minutes


def test_dashboard_web_what_json_has_no_place_for_is_null_or_a_question_mark(make_run: MakeRun) -> None:
    path = make_run()
    (path / "config.yaml").write_text("a: .nan\nb: -.inf\nc: 1.5\n")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 9, "\\ud800x": 1}\n')
    event = '{"ts": 1, "ph": "X", "name": "a", "dur": 5, "pid": 1, "tid": 0, "args": {"v": NaN, "w": "\\ud800"}}'
    (path / "trace.json").write_text(f"[\n{event},\n")
    client = client_of(path)
    (run,) = ids(client).values()
    own = f"/api/runs/{run}"
    assert strict(client.get(f"{own}/config"))["values"] == {"a": None, "b": None, "c": 1.5}
    assert "?x" in [found["name"] for found in strict(client.get(f"{own}/metrics"))["names"]]
    assert strict(client.get(f"{own}/trace/lanes"))["spans"][0]["args"] == {"v": None, "w": "?"}


async def test_dashboard_web_the_stream_of_changes_ends_with_the_server(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.dashboard.changes._POLL_INTERVAL_S", 0.001)
    run = Run(make_run(), "demo", Vocabularies())
    ending = iter([False, True])
    told = [text async for text in stream_changes(run, CpuLimiter(), lambda: next(ending))]
    assert told == ["retry: 2000\n\n"]


def test_dashboard_web_a_run_that_is_being_written_runs_and_afterwards_it_is_finished(make_run: MakeRun) -> None:
    from roll.tracking.run_directory import RunDirectory

    path = make_run(num_steps=4)
    with RunDirectory.open(path, lock=True):
        assert client_of(path).get("/api/runs").json()[0]["status"] == "running"
    assert client_of(path).get("/api/runs").json()[0]["status"] == "finished"


def test_dashboard_web_an_accuracy_of_nothing_is_a_number_too(make_run: MakeRun) -> None:
    from roll.tracking.metrics_file import MetricsFile

    path = make_run()
    MetricsFile(path / "metrics.jsonl").append(3, "evaluation", {"eval/accuracy": 0.0})
    assert client_of(path).get("/api/runs").json()[0]["held_out"] == 0.0


def test_dashboard_web_only_settings_that_differ_are_shown(make_run: MakeRun) -> None:
    client = client_of(make_run("one").parent, make_run("two"))
    runs = ids(client)
    assert set(runs) == {"one", "two"}
    found = client.get(f"/api/diff?runs={runs['one']},{runs['two']}").json()
    assert found == {"keys": [{"key": "name", "values": ["one", "two"]}]}


def test_dashboard_web_unknown_things_are_refused_with_a_reason(make_run: MakeRun) -> None:
    client = client_of(make_run())
    run = ids(client)["demo"]
    for url, status in (
        ("/api/runs/none/metrics", 404), (f"/api/runs/{run}/rollouts/12345", 404), (f"/api/runs/{run}/rollouts/x", 400),
        (f"/api/runs/{run}/rollouts?sort=no", 400), (f"/api/runs/{run}/rollouts?limit=501", 400),
        (f"/api/runs/{run}/rollouts?reward_min=x", 400), (f"/api/runs/{run}/series?names=a&kind=no", 400),
        (f"/api/runs/{run}/series", 400), ("/api", 404), ("/api/runs/", 404), (f"/api/diff?runs={run},no", 404),
        (f"/api/runs/{run}/rollouts?kind=foo", 400), (f"/api/runs/{run}/rollouts?domain=a&domain=b", 400),
        (f"/api/runs/{run}/rollouts/{2**70}", 404), (f"/api/runs/{run}/rollouts/-1", 404),
    ):  # fmt: skip
        answer = client.get(url)
        assert answer.status_code == status, (url, answer.text)
        assert strict(answer)["error"]


def test_dashboard_web_the_head_of_what_would_be_answered_can_be_asked_for(make_run: MakeRun) -> None:
    client = client_of(make_run())
    run = ids(client)["demo"]
    for url in ("/api/runs", *endpoints(run, encode_row(1, "train", 0)), f"/api/runs/{run}/events"):
        assert client.head(url).status_code == 200, url
    assert client.head("/api/runs/none/metrics").status_code == 404
    assert client.post("/api/runs").status_code == 405


def test_dashboard_web_a_plan_beside_the_run_is_shown_and_without_one_it_says_how(make_run: MakeRun) -> None:
    path = make_run()
    client = client_of(path)
    run = ids(client)["demo"]
    assert "roll simulate" in client.get(f"/api/runs/{run}/plan").json()["problem"]
    (path / "simulation").mkdir()
    results = {"variants": {"sync": {"step_s": {"mean": 4.0, "half": 0.5}, "speed_up": {"mean": 1.0, "half": 0.0}}}}
    (path / "simulation" / "results.json").write_text(json.dumps(results))
    (path / "plan.txt").write_text("Plan: one engine")
    plan, simulated = client.get(f"/api/runs/{run}/plan").json()["items"]
    assert (plan["kind"], plan["text"]) == ("plan", "Plan: one engine")
    assert simulated["table"]["rows"] == [["sync", 4.0, 0.5, 1.0, 0.0]]
    assert simulated["predicted"] == {"time/step_s": 4.0}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_dashboard_web_hostile_texts_come_as_data(make_run: MakeRun, hostile: str) -> None:
    path = make_run()
    (group,) = [make_group(9, (1.0,))]
    rollout = replace(group.rollouts[0], text=hostile, cause=hostile, engine_id="e")
    prompt = replace(rollout.prompt, messages=(Message(role="user", content=hostile),), answer=hostile)
    group = replace(group, rollouts=(replace(rollout, prompt=prompt),))
    write_rollouts(path / "rollouts" / "step-000004.parquet", 4, [group])
    client = client_of(path)
    (run,) = ids(client).values()
    row = encode_row(4, "train", 0)
    kept = hostile.encode("utf-8", "replace").decode()
    for url in endpoints(run, row):
        answer = client.get(url)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        strict(answer)
    one = strict(client.get(f"/api/runs/{run}/rollouts/{row}"))
    assert (one["text"], one["prompt"], one["messages"][0]["content"]) == (kept, kept, kept)
    (hit,) = strict(client.get(f"/api/runs/{run}/rollouts", params={"q": kept[:8]}))["rows"]
    assert hit["row"] == row


def test_dashboard_web_halves_of_surrogate_pairs_in_any_file_are_shown_as_question_marks(make_run: MakeRun) -> None:
    path = make_run()
    row = {"step": 4, "kind": "train"} | dict.fromkeys(("x/\ud800", "sync/\ud800", "alarm/\ud800", "memory/\ud800"), 3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    event = {"name": "a\ud800", "ph": "X", "ts": 1e9, "dur": 1e6, "args": {"b\ud800": "\ud800"}}
    (path / "trace.json").write_text(f"[\n{json.dumps(event)},\n")
    ledger = {"outcome": "\ud800", "why": "\ud800"}
    (path / "checkpoints" / "step-000003" / "ledger.jsonl").write_text(json.dumps(ledger) + "\n")
    (path / "results.json").write_text(json.dumps({"variants": {"c\ud800": {}}}))
    client = client_of(path)
    (run,) = ids(client).values()
    answers = [client.get(url) for url in endpoints(run, encode_row(1, "train", 0))]
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    together = "".join(answer.text for answer in answers)
    assert all(text in together for text in ('"x/?"', '"a?"', '"b?":"?"', '"?: ?":1', '"c?"'))


@pytest.mark.parametrize("number", [".inf", ".nan", "1e400", "9" * 4000, "0x" + "f" * 5000, "{a: 1}", "yes", "-1"])
def test_dashboard_web_settings_that_are_no_usual_numbers_end_no_page(make_run: MakeRun, number: str) -> None:
    path = make_run()
    (path / "config.yaml").write_text(
        f"training: {{num_steps: {number}}}\nalarms: {{patience: {number}}}\n"
        f"rollout: {{max_new_tokens: {number}, scheduling: {{async_ratio: {number}}}}}\n"
        f"algorithm: {{gate: {{type: min_clip, low: {number}, high: {number}}}}}\n"
    )
    with (path / "metrics.jsonl").open("a") as file:
        figures = {"rollout/staleness_max": 1, "rollout/staleness_mean": 0.5, "rollout/truncated": 0.5}
        file.write(json.dumps({"step": 4, "kind": "train"} | figures) + "\n")
    client = client_of(path)
    (run,) = ids(client).values()
    for url in endpoints(run, encode_row(1, "train", 0)):
        answer = client.get(url)
        assert answer.status_code == 200, (url, answer.text)
        strict(answer)


@pytest.mark.parametrize("depth", [60, 130, 250, 900])
def test_dashboard_web_what_is_nested_deeply_ends_no_page(make_run: MakeRun, depth: int) -> None:
    path = make_run()
    nested = "[" * depth + "]" * depth
    (path / "config_history.yaml").write_text(f"- {nested}\n")
    event = json.dumps({"name": "a", "ph": "X", "ts": 1e9, "dur": 1e6, "args": {"b": "B"}})
    (path / "trace.json").write_text("[\n" + event + ",\n" + event.replace('"B"', nested) + ",\n")
    client = client_of(path)
    (run,) = ids(client).values()
    for url in endpoints(run, encode_row(1, "train", 0)):
        assert client.get(url).status_code == 200, url
    spans = client.get(f"/api/runs/{run}/trace/lanes").json()["spans"]
    assert spans[0]["args"] == {"b": "B"} and len(spans) == (2 if depth < 100 else 1)


def test_dashboard_web_what_is_asked_for_stays_bounded(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run()
    client = client_of(path)
    (run,) = ids(client).values()
    answer = client.get("/api/diff", params={"runs": ",".join([run] * 101)})
    assert (answer.status_code, answer.json()["error"]) == (400, "at most 100 runs can be compared at once, got 101.")
    monkeypatch.setattr("roll.dashboard.rollout_queries._MAX_GROUP_SIZE", 1)
    group = f"/api/runs/{run}/rollouts/{encode_row(1, 'train', 1)}/group"
    assert [one["rollout_id"] for one in client.get(group).json()["rows"]] == ["2.0"]
    monkeypatch.undo()
    monkeypatch.setattr("roll.dashboard.web._MAX_GROUP_CHARACTERS", 10)
    assert [len(one["text"]) for one in client.get(group).json()["rows"]] == [5, 5]
    (path / "calibration").mkdir()
    for number in range(60):
        (path / "calibration" / f"{number:02}.yaml").write_text("x")
    (path / "plan.txt").write_text("x" * (2**20 + 1))
    assert len(client.get(f"/api/runs/{run}/plan").json()["items"]) == 50


@pytest.mark.parametrize("column", ["uid", "answer", "turns", "components", "policy_versions", "token_ids"])
def test_dashboard_web_a_row_with_values_of_another_type_is_refused_with_the_reason(
    make_run: MakeRun, column: str
) -> None:
    path = make_run()
    file = path / "rollouts" / "step-000002.parquet"
    table = pq.read_table(file)
    place = table.schema.get_field_index(column)
    pq.write_table(table.set_column(place, column, pa.array([b"\xff"] * len(table))), file)
    client = client_of(path)
    (run,) = ids(client).values()
    one = f"/api/runs/{run}/rollouts/{encode_row(2, 'train', 0)}"
    answer = client.get(one)
    assert (
        answer.status_code == 404 and "the rollouts in 'step-000002.parquet' cannot be read" in answer.json()["error"]
    )


@pytest.mark.parametrize("column", ["token_ids", "policy_versions", "turns", "branches"])
def test_dashboard_web_a_list_with_entries_left_out_is_refused_with_the_reason(make_run: MakeRun, column: str) -> None:
    path = make_run()
    file = path / "rollouts" / "step-000002.parquet"
    table = pq.read_table(file)
    place = table.schema.get_field_index(column)
    field = table.schema.field(column)
    pq.write_table(table.set_column(place, field, pa.array([[None]] * len(table), field.type)), file)
    client = client_of(path)
    (run,) = ids(client).values()
    answer = client.get(f"/api/runs/{run}/rollouts/{encode_row(2, 'train', 0)}")
    assert (answer.status_code, answer.json()["error"]) == (
        404,
        f"the column '{column}' has lists with missing entries: the file was not written by a run.",
    )


def test_dashboard_web_failures_are_of_the_step_of_their_file_whatever_stands_in_it(make_run: MakeRun) -> None:
    path = make_run()
    file = path / "rollouts" / "step-000002.parquet"
    table = pq.read_table(file)
    pq.write_table(table.set_column(0, "step", pa.array(["x"] * len(table))), file)
    client = client_of(path)
    (run,) = ids(client).values()
    (failure,) = strict(client.get(f"/api/runs/{run}/health"))["failures"]
    assert (failure["count"], failure["first_step"], failure["last_step"]) == (3, 1, 3)


def test_dashboard_web_hostile_names_of_runs_are_only_names(make_run: MakeRun, tmp_path: Path) -> None:
    names = ["<img src=x onerror=alert(1)>", "a\nb", "x..;", "'; DROP TABLE runs", "%2e%2e%2fetc", "\u202e", " "]
    source = make_run()
    for name in names:
        shutil.copytree(source, tmp_path / "hostile" / name)
    raw = os.path.join(os.fsencode(tmp_path / "hostile"), b"\xff\xfe")
    shutil.copytree(os.fsencode(source), raw)
    client = client_of(tmp_path / "hostile")
    runs = ids(client)
    assert set(names) <= set(runs) and len(runs) == len(names) + 1
    for name, run in runs.items():
        assert run.isalnum()
        assert client.get(f"/api/runs/{run}/facets").status_code == 200, name


def test_dashboard_web_nothing_outside_the_given_directories_is_read(make_run: MakeRun, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "trace.json", "plan.txt", "results.json", "tokenizer.json", "x.log"):
        (secret / name).write_text(f"name: {SECRET}\n")
    other = make_run("other")
    path = make_run("run")
    for name in ("config.yaml", "metrics.jsonl", "trace.json"):
        (path / name).unlink()
        (path / name).symlink_to(secret / name)
    for name in ("plan.txt", "results.json", "tokenizer.json"):
        (path / name).symlink_to(secret / name)
    for name, target in (("logs", secret), ("rollouts", other / "rollouts"), ("checkpoints", secret)):
        shutil.rmtree(path / name)
        (path / name).symlink_to(target)
    (tmp_path / "runs" / "linked").symlink_to(other)
    shutil.rmtree(other)
    client = client_of(tmp_path / "runs")
    assert set(ids(client)) == {"runs"}, "a directory of links is no run"
    run = Run(path, "run", Vocabularies()).id
    direct = client_of(path)
    urls = ["/api/runs", *endpoints(run, encode_row(1, "train", 0))]
    for url in (
        "/static/../web.py",
        "/static/%2e%2e/web.py",
        "/static/..%2fweb.py",
        "/static//etc/passwd",
        "/../../etc/passwd",
    ):
        assert direct.get(url).status_code == 404
    for url in urls:
        assert SECRET not in direct.get(url).text, url


def test_dashboard_web_a_path_that_is_not_there_is_listed_with_its_problem(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    client = client_of(tmp_path / "none", tmp_path / "empty", tmp_path / "file")
    found = strict(client.get("/api/runs"))
    assert [(run["name"], run["status"]) for run in found] == [(n, "unreadable") for n in ("none", "empty", "file")]
    assert all(run["problem"] for run in found)
    for run in found:
        for url in endpoints(run["id"], 0):
            assert client.get(url).status_code in (200, 404)


@pytest.mark.parametrize("num", [25, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.integration
def test_dashboard_web_malformed_directories_are_shown_or_refused(make_run: MakeRun, tmp_path: Path, num: int) -> None:
    source = make_run()
    (tmp_path / "secret").write_text(SECRET)
    rng = random.Random(0)
    for number in range(num):
        path = tmp_path / "bad" / f"{number:03}"
        shutil.copytree(source, path)
        for _ in range(rng.randint(1, 3)):
            spoil(path, rng, tmp_path / "secret")
    with client_of(tmp_path / "bad") as client:  # one event loop for all requests
        found = strict(client.get("/api/runs"))
        assert len(found) > 0.8 * num
        row = encode_row(rng.randint(1, 3), "train", 0)
        for run in found:
            for url in endpoints(run["id"], row):
                _is_refused_or_shown(client, url, run["name"])


def _is_refused_or_shown(client: TestClient, url: str, name: str) -> None:
    answer = client.get(url)
    assert answer.status_code in (200, 404), (name, url, answer.text)
    assert SECRET not in answer.text, (name, url)
    found = strict(answer)
    assert answer.status_code == 200 or found["error"]
