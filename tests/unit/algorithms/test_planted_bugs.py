"""`make mutation NAME=algorithms` can plant each of its bugs: its place in the code is there, once, and its tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import roll

ROOT = Path(__file__).parents[3]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutation_algorithms", ROOT / "benchmarks" / "mutation_algorithms.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SCRIPT = script()


@pytest.mark.parametrize("bug", SCRIPT.BUGS, ids=lambda bug: bug.what)
def test_mutation_planted_bug_has_its_place_and_its_tests(bug: Any) -> None:
    text = (Path(roll.__file__).parent / bug.file).read_text()
    assert text.count(bug.old) == 1
    assert bug.new != bug.old
    compile(text.replace(bug.old, bug.new), bug.file, "exec")
    for test in bug.tests.split():
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / "tests" / "unit" / path).read_text()


def test_mutation_planted_bugs_are_chosen_by_number_and_by_text() -> None:
    assert len(SCRIPT.chosen([])) == len(SCRIPT.BUGS) == len({bug.what for bug in SCRIPT.BUGS})
    assert [number for number, _ in SCRIPT.chosen(["2"])] == [2]
    assert {bug.file for _, bug in SCRIPT.chosen(["answer_selection.py"])} == {"algorithms/answer_selection.py"}
    assert SCRIPT.chosen(["999", "no such text"]) == []
