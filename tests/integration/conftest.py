"""What holds of every run that a test makes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.config.former_names import rename_metric
from roll.tracking.metric_meanings import find_meaning


@pytest.fixture(autouse=True)
def every_metric_is_documented(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Each name in each metrics.jsonl below the test's directory is in docs/metrics.md."""
    yield
    current = rename_metric if request.path.name == "test_older_runs.py" else str
    names = {
        current(name)
        for path in tmp_path.rglob("metrics.jsonl")
        for line in path.read_text().splitlines()
        if line.endswith("}")  # a test may have corrupted the file
        for name in json.loads(line)
    } - {"step", "kind"}
    of_tests = {name for name in names if name.startswith("training/own/")}  # of losses that tests define
    assert sorted(name for name in names - of_tests if find_meaning(name) is None) == [], (
        "add them to src/roll/tracking/metrics.yaml"
    )
