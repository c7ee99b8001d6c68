"""`roll check` of a hub model whose weights are not here: sizes from its config.json, and what is not known is said."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from roll.config.load import load_config
from roll.errors import ModelError
from roll.models import describe_model
from roll.pipelines.registry import CHECKS
from roll.preflight import layout
from roll.preflight.config_sizes import find_cached_config, read_model_sizes
from roll.preflight.report import Report

NAME = "owner/tiny"


@pytest.fixture
def hub(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, with one file of one model; and no network."""
    cache = tmp_path / "hub"
    snapshot = cache / "models--owner--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.copy(tiny_model / "config.json", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return snapshot


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    """Sizes without a process of their own, which takes seconds to import torch."""
    sizes = describe_model(tiny_model)
    monkeypatch.setattr("roll.preflight.config_sizes.read_model_sizes", lambda name: sizes)


def checked(model: str, **changes: Any) -> Report:
    tree = {
        "name": "trial",
        "model": model,
        "pipeline": "sft",
        "data": [{"source": "arithmetic"}],
        "training": {"num_steps": 2},
        **changes,
    }
    config = load_config(tree)
    return CHECKS.get(config.pipeline)(config)


@pytest.mark.integration
def test_preflight_model_size_check_shows_roles_of_a_hub_model_by_its_config_alone(hub: Path, tiny_model: Path) -> None:
    report = checked(NAME)
    whole = describe_model(tiny_model)
    assert report.model is not None
    assert (report.model.num_parameters, report.model.hidden_size) == (whole.num_parameters, whole.hidden_size)
    (trainer,) = [role for role in report.memory if role.role == "actor_train"]
    # bfloat16 runs have float32 masters with two moments in float32
    assert trainer.parts["AdamW"] == 8 * whole.num_parameters
    (note,) = [note for note in report.notes if NAME in note]
    assert "is not on this machine yet" in note and "sizes are from config.json" in note
    assert report.problems == []
    assert f"model {NAME}: " in str(report) and "actor_train" in str(report)


@pytest.mark.usefixtures("hub", "in_process")
def test_preflight_model_size_check_of_a_hub_model_estimates_engines_too() -> None:
    rollout = {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 8}
    report = checked(NAME, pipeline="rlvr", data=[{"source": "arithmetic", "reward": "math"}], rollout=rollout)
    assert {"actor_train", "actor_infer"} <= {role.role for role in report.memory}
    assert report.disk is not None
    assert report.problems == []


@pytest.mark.usefixtures("hub")
def test_preflight_model_size_check_says_why_sizes_of_a_hub_model_are_not_known() -> None:
    report = checked("owner/other")
    assert report.model is None and report.memory == []
    (note,) = report.notes
    assert "'owner/other' is not on this machine yet" in note
    assert "The model's sizes and the memory of roles are unknown: the config.json of 'owner/other' is not in" in note
    assert report.problems == []


def test_preflight_model_size_dry_run_of_a_hub_model_needs_its_config_alone(
    hub: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    found = {"between": 1, "gradients": 1, "peak": 2, "traffic": [], "layers": []}
    monkeypatch.setattr(layout, "_run_check", lambda request, waited: asked.append(request) or found)
    report = checked(NAME)
    layout.dry_run_step(report, report.config)
    ((spec, with_step),) = asked
    assert (Path(spec.model_path), with_step) == (hub, True)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("name", ["owner/other", "a" * 200, "../x", "a//b", ""])
def test_preflight_model_size_cached_config_of_names_that_are_not_there_is_none(name: str) -> None:
    assert find_cached_config(name) is None


def test_preflight_model_size_from_a_hub_that_does_not_answer_are_given_up(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("roll.models.hub_fetch.TIMEOUT_S", 0.0)
    with pytest.raises(ModelError, match=r"the config\.json of 'owner/other' .*\(the hub did not respond within 0 s\)"):
        read_model_sizes("owner/other")


@pytest.mark.usefixtures("hub")
def test_preflight_model_size_from_a_config_that_ends_its_process_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ModelError, match="could not be read: exit code 1"):
        read_model_sizes(NAME)


@pytest.mark.usefixtures("hub", "in_process")
def test_preflight_model_size_check_of_a_hub_model_says_that_engines_of_an_evaluation_are_not_estimated() -> None:
    answers = {"data": [{"source": "arithmetic", "reward": "math"}], "max_new_tokens": 8}
    report = checked(NAME, evaluation={"answers": answers})
    roles = {role.role for role in report.memory}
    assert "actor_train" in roles and "actor_infer" not in roles
    assert any("engines for evaluation.answers is unknown" in note for note in report.notes)
    assert report.problems == []
