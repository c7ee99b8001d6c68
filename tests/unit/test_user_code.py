"""Users' own functions: how they are imported beside the library's modules, and what their source is."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from pathlib import Path

import pytest

from roll.errors import ConfigError
from roll.user_code import (
    START_DIRECTORY_VARIABLE,
    check_call,
    compute_code_fingerprint,
    find_source_files,
    load_function,
)


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test imports, and where it looked, is forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def write(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text)
    return directory


def test_user_code_imports_files_of_its_own_directory(tmp_path: Path) -> None:
    write(tmp_path / "mine", rewards_a="from words_a import GOOD\ndef score(): return GOOD\n", words_a="GOOD = 7\n")
    assert load_function(str(tmp_path / "mine" / "rewards_a.py") + ":score", "reward function")() == 7


def test_user_code_imports_modules_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(
        write(tmp_path, rewards_b="import words_b\ndef score(): return words_b.GOOD\n", words_b="GOOD = 8")
    )
    assert load_function("rewards_b:score", "reward function")() == 8


@pytest.mark.parametrize("path", ["rewards_g.py:score", "rewards_g:score"])
def test_user_code_is_found_where_the_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """As in a worker of Ray, whose own directory is another."""
    monkeypatch.chdir(write(tmp_path / "elsewhere"))
    monkeypatch.setenv(START_DIRECTORY_VARIABLE, str(write(tmp_path / "home", rewards_g="def score(): return 9\n")))
    assert load_function(path, "reward function")() == 9


def test_user_code_of_the_same_relative_path_is_loaded_anew_in_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (1, 2):
        monkeypatch.chdir(write(tmp_path / str(value), rewards_c=f"def score(): return {value}\n"))
        assert load_function("rewards_c.py:score", "reward function")() == value


@pytest.mark.parametrize("name", ["random", "tokenizers", "graphlib"])  # imported already, installed, not imported yet
def test_user_code_never_shadows_a_module_of_python_or_of_a_package(tmp_path: Path, name: str) -> None:
    """In a process of its own, which imports the module only after the user's function was loaded."""
    write(tmp_path, **{name: "raise SystemExit('shadowed')\n"}, rewards="def score(): return 1\n")
    program = (
        "from roll.user_code import load_function\n"
        f"load_function('rewards.py:score', 'reward function')\nimport {name}\nprint({name}.__file__)\n"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert str(tmp_path) not in found.stdout


def test_user_code_is_told_which_module_a_name_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, rewards_d="import random\ndef score(): return random\n", random="")
    with caplog.at_level(logging.WARNING):
        assert load_function(f"{tmp_path}/rewards_d.py:score", "reward function")() is random
    assert f"and not '{tmp_path / 'random.py'}'" in caplog.text and "rename it" in caplog.text


def test_user_code_of_two_directories_with_neighbors_of_one_name_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for side in ("one", "two"):
        write(tmp_path / side, rewards_e="import words_e\ndef score(): return 1\n", words_e="")
        load_function(f"{tmp_path / side}/rewards_e.py:score", "reward function")
    assert f"'{tmp_path}/one/words_e.py' and not '{tmp_path}/two/words_e.py'" in caplog.text


def test_user_code_that_fails_names_its_line(tmp_path: Path) -> None:
    write(tmp_path, rewards_f="import words_f\n", words_f="1 / 0\n")
    with pytest.raises(ConfigError, match=r"words_f\.py:1\): ZeroDivisionError"):
        load_function(f"{tmp_path}/rewards_f.py:score", "reward function")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class Own(BaseException): pass\nraise Own('a b')", r"\.py:2\): Own: a b$"),
        ("raise ValueError('two\\nlines' + 'x' * 9999)", r"\.py:1\): ValueError: two linesx{480,500}\.\.\.$"),
        ("class Own(Exception):\n    __str__ = None\nraise Own", r"\.py:3\): Own: its message cannot be formatted$"),
        ("\n\ndef (:", r"rewards_h\.py:3\): SyntaxError: invalid syntax"),
    ],
)
def test_user_code_that_cannot_be_imported_is_named_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path, rewards_h=text)
    with pytest.raises(ConfigError, match=words):
        load_function(f"{tmp_path}/rewards_h.py:score", "loss")


def test_user_code_behind_links_in_a_circle_is_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "circle.py").symlink_to("circle.py")
    with pytest.raises(ConfigError, match=r"loss: file '.*circle\.py' does not exist"):
        load_function(f"{tmp_path}/circle.py:loss", "loss")
    assert compute_code_fingerprint([f"{tmp_path}/circle.py:loss"]) == {}


def test_user_code_that_leaves_the_current_directory_is_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(write(tmp_path, leaves_i="import os\nos.chdir('/')\ndef score(): return 1\n"))
    assert load_function("leaves_i.py:score", "loss")() == 1
    assert Path.cwd() == tmp_path and "'leaves_i.py:score' changes the current directory" in caplog.text


def test_user_code_of_two_files_of_one_name_is_told_apart(tmp_path: Path) -> None:
    made = [
        load_function(f"{write(tmp_path / side, twin_j='class Kept: pass')}/twin_j.py:Kept", "engine")()
        for side in ("one", "two")
    ]
    assert all(sys.modules[type(each).__module__].Kept is type(each) for each in made)  # as pickles look it up


def test_user_code_that_takes_other_arguments_is_refused() -> None:
    check_call(lambda inputs, scale=1.0: None, "loss 'mine.py:loss'", "inputs")
    with pytest.raises(ConfigError) as caught:
        check_call(lambda: None, "loss 'mine.py:loss'", "inputs")
    assert str(caught.value) == (
        "loss 'mine.py:loss' is called with (inputs), which () does not accept: too many positional arguments."
    )


def test_user_code_fingerprint_follows_local_imports_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, rewards="import json, one\nfrom package import two\ndef score(): pass\n", one="import three\n")
    write(tmp_path / "package", __init__="", two="from . import four\nfrom .five import a\n", four="", five="a = 1\n")
    write(tmp_path, three="", json="", unrelated="")
    names = {str(file.relative_to(tmp_path)) for file in find_source_files("rewards.py:score")}
    package = {"package/__init__.py", "package/two.py", "package/four.py", "package/five.py"}
    assert names == {"rewards.py", "one.py", "three.py"} | package

    before = compute_code_fingerprint(["rewards.py:score"])
    assert before == compute_code_fingerprint(["rewards.py:score"])
    (tmp_path / "unrelated.py").write_text("changed")
    assert compute_code_fingerprint(["rewards.py:score"]) == before
    for changed in ("rewards", "three", "package/five"):
        file = tmp_path / f"{changed}.py"
        content = file.read_text()
        file.write_text(content + "changed = 1\n")
        assert compute_code_fingerprint(["rewards.py:score"]) != before
        file.write_text(content)
    assert compute_code_fingerprint(["rewards.py:score"]) == before


def test_user_code_fingerprint_survives_cycles_broken_files_and_installed_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write(tmp_path, a="import b", b="import a\nimport c", c="this is no Python"))
    assert set(compute_code_fingerprint(["a.py:f", "a:f", "json:loads", "gone.py:f"])) == {"a.py:f", "a:f"}
