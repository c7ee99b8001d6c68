"""The index of rollouts, and questions to it. Of the runs of `make_run`, every number is known by hand."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from unit.dashboard.conftest import client_of, ids
from unit.tracking.conftest import make_group

from roll.dashboard.rollouts import Rollouts, decode_row, encode_row
from roll.tracking.reading.files import SafeDirectory
from roll.tracking.rollout_table import TOKEN_COLUMNS, write_rollouts

MakeRun = Callable[..., Path]
LATER_COLUMNS = [*TOKEN_COLUMNS, "turns", "num_tokens", "num_turns", "oldest_version"]
"""That files of earlier versions do not have."""


def ask(path: Path, **query: Any) -> dict[str, Any]:
    client = client_of(path)
    (run,) = ids(client).values()
    answer = client.get(f"/api/runs/{run}/rollouts", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def shown(answer: dict[str, Any]) -> list[str]:
    return [f"{row['kind']} {row['rollout_id']}" for row in answer["rows"]]


def index_of(path: Path) -> Rollouts:
    index = Rollouts(SafeDirectory(path), lambda step: step - 1.0)
    for name, stamp in index.list_pending():
        index.add(name, stamp)
    return index


def test_dashboard_rollouts_a_row_says_where_its_rollout_lies() -> None:
    for step, kind, place in ((0, "eval", 3), (7, "train", 0), (999_999_999, "eval", 2**20 - 1)):
        row = encode_row(step, kind, place)
        assert row < 2**53
        assert decode_row(row) == (f"{'eval-' if kind == 'eval' else ''}step-{step:06d}.parquet", place)


def test_dashboard_rollouts_every_rollout_is_a_row_with_what_the_run_recorded(make_run: MakeRun) -> None:
    answer = ask(make_run(), sort="row")
    assert (answer["total"], answer["matching"]) == (14, 14)
    assert answer["rows"][2] == {
        "row": encode_row(1, "train", 0), "kind": "train", "step": 1, "rollout_id": "2.0", "draw_id": 2, "index": 0,
        "domain": "arithmetic", "reward": 1, "correct": True, "verdict": "correct", "status": "completed",
        "finish_reason": "stop", "num_tokens": 3, "num_turns": 1, "staleness": -2, "policy_version": 2, "advantage": -1,
        "engine_id": "engine-0", "prompt": "2 + 1 =", "text": "The answer is 2.",
    }  # fmt: skip
    failed = answer["rows"][5]
    assert (failed["status"], failed["reward"], failed["correct"]) == ("infra_error", None, None)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"kind": "eval"}, ["eval 0.0", "eval 0.1"]),
        ({"step_min": 2, "step_max": 2}, ["train 4.0", "train 4.1", "train 5.0", "train 5.1"]),
        ({"reward_min": 0.5, "reward_max": 0.9}, ["train 3.0", "train 5.0", "train 7.0"]),
        ({"status": "infra_error"}, ["train 3.1", "train 5.1", "train 7.1"]),
        ({"status": "no such"}, []),
        ({"verdict": "wrong", "kind": "train"}, ["train 2.1", "train 4.1", "train 6.1"]),
        ({"correct": "false", "step_min": 3}, ["train 6.1", "train 7.0"]),
        ({"draw_id": 5}, ["train 5.0", "train 5.1"]),
        ({"tokens_min": 4}, []),
        ({"staleness_min": -3, "kind": "train", "correct": "true"}, ["train 2.0", "train 4.0"]),
        ({"sort": "reward", "desc": 1, "limit": 2, "offset": 1}, ["train 2.0", "train 4.0"]),
        ({"sort": "reward", "limit": 2}, ["eval 0.1", "train 2.1"]),
        ({"sort": "reward", "offset": 11}, ["train 3.1", "train 5.1", "train 7.1"]),
        ({"sort": "reward", "desc": 1, "offset": 11}, ["train 3.1", "train 5.1", "train 7.1"]),
        ({"sort": "status", "desc": 1, "limit": 1}, ["train 3.1"]),
    ],
)
def test_dashboard_rollouts_are_filtered_and_sorted(
    make_run: MakeRun, query: dict[str, Any], expected: list[str]
) -> None:
    answer = ask(make_run(), **query)
    assert shown(answer) == expected
    if "limit" not in query and "offset" not in query:
        assert answer["matching"] == len(expected)


@pytest.mark.parametrize("missing", [0.1, 0.97])
def test_dashboard_rollouts_a_page_is_what_sorting_everything_gives(tmp_path: Path, missing: float) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "rollouts").mkdir()
    rewards: list[float | None] = [None if rng.random() < missing else float(rng.integers(5)) for _ in range(400)]
    groups = [make_group(draw, tuple(rewards[4 * draw : 4 * draw + 4])) for draw in range(100)]
    write_rollouts(tmp_path / "rollouts" / "step-000001.parquet", 1, groups)
    known = [i for i, reward in enumerate(rewards) if reward is not None]
    unknown = [i for i, reward in enumerate(rewards) if reward is None]
    for desc in (0, 1):
        order = sorted(known, key=lambda i: ((rewards[i] or 0) * (-1 if desc else 1), i)) + unknown
        for offset in (0, 30, 395):
            found = ask(tmp_path, sort="reward", desc=desc, offset=offset, limit=20)
            assert [decode_row(row["row"])[1] for row in found["rows"]] == order[offset : offset + 20]


def test_dashboard_rollouts_a_text_is_searched_for_in_slices_that_go_on(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.dashboard.rollout_queries._MAX_SEARCH_S", 0.0)  # one file a time
    monkeypatch.setattr("roll.dashboard.rollout_queries.search_texts.__defaults__", (0.0,))
    path, found, cursor, searched = make_run(), [], "", []
    while True:
        answer = ask(path, q="ANSWER is 7", kind="train", cursor=cursor)
        found += shown(answer)
        searched.append(answer["searched"])
        if answer["complete"]:
            break
        cursor = answer["cursor"]
    assert found == ["train 6.1", "train 7.0"]
    assert searched == [4, 8, 12]
    assert ask(path, q="no such text", kind="eval")["rows"] == []


def test_dashboard_rollouts_a_search_with_very_many_hits_goes_on_behind_the_last_one(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.dashboard.rollout_queries._MAX_HITS", 1)
    path, found, cursor = make_run(), [], ""
    while cursor is not None:
        answer = ask(path, q="answer", kind="eval", cursor=cursor)
        assert len(answer["rows"]) <= 1
        found += shown(answer)
        cursor = answer["cursor"]
    assert found == ["eval 0.0", "eval 0.1"]


def test_dashboard_rollouts_a_group_is_of_one_step_and_kind_whatever_draws_are_called(make_run: MakeRun) -> None:
    path = make_run()
    for name in ("step-000002", "eval-step-000001"):
        shutil.copy(path / "rollouts" / "step-000001.parquet", path / "rollouts" / f"{name}.parquet")
    client = client_of(path)
    (run,) = ids(client).values()
    for row in (encode_row(1, "train", 0), encode_row(1, "eval", 0), encode_row(2, "train", 0)):
        found = client.get(f"/api/runs/{run}/rollouts/{row}/group").json()["rows"]
        assert [one["row"] for one in found] == [row, row + 1]


def test_dashboard_rollouts_a_text_is_found_in_every_row_group(make_run: MakeRun) -> None:
    path = make_run()
    file = path / "rollouts" / "step-000002.parquet"
    pq.write_table(pq.read_table(file), file, row_group_size=1)
    before = ask(path, q="answer", kind="train", step_min=2, step_max=2)
    assert [row["row"] for row in before["rows"]] == [encode_row(2, "train", place) for place in range(4)]


def test_dashboard_rollouts_a_file_that_could_not_be_read_is_read_once_it_was_replaced(make_run: MakeRun) -> None:
    path = make_run()
    file = path / "rollouts" / "step-000002.parquet"
    good = file.read_bytes()
    file.write_bytes(b"PAR1")
    client = client_of(path)
    (run,) = ids(client).values()
    first = client.get(f"/api/runs/{run}/rollouts").json()
    file.unlink()
    file.write_bytes(good)
    second = client.get(f"/api/runs/{run}/rollouts").json()
    assert (first["total"], len(first["problems"])) == (10, 1)
    assert (second["total"], "problems" in second) == (14, False)


def test_dashboard_rollouts_facets_count_labels_and_know_how_far_numbers_reach(make_run: MakeRun) -> None:
    client = client_of(make_run())
    (run,) = ids(client).values()
    found = client.get(f"/api/runs/{run}/facets").json()
    assert found["status"] == [{"value": "completed", "count": 11}, {"value": "infra_error", "count": 3}]
    assert found["kind"] == [{"value": "train", "count": 12}, {"value": "eval", "count": 2}]
    assert found["step"] == {"min": 0, "max": 3}
    assert found["reward"] == {"min": 0, "max": 1}


def test_dashboard_rollouts_new_files_are_added_and_those_of_a_resume_replaced(make_run: MakeRun) -> None:
    path = make_run()
    index = index_of(path)
    write_rollouts(path / "rollouts" / "step-000004.parquet", 4, [make_group(8)])
    assert [name for name, _ in index.list_pending()] == ["step-000004.parquet"]
    for name, stamp in index.list_pending():
        index.add(name, stamp)
    assert len(index) == 16
    (path / "rollouts" / "step-000003.parquet").unlink()
    write_rollouts(path / "rollouts" / "step-000002.parquet", 2, [make_group(40, (0.25,))])
    for name, stamp in index.list_pending():
        index.add(name, stamp)
    assert len(index) == 2 + 4 + 1 + 2
    at = index.find_position(encode_row(2, "train", 0))
    assert index.get_column("reward")[at] == 0.25
    assert index.read_previews([encode_row(2, "train", 0)]) == [("40 + 1 =", "The answer is 40.")]
    with pytest.raises(KeyError):
        index.find_position(encode_row(3, "train", 0))


def test_dashboard_rollouts_files_of_earlier_versions_are_read_through_their_lists(
    make_run: MakeRun, tmp_path: Path
) -> None:
    path = make_run()
    now = ask(path)
    for file in (path / "rollouts").iterdir():
        table = pq.read_table(file).drop_columns(LATER_COLUMNS)
        pq.write_table(table, tmp_path / "new")
        os.replace(tmp_path / "new", file)
    assert ask(path) == now


def test_dashboard_rollouts_a_file_that_cannot_be_read_is_a_problem_and_the_others_are_shown(make_run: MakeRun) -> None:
    path = make_run()
    (path / "rollouts" / "step-000002.parquet").write_bytes(b"PAR1 no PAR1")
    (path / "rollouts" / "step-000003.parquet").unlink()
    (path / "rollouts" / "step-000003.parquet").symlink_to(path / "rollouts" / "step-000001.parquet")
    answer = ask(path)
    assert answer["total"] == 6
    assert len(answer["problems"]) == 1 and "step-000002" in answer["problems"][0]


def test_dashboard_rollouts_a_group_is_shown_with_its_whole_texts(make_run: MakeRun) -> None:
    path = make_run()
    client = client_of(path)
    (run,) = ids(client).values()
    rows = client.get(f"/api/runs/{run}/rollouts/{encode_row(2, 'train', 3)}/group").json()["rows"]
    assert [(row["rollout_id"], row["text"]) for row in rows] == [
        ("5.0", "The answer is 5."), ("5.1", "The answer is 6."),
    ]  # fmt: skip
