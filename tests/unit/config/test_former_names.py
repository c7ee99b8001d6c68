"""Former names of keys, values, metrics and alarms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from roll.config import former_names
from roll.config.keys import iterate_keys
from roll.config.load import load_config
from roll.config.pipelines import PIPELINES
from roll.config.simulation import SimulationConfig
from roll.errors import ConfigError
from roll.pipelines.state import RunState
from roll.tracking.metric_meanings import find_meaning
from roll.tracking.metrics_file import MetricsFile, read_metrics

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"


@pytest.fixture
def tree() -> dict:
    return yaml.safe_load(QUICKSTART.read_text())


@pytest.fixture(autouse=True)
def _nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(former_names, "_reported_renames", set())


def write(directory: Path, tree: dict, *lines: str) -> Path:
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False) + "\n".join(lines) + "\n")
    return file


def test_table_leads_to_names_that_exist() -> None:
    keys = {key.dotted.replace(".N", "") for name in PIPELINES for key in iterate_keys(PIPELINES.get(name))}
    keys |= {key.dotted.replace(".N", "") for key in iterate_keys(SimulationConfig)}
    for old, last in former_names.RENAMED_KEYS.items():
        section = old.rpartition(".")[0]
        assert any(f".{key}".endswith(f".{section}.{last}") for key in keys), old
        assert not any(f".{key}".endswith(f".{old}") for key in keys), old
    for key in former_names.RENAMED_VALUES:
        assert any(f".{each}".endswith(f".{key}") for each in keys), key
    for old, new in former_names.RENAMED_METRICS.items():
        suffix = "reward_counted" if old.endswith("/") else ""
        assert find_meaning(new + suffix) is not None and find_meaning(old + suffix) is None, old


def test_file_override_and_dictionary_take_former_names(
    tree: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree["training"]["mlp_slice_tokens"] = 64
    file = write(tmp_path, tree, "sandbox: {patience_s: 7}")
    config = load_config(file, ["cluster.hand_over=false", "rollout.scheduling={stop_doomed_groups: false}"])
    assert (config.training.tiled_mlp_tokens, config.sandbox.reconnect_timeout_s) == (64, 7)  # type: ignore[attr-defined]
    assert config.cluster.sharing == "disaggregated"
    assert config.rollout.scheduling.early_stop_groups is False  # type: ignore[attr-defined]
    (warning,) = [record.message for record in caplog.records]
    for line in (
        "training.mlp_slice_tokens -> training.tiled_mlp_tokens",
        "sandbox.patience_s -> sandbox.reconnect_timeout_s",
        "cluster.hand_over -> cluster.sharing",
        "cluster.sharing=False -> disaggregated",
        "rollout.scheduling.stop_doomed_groups -> rollout.scheduling.early_stop_groups",
    ):
        assert line in warning
    load_config(file, ["cluster.hand_over=false", "rollout.scheduling={stop_doomed_groups: false}"])
    assert len(caplog.records) == 1
    assert load_config(tree, {"training.close_heap": True}).training.malloc_trim is True  # type: ignore[attr-defined]


def test_override_replaces_a_value_whichever_name_each_uses(tree: dict) -> None:
    tree["training"]["mlp_slice_tokens"] = 64
    assert load_config(tree, ["training.tiled_mlp_tokens=8"]).training.tiled_mlp_tokens == 8  # type: ignore[attr-defined]
    tree["training"]["tiled_mlp_tokens"] = tree["training"].pop("mlp_slice_tokens")
    assert load_config(tree, ["training.mlp_slice_tokens=8"]).training.tiled_mlp_tokens == 8  # type: ignore[attr-defined]


def test_both_names_are_an_error_with_both_lines(tree: dict, tmp_path: Path) -> None:
    file = write(tmp_path, tree, "sandbox:", "  patience_s: 7", "  reconnect_timeout_s: 8")
    first = file.read_text().splitlines().index("  patience_s: 7") + 1
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["training.lerning_rate=1"])
    message = str(caught.value)
    assert f"'sandbox.patience_s' ({file}:{first}) is the former name of" in message
    assert f"'sandbox.reconnect_timeout_s' ({file}:{first + 1})" in message and "lerning_rate" in message
    with pytest.raises(
        ConfigError, match=r"'sandbox\.patience_s' and 'sandbox\.reconnect_timeout_s' are names of the same key"
    ):
        load_config(tree, ["sandbox.patience_s=1", "sandbox.reconnect_timeout_s=2"])


def test_message_about_a_renamed_key_has_its_line(tree: dict, tmp_path: Path) -> None:
    file = write(tmp_path, tree, "sandbox:", "  patience_s: never")
    line = file.read_text().splitlines().index("  patience_s: never") + 1
    with pytest.raises(ConfigError, match=rf"'sandbox\.reconnect_timeout_s' \({file}:{line}\)"):
        load_config(file)


def test_the_users_own_mappings_keep_their_keys(tree: dict) -> None:
    options = {"sandbox": {"patience_s": 1}}
    tree["inference"] = {"options": options}
    assert load_config(tree).inference.options == options  # type: ignore[attr-defined]


def test_alarms_are_renamed_in_configuration_state_and_metrics(tree: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(former_names, "RENAMED_ALARMS", {"too_long_above": "unfinished_above"})
    tree["alarms"] = {"too_long_above": 0.25, "stop_on": ["too_long_above"]}
    alarms = load_config(tree).alarms  # type: ignore[attr-defined]
    assert alarms.unfinished_above == 0.25 and alarms.stop_on == ["unfinished_above"]
    state = RunState(alarms={"too_long_above": 2}).to_json()
    assert RunState.from_json(state).alarms == {"unfinished_above": 2}
    assert former_names.rename_metrics({"alarm/too_long_above": 2.0}) == {"alarm/unfinished_above": 2.0}


def test_metrics_of_a_file_that_changes_names_are_one_series(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "kind": "train", "choice/reward_counted": 0.5}) + "\n")
    MetricsFile(path).append(2, "train", {"selection/reward_counted": 0.75})
    assert [row["selection/reward_counted"] for row in read_metrics(path)] == [0.5, 0.75]
    assert json.loads(path.read_text().splitlines()[1]).keys() == {"step", "kind", "selection/reward_counted"}
    both = {"choice/reward_counted": None, "selection/reward_counted": 0.5}
    assert former_names.rename_metrics(both) == {"selection/reward_counted": 0.5}
