"""`roll init`, and completion in shells."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from roll.cli.init import shipped_examples
from roll.cli.main import run

ROLL = [sys.executable, "-c", "from roll.cli import main; main()"]


def test_the_examples_are_written_where_the_documentation_finds_them(tmp_path, capsys, monkeypatch):
    assert run(["init", str(tmp_path / "work")]) == 0
    said = capsys.readouterr().out
    assert f"cd {tmp_path / 'work'}" in said and "roll train examples/quickstart.yaml" in said
    source = shipped_examples()
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert (tmp_path / "work" / "examples" / path.relative_to(source)).read_bytes() == path.read_bytes()
    assert run(["init", str(tmp_path / "work")]) == 0, "written again, nothing differs"


def test_a_file_that_the_user_changed_is_never_overwritten(tmp_path, capsys):
    mine = tmp_path / "examples" / "sft.yaml"
    mine.parent.mkdir()
    mine.write_text("name: mine\n")
    assert run(["init", str(tmp_path)]) == 2
    assert "1 of " in (said := capsys.readouterr().err) and "'sft.yaml'" in said
    assert mine.read_text() == "name: mine\n"
    assert sorted(path.name for path in mine.parent.iterdir()) == ["sft.yaml"], "nothing was written"


def test_a_directory_that_is_a_file_is_a_message(tmp_path, capsys):
    (tmp_path / "work").write_text("")
    assert run(["init", str(tmp_path / "work")]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_is_given_a_script_that_completes(shell):
    done = subprocess.run(
        ROLL, env={**os.environ, "_ROLL_COMPLETE": f"{shell}_source"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and f"_ROLL_COMPLETE={shell}_complete" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("roll do", ["doctor"]),
        ("roll config e", ["explain"]),
        ("roll doctor --p", ["--peer"]),
        ("roll env li", ["list"]),
    ],
)
def test_commands_and_options_are_completed(words, completed):
    environment = {
        **os.environ,
        "_ROLL_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = subprocess.run(ROLL, env=environment, capture_output=True, text=True, timeout=60)
    assert [line.partition(",")[2] for line in done.stdout.split()] == completed, done.stderr


@pytest.mark.parametrize(("words", "completed"), [("roll train ex", "file,ex"), ("roll resume ru", "dir,ru")])
def test_configurations_and_runs_are_completed_as_paths(words, completed):
    environment = {**os.environ, "_ROLL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "2"}
    done = subprocess.run(ROLL, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [completed], done.stderr
