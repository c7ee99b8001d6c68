"""Tests that two separate sandboxes cannot run are named before training; the rest are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit.rewards.code.test_right_answers import CASES

from roll.config.pipelines.rlvr import RLVRConfig
from roll.config.sandbox import SandboxConfig
from roll.preflight.rewards import describe_bad_tests
from roll.rewards.code.tasks import parse_task
from roll.rewards.code.unsupported_tests import describe_unsupported, find_importable_modules

PACKAGES = frozenset({"pytest", "_pytest", "numpy"})


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ("import pandas as pd\nassert f(pd.DataFrame()) == 1", "imports 'pandas'"),
        ("from solution import f\ndef test_f(tmp_path): assert f(tmp_path)", "cannot open the files"),
        (
            "from solution import f\ndef test_f(monkeypatch):\n  monkeypatch.setattr('solution.g', 1)\n  assert f()",
            "solution.g",
        ),
        (
            "import solution\ndef test_f(monkeypatch):\n  monkeypatch.setattr(solution, 'g', 1)\n  assert solution.f()",
            "solution.g",
        ),
        ("from unittest.mock import patch\nwith patch('time.sleep'):\n  assert f()", "replaces 'time.sleep'"),
        ("class Dog(Animal):\n  pass\nassert Dog().legs == 4", "derives a class from 'Animal'"),
        ("from solution import *\nclass Dog(Animal):\n  pass\nassert Dog().legs == 4", "derives a class from 'Animal'"),
        ("import inspect\nassert 'for' not in inspect.getsource(f)", "inspects the code"),
    ],
)
def test_code_reward_judgeable_what_cannot_be_judged_is_named(tests: str, words: str) -> None:
    assert words in describe_unsupported(parse_task(tests), PACKAGES)


def test_code_reward_judgeable_what_can_be_judged_is_not_named() -> None:
    for tests, _, _ in CASES.values():
        assert describe_unsupported(parse_task(tests), PACKAGES) == ""
    for tests in (
        "import numpy as np\nassert np.allclose(f(), [1])",
        "from enum import Enum\nclass E(Enum):\n  A = 1\nassert f(E.A.value) == 1",
        "class A:\n  pass\nclass B(A):\n  pass\nassert f() == 1",
        "from collections import *\nclass B(OrderedDict):\n  pass\nassert f() == 1",
        "from collections import namedtuple as n\nP = n('P', 'x')\nclass B(P, dict):\n  pass\nassert f() == 1",
        "import unittest\nclass TestF(unittest.TestCase):\n  def test_f(self): self.assertEqual(f(1), 1)",
        "import unittest.mock as mock\nwith mock.patch('builtins.input', return_value='1'):\n  assert f() == 1",
    ):
        assert describe_unsupported(parse_task(tests), PACKAGES) == "", tests
    assert describe_unsupported(parse_task("import pandas\nassert f() == 1"), None) == ""  # only the image knows


def test_code_reward_judgeable_installed_packages_may_be_imported() -> None:
    assert {"numpy", "pytest"} <= (find_importable_modules(SandboxConfig(packages=["numpy"])) or set())
    assert find_importable_modules(SandboxConfig(runtime="docker")) is None


def test_code_reward_judgeable_roll_check_counts_the_prompts_and_names_the_first(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "tests": "assert f(1) == 1"},
        {"prompt": "b", "tests": "import pandas\nassert f(1) == 1"},
        {"prompt": "c", "tests": "x = 1"},
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    source = {"source": "file", "path": str(path), "prompt_key": "prompt", "answer_key": None}
    source |= {"reward": [{"type": "code"}], "held_out": 0}
    settings = {"name": "x", "model": {"path": "tiny"}, "training": {"num_steps": 1}, "data": [source]}
    config = RLVRConfig.model_validate(settings)
    (note,) = describe_bad_tests(config.data, config.sandbox, config.seed)
    assert "the tests of 2 of 3 prompts" in note and "case 0 imports 'pandas'" in note
