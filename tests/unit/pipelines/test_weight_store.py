"""The record of a weight store's sessions in the run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from roll.config.load import load_config
from roll.config.rollout_run import RolloutRunConfig
from roll.pipelines.weight_store import SESSION_FILE, open_weight_store


def open_store(tmp_path: Path) -> Any:
    config = load_config(
        {
            "pipeline": "rlvr",
            "name": "run",
            "model": "tiny",
            "data": [{"source": "arithmetic", "reward": "math"}],
            "training": {"num_steps": 1},
            "weight_sync": {"transport": "store", "store": str(tmp_path / "store")},
        }
    )
    return open_weight_store(cast(RolloutRunConfig, config), tmp_path)


def test_weight_store_next_session_deletes_the_one_before(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    assert first.previous_session == ""
    second = open_store(tmp_path)
    assert second.previous_session == first.session != second.session


@pytest.mark.parametrize("session", ["..", "", "../other-0123abcd", "/etc", 5, None, "run", ["run-0123abcd"]])
def test_weight_store_never_deletes_a_directory_that_is_no_session(tmp_path: Path, session: Any) -> None:
    open_store(tmp_path)
    record = tmp_path / SESSION_FILE
    record.write_text(json.dumps({**json.loads(record.read_text()), "session": session}))
    assert open_store(tmp_path).previous_session == ""


@pytest.mark.parametrize("content", [b"", b'{"url": ', b"[]", b"null", b"\xff\xfe", b"{}"])
def test_weight_store_damaged_record_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SESSION_FILE).write_bytes(content)
    store = open_store(tmp_path)
    assert store.previous_session == ""
    assert open_store(tmp_path).previous_session == store.session
