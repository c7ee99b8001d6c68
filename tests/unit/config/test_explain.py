"""Explanations, the JSON Schema and the reference page say what the section classes say."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from configuration_page import reference
from pydantic_core import PydanticUndefined

from roll.config.explain import explain, find_keys, get_summary
from roll.config.keys import iterate_keys, replace_indices
from roll.config.load import dump_config, load_config
from roll.config.pipelines.rlvr import RLVRConfig
from roll.config.schema import build_json_schema
from roll.errors import ConfigError

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
KEYS = list(iterate_keys(RLVRConfig))


def test_config_explain_every_key_is_documented():
    for key in KEYS:
        assert key.meaning.endswith("."), f"the meaning of {key.dotted} is no sentence"
        assert key.type_description, key
        assert "\n" not in key.meaning, key
        if key.path[-1].endswith(("_tokens", "_s", "_bytes")) or key.path[-1] == "max_context":
            assert key.unit, f"{key.dotted} is a quantity without a unit"


def test_config_explain_every_section_is_documented():
    sections = {section for key in KEYS for _, section in key.members} | {RLVRConfig}
    assert len(sections) > 15
    for section in sections:
        assert inspect.getdoc(section), section
        assert get_summary(section).endswith("."), section


def test_config_explain_every_resolved_key_is_among_the_keys():
    config = load_config(ROOT / "examples" / "quickstart.yaml", ["model.lora.rank=4"])

    def leaves(value, path=()):
        if isinstance(value, dict) and value:
            return [leaf for name, inner in value.items() for leaf in leaves(inner, (*path, name))]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return [leaf for i, inner in enumerate(value) for leaf in leaves(inner, (*path, i))]
        return [path]

    known = {key.path for key in KEYS}
    for path in leaves(dump_config(config)):
        assert replace_indices(path) in known, path


def test_config_explain_a_key_is_explained_with_type_default_and_place():
    text = explain("training.learning_rate")
    assert "Peak learning rate of AdamW." in text
    assert "a number > 0" in text
    assert "1e-06" in text
    assert "training: Training of the policy." in text
    assert "unit     tokens" in explain("rollout.max_new_tokens")
    assert "required" in explain("training.num_steps")


@pytest.mark.parametrize("name", ["data.0.max_operand", "data.N.max_operand", "data.max_operand", "max_operand"])
def test_config_explain_a_key_inside_a_list_is_found_in_every_spelling(name):
    text = explain(name)
    assert "data.N.max_operand  (source: arithmetic)" in text
    assert "Largest operand." in text


def test_config_explain_keys_that_differ_between_sources_are_explained_apart():
    blocks = explain("data.held_out").split("\n\ndata.N.held_out")
    assert len(blocks) == 3
    assert "source: arithmetic" in blocks[0] and "0.3" in blocks[0]
    assert "source: file, huggingface, python, reasoning_gym" in blocks[1] and "0.1" in blocks[1]
    assert "source: functions" in blocks[2]


def test_config_explain_a_last_part_finds_every_key_that_ends_in_it():
    judges = "data.N.reward.N.temperature"
    found = find_keys("temperature", RLVRConfig)
    assert {key.dotted for key in found} == {"rollout.temperature", "evaluation.temperature", judges}


def test_config_explain_a_section_is_explained_by_a_table_of_its_keys():
    text = explain("rollout")
    for name in ("prompts_per_step", "group_size", "max_new_tokens"):
        assert name in text
    assert "source: huggingface" in explain("data")


def test_config_explain_presets_are_shown_for_the_pipelines_that_have_them():
    assert "dr_grpo" in explain("algorithm") and "dr_grpo" in explain("algorithm", "agentic")
    methods = explain("algorithm", "diffusion")
    assert "type: flow_grpo" in methods and "preset" not in methods and "dr_grpo" not in methods


def test_config_explain_without_a_key_the_sections_are_listed():
    text = explain()
    assert all(name in text for name in RLVRConfig.model_fields)


def test_config_explain_every_key_can_be_explained():
    for dotted in {key.dotted for key in KEYS}:
        text = explain(dotted)
        assert dotted in text
        assert "Undefined" not in text, dotted


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("training.lerning_rate", "'learning_rate'"),
        ("learning_rte", "learning_rate"),
        ("lr", "'training.learning_rate'"),
        ("rollout.learning_rate", "belongs under 'training'"),
        ("zzzzzz", "lists all"),
        ("anchors.share", "is a key of another pipeline: pass --pipeline agentic."),
    ],
)
def test_config_explain_an_unknown_key_leads_to_the_nearest(name, nearest):
    with pytest.raises(ConfigError) as caught:
        explain(name)
    assert nearest in str(caught.value)


@pytest.fixture(scope="module")
def validator():
    schema = build_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_config_explain_the_schema_accepts_what_loads(path):
    config = load_config(path)
    validator = jsonschema.Draft202012Validator(build_json_schema(config.pipeline))
    assert list(validator.iter_errors(yaml.safe_load(path.read_text()))) == []
    assert list(validator.iter_errors(dump_config(config))) == []


@pytest.mark.parametrize(
    "change",
    [
        {"trainign": {}},
        {"training": {"num_steps": "many"}},
        {"training": {"num_steps": 0}},
        {"model": 3},
        {"data": []},
        {"data": [{"source": "arithmetc", "reward": "math"}]},
        {"rollout": {"temprature": 1}},
        {"name": "a/b"},
    ],
)
def test_config_explain_the_schema_refuses_what_does_not_load(validator, change):
    tree = {**yaml.safe_load(EXAMPLES[0].read_text()), **change}
    assert not validator.is_valid(tree)
    with pytest.raises(ConfigError):
        load_config(tree)


def test_config_explain_the_schema_carries_meanings_for_editors():
    text = json.dumps(build_json_schema())
    assert all(key.meaning in text or json.dumps(key.meaning)[1:-1] in text for key in KEYS if key.dotted != "model")


def test_config_explain_the_reference_page_is_what_the_classes_say():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert reference() in page, "run `python tools/configuration_page.py docs/configuration.md`"


def test_config_explain_the_reference_names_every_key():
    page = reference()
    for key in KEYS:
        assert f"`{key.path[-1]}`" in page
        assert key.default is PydanticUndefined or key.meaning.replace("|", "\\|") in page


def test_config_explain_a_default_reward_is_written_as_in_a_file():
    text = explain("data")
    assert "'code'" in text
    assert "CodeReward(" not in text
