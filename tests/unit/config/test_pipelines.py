"""A second pipeline needs a configuration class and a line in the registry; everything else follows from them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jsonschema
import pytest
from configuration_page import BEGIN, END, reference, renew

from roll.cli.main import run
from roll.cluster.devices import resolve_placement
from roll.config.base import Section, option
from roll.config.cluster import ClusterConfig, DeviceMapping, Devices, RoleDevices
from roll.config.document import dump
from roll.config.explain import explain
from roll.config.load import dump_config, dump_yaml, load_config, load_run_config
from roll.config.pipelines import PIPELINES
from roll.config.python_objects import load_with_python_objects
from roll.config.run import RunConfig
from roll.config.schema import build_json_schema
from roll.errors import ConfigError, PlacementError
from roll.pipelines.recording.configuration import load_replay_config


class ImitationConfig(Section):
    """What is imitated."""

    file: str = option(..., "A file of dialogues.", examples=["dialogues.jsonl"])
    num_epochs: int = option(1, "How often it is read.", ge=1)


class ToyDevices(DeviceMapping):
    """Devices of each role."""

    teacher: Devices | None = option(None, "Devices of the teacher, two for each of its engines.")


class ToyCluster(ClusterConfig):
    """Where work runs."""

    device_mapping: ToyDevices = option(ToyDevices(), "Devices of each role.")


class ToyConfig(RunConfig):
    """Imitation of dialogues."""

    pipeline: Literal["toy"] = option("toy", "Which pipeline runs.")
    imitation: ImitationConfig = option(..., "What is imitated.", examples=[{"file": "dialogues.jsonl"}])
    cluster: ToyCluster = option(ToyCluster(), "Where roles run.")

    @property
    def roles(self) -> dict[str, RoleDevices]:
        teacher = self.cluster.device_mapping.teacher or [0, 1]
        return super().roles | {
            "teacher": RoleDevices(kind="engine", devices=teacher, tensor_parallel=2, section="imitation")
        }


BASE = {"pipeline": "toy", "name": "x", "model": "m", "imitation": {"file": "d.jsonl"}}


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("toy_configuration")
    module.CONFIG = ToyConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(PIPELINES._entries, "toy", "toy_configuration:CONFIG")


def test_config_pipelines_it_is_loaded_from_a_file_with_overrides_and_back(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(dump(BASE))
    config = load_config(file, ["imitation.num_epochs=3", "cluster.num_nodes=1", "model.path=other"])
    assert isinstance(config, ToyConfig) and config.imitation.num_epochs == 3 and config.model.path == "other"
    file.write_text(dump_yaml(config))
    assert load_config(file) == config
    assert load_config(BASE | {"pipeline": "rlvr"}, ["pipeline=toy"]).pipeline == "toy"


def test_config_pipelines_its_own_sections_stand_where_a_reader_looks_first() -> None:
    keys = list(dump_config(load_config(BASE)))
    assert keys[:5] == ["pipeline", "name", "output_dir", "seed", "model"] and keys[5] == "imitation"
    assert keys[6:] == ["checkpoint", "cluster", "tracking", "alarms"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"imitation": {"fil": "x"}}, r"unknown key 'imitation.fil'. Did you mean 'file'\?"),
        ({"imitation": {"file": "x", "num_epochs": 0}}, "'imitation.num_epochs' must be an integer >= 1, got 0"),
        ({"imitation": None}, "'imitation' must be a section, got null. The section is empty"),
        ({"rollout": {"group_size": 2}}, "unknown key 'rollout'"),
        ({"num_generations": 2}, r"unknown key 'num_generations'\. (?!.*rollout)"),
        ({"save_steps": 2}, "Did you mean 'checkpoint.every_num_steps'"),
        ({"pipeline": "tow"}, r"'pipeline' must be one of .*toy.*, got 'tow'. Did you mean 'toy'\?"),
    ],
)
def test_config_pipelines_its_errors_are_as_clear(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(BASE | change)


def test_config_pipelines_a_missing_section_says_what_it_is_for() -> None:
    with pytest.raises(ConfigError, match=r"missing key 'imitation': What is imitated\. .*dialogues\.jsonl"):
        load_config({key: value for key, value in BASE.items() if key != "imitation"})


def test_config_pipelines_it_is_explained_and_has_a_schema_and_a_page(tmp_path: Path) -> None:
    assert "imitation" in explain("", "toy") and "rollout" not in explain("", "toy")
    assert "How often it is read." in explain("num_epochs", "toy")
    with pytest.raises(ConfigError, match="'group_size' is a key of another pipeline: pass --pipeline agentic"):
        explain("group_size", "toy")
    jsonschema.validate(BASE, build_json_schema("toy"))
    assert list(build_json_schema("toy")["properties"]) == list(ToyConfig.model_fields)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter")
    renew(page, "toy")
    assert reference("toy") in page.read_text() and "### `imitation`" in page.read_text()
    for function in (explain, build_json_schema, reference):
        with pytest.raises(ConfigError, match=r"unknown pipeline 'tyo'\. Did you mean 'toy'\?"):
            function(*(["", "tyo"] if function is explain else ["tyo"]))  # type: ignore[operator]


def test_config_pipelines_commands_explain_and_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "explain", "--pipeline", "toy", "num_epochs"]) == 0
    assert "How often it is read." in capsys.readouterr().out
    assert run(["config", "schema", "--pipeline", "toy"]) == 0
    assert json.loads(capsys.readouterr().out) == build_json_schema("toy")
    (tmp_path / "x.yaml").write_text(dump(BASE))
    assert run(["config", "show", str(tmp_path / "x.yaml")]) == 0
    assert "num_epochs: 1" in capsys.readouterr().out
    for command in (["train"], ["check"], ["eval"]):
        assert run([*command, str(tmp_path / "x.yaml"), f"output_dir={tmp_path}"]) == 2
        said = capsys.readouterr().err
        assert "unknown pipeline 'toy'. Known: " in said or "No module named 'roll.pipelines.toy'" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.yaml"]


def test_config_pipelines_a_run_of_it_is_resumed_and_what_it_has_not_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_yaml(load_config(BASE)))
    assert (
        load_run_config(tmp_path, ["imitation.num_epochs=2"]).get_section("imitation", ImitationConfig).num_epochs == 2
    )
    with pytest.raises(ConfigError, match="'seed' is 0 in this run and cannot change"):
        load_run_config(tmp_path, ["seed=1"])
    with pytest.raises(ConfigError, match="ran the pipeline toy, which does not support replays"):
        load_replay_config(tmp_path)
    with pytest.raises(ConfigError, match="runs the pipeline toy, which has no section `rollout`"):
        load_config(BASE).get_section("rollout", Section)
    with pytest.raises(ConfigError, match="unknown key 'data'"):
        load_with_python_objects(BASE, (), [{"prompt": "p"}], None, "math")


def test_config_pipelines_a_role_of_its_own_gets_devices_like_any_other() -> None:
    cluster = {"type": "ray", "device_mapping": {"actor_train": "0-1", "teacher": "4-7"}}
    config = load_config(BASE | {"cluster": cluster}, ["cluster.num_nodes=2"])
    seats = resolve_placement(config.cluster, config.roles, devices_per_node=4).slots
    assert [(seat.node, seat.local_devices) for seat in seats["teacher"]] == [(1, (0, 1)), (1, (2, 3))]
    assert [seat.local_devices for seat in seats["actor_train"]] == [(0,), (1,)]
    assert dump_config(config)["cluster"]["device_mapping"]["teacher"] == [4, 5, 6, 7]
    assert "two for each of its engines" in explain("cluster.device_mapping.teacher", "toy")
    with pytest.raises(PlacementError, match=r"device_mapping\.teacher contains device 4, but 1 x 4 devices"):
        resolve_placement(load_config(BASE | {"cluster": cluster}).cluster, config.roles, devices_per_node=4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster.device_mapping.techer=1", r"unknown key 'cluster.device_mapping.techer' .*Did you mean 'teacher'\?"),
        ("cluster.device_mapping.zz=1", "Known keys: actor_train, actor_infer, critic, reference, judge, teacher"),
        (
            "cluster.device_mapping.critic=1",
            "pipeline toy has no such role: remove the key .the roles are actor_train, teacher.",
        ),
        ("cluster.device_mapping.actor_infer=1", "actor_infer is set, but the pipeline toy has no such role"),
        (
            "cluster.device_mapping.teacher=0-2",
            "has 3 devices, but the number must be divisible by imitation.tensor_parallel 2",
        ),
        ("cluster.device_mapping.teacher=0-x", "'0-x' is not a valid list of devices"),
        ("cluster.device_mapping.actor_train=0-3", "to 4 trainer ranks, but cluster.type local"),
    ],
)
def test_config_pipelines_a_mapping_that_the_pipeline_cannot_use_is_refused(override: str, message: str) -> None:
    ray = ["cluster.type=ray"] if "actor_train" not in override else []
    with pytest.raises(ConfigError, match=message):
        load_config(BASE, [*ray, override])
