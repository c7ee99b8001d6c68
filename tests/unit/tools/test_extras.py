"""Environments of `make test-extras`: built once, again when their list changes, named where they cannot be built."""

import subprocess
from pathlib import Path

import extras
import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one environment, of npm, and a program `npm` that installs nothing."""
    lists = tmp_path / "requirements" / "extras"
    lists.mkdir(parents=True)
    (lists / "one.json").write_text('{"dependencies": {}}')
    return tmp_path


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "programs" / "npm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nmkdir -p node_modules/.bin\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return program


def test_extras_are_built_once_and_again_when_their_list_changes(root: Path, npm: Path):
    assert extras.names(root) == ["one"]
    assert "is not built" in str(extras.missing("one", root))
    assert extras.build("one", root) is None
    assert extras.missing("one", root) is None
    assert (extras.directory("one", root) / "node_modules" / ".bin").is_dir()
    (root / "requirements" / "extras" / "one.json").write_text('{"dependencies": {"new": "1.0.0"}}')
    assert "is older than its list" in str(extras.missing("one", root))


def test_extras_that_cannot_be_built_say_why_and_stay_missing(root: Path, npm: Path):
    npm.write_text("#!/bin/sh\nexit 3\n")
    assert "failed with 3" in str(extras.build("one", root))
    assert "is not built" in str(extras.missing("one", root))


def test_extras_without_a_file_are_missing(root: Path):
    assert "there is no requirements/extras/two.txt" in str(extras.missing("two", root))


def test_extras_of_python_install_pytorch_as_setup_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "setup.stamp").write_text("HASH 0\nTORCH torch==2.13.0 --index-url https://wheels.example/cpu\n")
    monkeypatch.setattr(extras.sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    (file := tmp_path / "some.txt").write_text("# a list\ntorch==2.13.0\nsafetensors==0.8.0\n")
    _, pytorch, rest = extras._commands([file], tmp_path / "target")
    assert pytorch[-3:] == ["torch==2.13.0", "--index-url", "https://wheels.example/cpu"]
    assert rest[-2:] == ["-r", str(file)]


def test_extras_may_ask_for_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    python = tmp_path / "versions" / "3.99.1" / "bin" / "python3.99"
    (file := tmp_path / "some.txt").write_text("# a list\n# python: 3.99\nsafetensors==0.8.0\n")
    assert extras._python(file) == "python3.99"  # which uv reports as missing
    python.parent.mkdir(parents=True)
    python.touch()
    assert extras._python(file) == str(python)
    file.write_text("# a list\nsafetensors==0.8.0\n")
    assert extras._python(file) == extras.sys.executable


def test_extras_unknown_to_the_command_are_refused():
    done = subprocess.run(
        [extras.sys.executable, extras.__file__, "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "'nothing' has no file in requirements/extras" in done.stderr


def test_extras_on_top_of_rolls_own_environment_install_nothing_else(tmp_path: Path):
    (file := tmp_path / "some.txt").write_text("# on top of .venv\nsafetensors==0.8.0\n")
    _, below, rest = extras._commands([file], tmp_path / "target")
    assert below[-1].startswith("import site; site.addsitedir(") and below[-2].endswith("site-packages/below.pth")
    assert "--no-deps" in rest
