"""Keys that may be paths: `~` and variables mean the same in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import AfterValidator, BaseModel

from roll.cli.main import run
from roll.config.base import expand_path
from roll.config.load import load_config
from roll.config.pipelines import PIPELINES
from roll.config.simulation import SimulationConfig
from roll.errors import ConfigError, ModelError
from roll.models import find_model

BASE: dict[str, Any] = {
    "name": "run",
    "model": "model",
    "data": [{"source": "file", "path": "rows.jsonl", "reward": "math"}],
    "training": {"num_steps": 1},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("~/a", "/a"),
        ("~", ""),
        ("$HOME/a", "/a"),
        ("${HOME}/a", "/a"),
        ("$SCRATCH/a/$HOME", "/scratch/a/{home}"),
        ("~/rewards.py:score", "/rewards.py:score"),
    ],
)
def test_config_path_are_expanded(home: Path, written: str, meant: str) -> None:
    assert expand_path(written) == f"{home}{meant.format(home=home)}"


@pytest.mark.parametrize("name", ["a/~/b", "owner/model", "smollm2-135m-instruct", "costs 5$", "a~", "", None])
def test_config_path_without_a_variable_stay_as_they_are(home: Path, name: str | None) -> None:
    assert expand_path(name) == name


def test_config_path_of_files_whose_names_look_like_variables_stay_as_they_are(home: Path) -> None:
    for name in ("$rows.jsonl", "~nobody-here.jsonl"):
        with pytest.raises(ValueError, match="not defined on this machine"):
            expand_path(name)
        (home / name).write_text("")
        assert expand_path(name) == name


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("output_dir", lambda c: c.output_dir),
        ("model.path", lambda c: c.model.path),
        ("data.0.path", lambda c: c.data[0].path),
        ("data.0.held_out_path", lambda c: c.data[0].held_out_path),
    ],
)
def test_config_path_of_a_configuration_are_expanded_or_refused(home: Path, override: str, value: Any) -> None:
    assert value(load_config(BASE, [f"{override}=~/there"])) == f"{home}/there"
    assert value(load_config(BASE, [f"{override}=$HOME/there"])) == f"{home}/there"
    with pytest.raises(ConfigError, match=r"uses the environment variable \$NOWHERE, which is not defined"):
        load_config(BASE, [f"{override}=$NOWHERE/there"])


def test_config_path_of_functions_and_of_an_agents_files_are_expanded(home: Path) -> None:
    reward = {"type": "python", "function": "~/rewards.py:score"}
    loaded: Any = load_config({**BASE, "data": [{"source": "arithmetic", "reward": reward}]})
    assert loaded.data[0].reward[0].function == f"{home}/rewards.py:score"
    agent = {"command": ["sh"], "sandbox": True, "files": {"a.sh": "~/a.sh"}}
    loaded = load_config({**BASE, "rollout": {"agent": agent}})
    assert loaded.rollout.agent.files == {"a.sh": f"{home}/a.sh"}


def test_config_path_are_marked_wherever_a_key_is_called_like_one() -> None:
    """Whoever adds a key for a path uses `path_option`."""
    words = ("path", "file", "files", "dir", "directory", "folder", "model", "function", "checkpoint")
    missing: set[str] = set()
    seen: set[type] = set()

    def visit(kind: Any) -> None:
        for inner in get_args(kind):
            visit(inner)
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)) or kind in seen:
            return
        seen.add(kind)
        for name, field in kind.model_fields.items():
            visit(field.annotation)
            texts = "str" in str(field.annotation) and not isinstance(field.annotation, type(BaseModel))
            if texts and name.rpartition("_")[2] in words:
                marked = any(isinstance(each, AfterValidator) and each.func is expand_path for each in field.metadata)
                missing.update(() if marked else {f"{kind.__name__}.{name}"})

    for each in (*(PIPELINES.get(name) for name in PIPELINES), SimulationConfig):
        visit(each)
    # a name at an endpoint; a file inside of an agent's own directory
    assert missing == {"JudgeReward.model", "AgentConfig.answer_file"}


@pytest.mark.parametrize(("seed", "good"), [(0, True), (2**64 - 1, True), (2**64, False), (-1, False)])
def test_config_path_a_seed_is_one_that_every_generator_takes(seed: int, good: bool) -> None:
    if good:
        assert load_config(BASE, {"seed": seed}).seed == seed
        return
    with pytest.raises(ConfigError, match=r"'seed'.* must be an integer >= 0 and < 18446744073709551616"):
        load_config(BASE, {"seed": seed})


@pytest.mark.parametrize("name", ["a\x00b", "a/" + "x" * 300, "é" * 200])
def test_config_path_that_no_file_can_have_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"'output_dir': .* is not a valid file name"):
        load_config({**BASE, "output_dir": name})
    with pytest.raises(ModelError, match="is not a valid file name"):
        find_model(name)


@pytest.mark.parametrize("path", ["$EMPTY/there", "${EMPTY}/there"])
def test_config_path_with_an_empty_variable_are_refused(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """They would begin at the root of all files."""
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(ConfigError, match=r"uses the environment variable \$\{?EMPTY\}?, which is empty"):
        load_config({**BASE, "output_dir": path})


@pytest.mark.parametrize("command", [["resume"], ["view"], ["export", "out"], ["dashboard"]])
def test_config_path_that_are_too_long_are_said_in_one_line(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    name, *rest = command
    assert run([name, "x" * 300, *rest]) == 2
    assert capsys.readouterr().err.endswith("is too long.\n")
