"""`make mutation NAME=scheduler` can plant each of its bugs: its place in the code is there, once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import roll

ROOT = Path(__file__).parents[3]


def planted() -> list[Any]:
    spec = importlib.util.spec_from_file_location("_scheduler_bugs", ROOT / "benchmarks" / "_scheduler_bugs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return list(module.BUGS)


@pytest.mark.parametrize("bug", planted(), ids=lambda bug: bug.what)
def test_mutation_a_planted_bug_has_its_place(bug: Any) -> None:
    text = (Path(roll.__file__).parent / bug.package / bug.file).read_text()
    assert text.count(bug.old) == 1
    assert bug.new != bug.old
