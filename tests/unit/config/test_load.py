"""Files, dictionaries and overrides to a validated configuration, and the messages where that fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from roll.config.document import parse
from roll.config.keys import iterate_keys
from roll.config.load import dump_config, dump_yaml, format_overrides, load_config, load_run_config
from roll.config.pipelines.rlvr import RLVRConfig
from roll.config.problems import MAX_LINES, NAMES_IN_OTHER_LIBRARIES
from roll.errors import ConfigError, RunDirectoryError

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"


def refusal(source, *overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return str(caught.value)


def changed(*lines: str) -> dict:
    """The quickstart as a dictionary, with dotted keys set without any check."""
    tree = yaml.safe_load(QUICKSTART.read_text())
    for line in lines:
        key, _, value = line.partition("=")
        *parents, last = [int(part) if part.isdigit() else part for part in key.split(".")]
        place = tree
        for part in parents:
            place = place[part] if isinstance(place, list) else place.setdefault(part, {})
        place[last] = parse(value, "")[0]
    return tree


def test_config_load_the_quickstart_loads():
    config = load_config(QUICKSTART)
    assert config.name == "quickstart"
    assert config.model.path == "smollm2-135m-instruct"
    assert config.rollouts_per_step == 64
    assert config.training.learning_rate == 5e-5
    assert config.data[0].reward[0].type == "math"


@pytest.mark.parametrize("example", sorted(QUICKSTART.parent.glob("*.yaml")), ids=lambda path: path.name)
def test_config_load_every_example_loads(example):
    assert load_config(example).pipeline == yaml.safe_load(example.read_text())["pipeline"]


def test_config_load_overrides_reach_everywhere_and_are_written_as_in_yaml():
    config = load_config(
        QUICKSTART,
        [
            "training.learning_rate=4e-5",
            "data.0.max_operand=20",
            "algorithm.kl.coefficient=0.1",
            "data.0.operations=[+, -]",
            "model.lora={rank: 4}",
            "model.lora.alpha=8",
            "inference.options.a.b=[1, x]",
            "tracking.wandb=my project",
        ],
    )
    assert config.training.learning_rate == 4e-5
    assert config.data[0].max_operand == 20
    assert config.algorithm.kl.coefficient == 0.1
    assert config.data[0].operations == ["+", "-"]
    assert (config.model.lora.rank, config.model.lora.alpha) == (4, 8.0)
    assert config.inference.options == {"a": {"b": [1, "x"]}}
    assert config.tracking.wandb == "my project"


def test_config_load_an_override_reaches_inside_what_the_file_writes_in_short():
    config = load_config(QUICKSTART, ["model.dtype=float32", "data.0.reward.0.time_limit_s=2"])
    assert (config.model.path, config.model.dtype) == ("smollm2-135m-instruct", "float32")
    assert (config.data[0].reward[0].type, config.data[0].reward[0].time_limit_s) == ("math", 2.0)
    asked = ["judge=small", "judge.num_engines=2", "data.0.reward={type: judge, rubric: good}"]
    judge = load_config(QUICKSTART, asked).judge
    assert judge is not None and (judge.model, judge.num_engines) == ("small", 2)


def test_config_load_an_override_one_past_the_end_of_a_list_adds_an_entry():
    config = load_config(QUICKSTART, ["data.1.source=file", "data.1.path=x.jsonl", "data.1.reward=exact"])
    assert [entry.source for entry in config.data] == ["arithmetic", "file"]


def test_config_load_the_last_of_several_overrides_holds():
    assert load_config(QUICKSTART, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("override", "value"),
    [("name=123", "123"), ("name='123'", "123"), ("output_dir=true", "true"), ("name=1e5", "1e5")],
)
def test_config_load_an_override_of_text_is_text_whatever_it_looks_like(override, value):
    config = load_config(QUICKSTART, [override])
    assert value in (config.name, config.output_dir)


def test_config_load_a_template_in_braces_needs_no_quotes_in_an_override():
    config = load_config(QUICKSTART, ["data.0.prompt_template={prompt} = ?"])
    assert config.data[0].prompt_template == "{prompt} = ?"


def test_config_load_null_clears_an_optional_text():
    config = load_config(changed("data.0.system_prompt=Be brief."), ["data.0.system_prompt=null"])
    assert config.data[0].system_prompt is None


def test_config_load_overrides_may_be_a_dictionary_of_values():
    overrides = {"training.learning_rate": 1e-7, "name": "a: b"[:1], "data.0.operations": ("-",)}
    config = load_config(QUICKSTART, overrides)
    assert (config.training.learning_rate, config.name, config.data[0].operations) == (1e-7, "a", ["-"])
    assert load_config(QUICKSTART, format_overrides(overrides)) == config


def test_config_load_the_file_is_not_changed_by_overrides():
    tree = changed()
    load_config(tree, ["training.num_steps=3"])
    assert tree == changed()


def test_config_load_resolved_makes_the_same_configuration_again(tmp_path):
    overrides = ["model.lora.rank=4", "data.0.reward=[{type: regex, pattern: 'a: {answer}'}, exact]", "name=1e5"]
    config = load_config(QUICKSTART, overrides)
    assert load_config(dump_config(config)) == config
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config
    assert set(dump_config(config)) == set(RLVRConfig.model_fields)


def test_config_load_a_configuration_is_taken_as_it_is_and_can_be_changed():
    config = load_config(QUICKSTART)
    assert load_config(config) is config
    assert load_config(config, ["seed=5"]).seed == 5
    assert config.seed == 0


def test_config_load_a_loaded_configuration_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        load_config(QUICKSTART).training.num_steps = 3


def test_config_load_an_unknown_key_names_file_line_and_the_nearest():
    text = QUICKSTART.read_text().replace("learning_rate:", "lerning_rate:")
    path = QUICKSTART.parent / "nowhere.yaml"
    line = next(number for number, content in enumerate(text.splitlines(), 1) if "lerning" in content)
    tree, origins = parse(text, "quickstart.yaml")
    from roll.config.document import Document
    from roll.config.problems import describe_unknown_key

    document = Document(name="quickstart.yaml", tree=tree, origins=origins)
    message = describe_unknown_key(("training", "lerning_rate"), document, RLVRConfig)
    assert message == (f"unknown key 'training.lerning_rate' (quickstart.yaml:{line}). Did you mean 'learning_rate'?")
    assert not path.exists()


def test_config_load_a_key_inside_an_override_is_not_said_to_stand_in_the_file():
    written = "data=[{source: arithmetic, reward: {type: math, tims: 2}}]"
    with pytest.raises(ConfigError) as refused:
        load_config(QUICKSTART, [written])
    assert "'data.0.reward.0.tims'" in str(refused.value)
    assert "(override 'data=" in str(refused.value) and "quickstart.yaml" not in str(refused.value)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("training.lerning_rate=1", "Did you mean 'learning_rate'?"),
        ("trainign.num_steps=1", "unknown key 'trainign'"),
        ("learning_rate=1", "'learning_rate' belongs under 'training'."),
        ("training.temperature=1", "'temperature' belongs under 'evaluation' or 'rollout'."),
        ("training.max_operand=1", "'max_operand' belongs under 'data.N'."),
        ("rollout.seed=1", "'seed' belongs under the top level."),
        ("lr=1", "Did you mean 'training.learning_rate'?"),
        ("data.0.max_operands=1", "Did you mean 'max_operand'?"),
        ("data.0.path=x", "'path' belongs under 'data.N' or 'model'."),
        ("data.0.reward.0.patern=x", "unknown key 'data.0.reward.0.patern'"),
        ("model.lora.rnk=1", "Did you mean 'rank'?"),
    ],
)
def test_config_load_an_unknown_key_gets_the_right_hint(override, hint):
    message = refusal(QUICKSTART, override)
    assert hint in message
    assert f"override '{override}'" in message


def test_config_load_the_column_of_answers_is_found_by_its_name_in_another_pipeline():
    prompts, examples = QUICKSTART, QUICKSTART.with_name("sft.yaml")
    file = "data=[{source: file, path: x.jsonl, reward: exact, %s: y}]"
    assert "Did you mean 'answer_key'?" in refusal(prompts, file % "completion_key")
    assert "Did you mean 'completion_key'?" in refusal(examples, (file % "answer_key").replace("reward: exact, ", ""))


def test_config_load_a_key_of_another_source_says_what_this_source_has():
    assert "data.0.split" in refusal(changed("data.0.split=train"))


def test_config_load_names_from_elsewhere_lead_to_keys_that_exist():
    known = {key.dotted for key in iterate_keys(RLVRConfig)}
    assert set(NAMES_IN_OTHER_LIBRARIES.values()) <= known
    assert not set(NAMES_IN_OTHER_LIBRARIES) & {key.path[-1] for key in iterate_keys(RLVRConfig)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("training.num_steps=true", "'training.num_steps' must be an integer >= 1, got true."),
        ("training.num_steps='8'", "must be an integer >= 1, got '8'. Remove the quotes: 8."),
        ("training.num_steps=8.0", "must be an integer >= 1, got 8.0. Write 8."),
        ("training.num_steps=0", "must be an integer >= 1, got 0."),
        ("training.num_steps=null", "must be an integer >= 1, got null."),
        ("training.num_steps=[3]", "must be an integer >= 1, got [3]."),
        ("training.warmup_steps=33", "'training.warmup_steps' must be <= training.num_steps 32, got 33"),
        ("training.learning_rate=-1", "must be a number > 0, got -1."),
        ("training.learning_rate=.inf", "must be a number > 0, got Infinity."),
        ("training.learning_rate=.nan", "must be a number > 0, got NaN."),
        ("training.beta1=1", "must be a number >= 0 and < 1, got 1."),
        ("tracking.tensorboard=yes", "must be true or false, got 'yes'. Write true."),
        ("tracking.tensorboard=1", "must be true or false, got 1."),
        ("tracking.wandb=5", "must be a string or null, got 5. Put it in quotes: '5'."),
        ("training.schedule=cosin", "must be one of 'constant', 'linear', 'cosine', got 'cosin'. Did you mean 'cosine'?"),  # noqa: E501
        ("training=5", "'training' must be a section, got 5."),
        ("algorithm=grpo", "'algorithm' must be a section, got 'grpo'. Write `algorithm.type=grpo`, or in a file `algorithm: {type: grpo}`."),  # noqa: E501
        ("algorithm=grp0", "Write `algorithm.type=grpo`, or in a file"),
        ("algorithm=xyz", "'algorithm' must be a section, got 'xyz'."),
        ("training=null", "must be a section, got null. The section is empty"),
        ("data=[]", "'data' must be a non-empty list of sections, got []."),
        ("data={}", "'data' must be a non-empty list of sections, got {}."),
        ("name=a/b", "'name' must be a string of letters (A to Z, a to z), digits, '.', '_' and '-' that begins with"),
        ("model=[a]", "'model' must be a section, got"),
        ("model={}", "missing key 'model.path'"),
        ("data.0.operations=[+, /]", "'data.0.operations.1' must be one of '+', '-', '*', got '/'."),
        ("data.0.source=arithmetc", "got 'arithmetc'. Did you mean 'arithmetic'?"),
        ("data.0.reward=mth", "got 'mth'. Did you mean 'math'?"),
        ("data.0.reward=5", "'data.0.reward.0' must be a section with the key 'type'"),
        ("data.0.reward=[{wieght: 1}]", "missing key 'data.0.reward.0.type'"),
        ("data.0.reward={type: regex, pattern: '('}", "'data.0.reward.0.pattern': '(' is not a valid regular expression"),  # noqa: E501
        ("data.0.prompt_template=hello", "prompt_template must contain {prompt}"),
        ("data.0.max_operand=0", "max_operand must be >= min_operand, got 0 < 1"),
        ("model={path: m, lora: {target_modules: 3}}", "'model.lora.target_modules' must be a list of strings or 'all-linear', got 3."),  # noqa: E501
        ("training.num_steps=1e99", "must be an integer >= 1, got 1e+99."),
        ("training.learning_rate='nan'", "must be a number > 0, got 'nan'."),
        ("cluster.device_mapping={actor_train: 0-x}", "'0-x' is not a valid list of devices"),
        ("cluster.device_mapping={actor_train: 3-0}", "'3-0' is not a valid list of devices"),
        ("cluster.device_mapping={actor_train: null}", "null is not a valid list of devices"),
        ("cluster.device_mapping={actor_train: 0-999999999999}", "'0-999999999999' has more than 100,000 devices"),
        ("cluster.device_mapping={actor_train: [0, 0]}", "contains duplicate devices"),
        ("cluster.device_mapping={actor_train: 0-3}", "to 4 trainer ranks, but cluster.type local"),
        ("rollout.group_size=1", "rollout.group_size >= 2"),
        ("pipeline=rlvrr", "got 'rlvrr'. Did you mean 'rlvr'?"),
        ("pipeline=3", "got 3."),
    ],
)  # fmt: skip
def test_config_load_a_wrong_value_is_named_with_what_is_right(line, expected):
    message = refusal(changed(line))
    assert expected in message
    assert "\n" not in message


def test_config_load_a_missing_key_says_what_it_is_for_and_how_to_write_it():
    message = refusal({"name": "x", "model": "m", "data": [{"source": "arithmetic"}]})
    assert "missing key 'training': Training of the model. Example: `training: {num_steps: 40}`." in message
    assert "missing key 'data.0.reward': Rewards that score the answers" in message
    assert message.startswith("2 problems in the configuration:\n  ")


def test_config_load_all_problems_of_file_and_overrides_come_together(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(QUICKSTART.read_text().replace("num_steps: 32", "num_steps: many"))
    message = refusal(path, "seed=-1", "nmae=x")
    assert message.startswith("3 problems")
    assert f"({path}:8) must be an integer >= 1, got 'many'" in message
    assert "'seed' (override 'seed=-1') must be an integer >= 0 and < 18446744073709551616, got -1." in message
    assert "unknown key 'nmae' (override 'nmae=x'). Did you mean 'name'?" in message


def test_config_load_a_combination_that_is_wrong_points_at_its_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(QUICKSTART.read_text().replace("group_size: 8", "group_size: 1"))
    assert f"({path}:7)." in refusal(path)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.num_steps", "is invalid: expected key=value"),
        ("=3", "has an invalid key"),
        ("a..b=3", "has an invalid key"),
        ("data.5.weight=1", "'data' is a list with 1 entries: use an index from 0 to 1"),
        ("data.x=1", "unknown key 'data.x'"),
        ("training.num_steps.x=1", "is a single value"),
        ("training.num_steps=[", "not valid YAML"),
        ("data.0.operations.0.x=1", "single value"),
    ],
)
def test_config_load_an_override_that_cannot_be_applied_is_refused(override, expected):
    assert expected in refusal(QUICKSTART, override)


def test_config_load_overrides_as_one_text_are_refused():
    with pytest.raises(ConfigError, match="put it in a list"):
        load_config(QUICKSTART, "seed=1")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"seed": np.int64(3)}, "got a Python int64"),
        ({"inference": {"options": {"f": print}}}, "got a Python builtin"),
        ({3: 4}, "keys must be strings"),
        (5, "a configuration must be a file or a dictionary, got int"),
    ],
)
def test_config_load_python_values_that_are_not_plain_are_refused(source, expected):
    assert expected in refusal(source)


@pytest.mark.parametrize("depth", [*range(100, 1000, 50), 5000])
def test_config_load_what_is_nested_too_deeply_is_refused_at_every_depth(depth, tmp_path):
    path = tmp_path / "deep.yaml"
    path.write_text(QUICKSTART.read_text() + "\ntracking: " + "{a: " * depth + "1" + "}" * depth)
    assert "deep.yaml" in refusal(path)


def test_config_load_a_relative_file_or_run_says_where_it_was_looked_for(tmp_path, monkeypatch):
    from roll.tracking.run_directory import RunDirectory

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"'none\.yaml' does not exist \(looked for from '{tmp_path}'\)"):
        load_config("none.yaml")
    with pytest.raises(RunDirectoryError, match=rf"there is no run 'runs/x' \(looked for from '{tmp_path}'\)"):
        RunDirectory.open("runs/x")


def test_config_load_a_path_object_is_text():
    assert load_config(changed() | {"output_dir": Path("a") / "b"}).output_dir == "a/b"


def test_config_load_a_message_does_not_grow_without_end():
    message = refusal(changed() | {f"unknown_{i}": i for i in range(100)})
    assert len(message.splitlines()) == MAX_LINES + 2
    assert message.endswith("... and 80 more")


def test_config_load_keys_with_odd_characters_stay_on_their_line():
    message = refusal(changed() | {"a\nb": 1})
    assert "unknown key 'a\\nb'" in message
    assert "\n" not in message


def test_config_load_a_run_keeps_what_it_is_when_it_is_continued(tmp_path):
    with pytest.raises(RunDirectoryError, match="is not a run"):
        load_run_config(tmp_path)
    (tmp_path / "config.yaml").write_text(dump_yaml(load_config(QUICKSTART)))
    assert load_run_config(tmp_path, ["training.num_steps=80"]).training.num_steps == 80
    with pytest.raises(ConfigError, match=r"'model\.path' is 'smollm2-135m-instruct' in this run and cannot change"):
        load_run_config(tmp_path, ["model.path=other"])
    with pytest.raises(ConfigError, match="'name' is 'quickstart' in this run and cannot change"):
        load_run_config(tmp_path, ["name=other"])
    with pytest.raises(ConfigError, match=r"'training\.optimizer' is 'adamw' in this run and cannot change"):
        load_run_config(tmp_path, ["training.optimizer=adamw_8bit"])


@pytest.mark.parametrize("overrides", [["pipeline=sft"], {"pipeline": "sft"}, ["training.num_steps=80", "pipeline=no"]])
def test_config_load_resume_with_another_pipeline_is_refused_in_one_line(tmp_path, overrides):
    (tmp_path / "config.yaml").write_text(dump_yaml(load_config(QUICKSTART)))
    with pytest.raises(
        ConfigError, match=r"'pipeline' is 'rlvr' in this run and cannot change to '(sft|no)'"
    ) as caught:
        load_run_config(tmp_path, overrides)
    assert "\n" not in str(caught.value)
    assert load_run_config(tmp_path, ["pipeline=rlvr"]).pipeline == "rlvr"


def test_config_load_a_range_is_written_as_a_list():
    config = load_config(
        QUICKSTART, ["rollout.scheduling.early_stop_groups=true", "rollout.scheduling.reward_range=[0, 1]"]
    )
    assert config.rollout.scheduling.reward_range == (0.0, 1.0)
    assert load_config(dump_config(config)).rollout.scheduling.reward_range == (0.0, 1.0)
    with pytest.raises(ConfigError, match=r"reward_range"):
        load_config(QUICKSTART, ["rollout.scheduling.reward_range=[0, 1, 2]"])


def test_config_load_a_number_too_long_to_be_written_is_named():
    assert "got a number that is too long" in refusal(changed() | {"name": [16**5000]})


def test_config_load_epochs_have_an_end():
    tree = {"pipeline": "sft", "name": "x", "model": "m", "data": [{"source": "arithmetic"}]}
    config = load_config(tree | {"training": {"num_epochs": 1_000_000, "num_steps": 5}})
    assert config.training.with_num_steps(10).num_steps == 5
    assert "must be a number > 0 and <= 1000000, or null" in refusal(tree | {"training": {"num_epochs": 1e308}})
