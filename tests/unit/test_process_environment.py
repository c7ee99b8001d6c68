"""The process environment that a run wants."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from roll.errors import ConfigError
from roll.process_environment import find_socket_directory, override_environment, prepare_environment

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_PROGRESS_BARS")


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    """Whatever a test sets is undone after it."""
    for name in (*NAMES, "HF_DATASETS_DISABLE_PROGRESS_BARS", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
        monkeypatch.setenv(name, "to be removed")
        monkeypatch.delenv(name)


def test_process_environment_what_is_not_set_is_set_for_this_process_and_its_children():
    prepare_environment()
    program = f"import os; print(*[os.environ.get(name) for name in {NAMES!r}])"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert child.stdout.split() == ["passive", "10000", "false", "1"]


def test_process_environment_what_the_user_has_set_is_left_alone(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    prepare_environment()
    assert (os.environ["TOKENIZERS_PARALLELISM"], os.environ["OMP_WAIT_POLICY"]) == ("true", "active")
    assert "GOMP_SPINCOUNT" not in os.environ  # it would bound the spinning that was asked for


def test_process_environment_a_variable_that_comes_too_late_is_said(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", sys))
    with caplog.at_level(logging.WARNING):
        prepare_environment()
    assert "has no effect in this process" in caplog.text


def test_process_environment_temporary_variables_go_and_those_from_before_come_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLL_TEST_KEPT", "before")
    with pytest.raises(KeyError), override_environment({"ROLL_TEST_KEPT": "inside", "ROLL_TEST_NEW": "inside"}):
        assert os.environ["ROLL_TEST_KEPT"] == os.environ["ROLL_TEST_NEW"] == "inside"
        raise KeyError
    assert os.environ["ROLL_TEST_KEPT"] == "before" and "ROLL_TEST_NEW" not in os.environ


def test_process_environment_sockets_go_where_their_paths_are_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert find_socket_directory(relative_length=103 - 1 - len(str(tmp_path))) == str(tmp_path)
    long = tmp_path / ("d" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert find_socket_directory(relative_length=10) == "/tmp"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"has \d+ bytes.*set TMPDIR to a directory with a shorter path"):
        find_socket_directory(relative_length=10)
