"""verl's configurations: every key of its trainer has a rule, and the run means the same."""

import contextlib
from pathlib import Path

import pytest

from roll.cli.migration.convert import INVALID_VALUE_ERRORS
from roll.cli.migration.rules import LibraryValues, UnsupportedValueError
from roll.cli.migration.verl import from_verl
from roll.cli.migration.verl_file import read_keys
from roll.cli.migration.verl_rules import VERL_RULES
from roll.config.document import parse
from roll.config.load import load_config
from roll.errors import ConfigError

SCRIPT = """\
set -x
MODEL=Qwen/Qwen2-7B-Instruct
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=data/train.parquet data.val_files=data/test.parquet \\
    data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.model.path=${MODEL} \\
    actor_rollout_ref.actor.optim.lr=3e-6 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.rollout.n=5 \\
    trainer.logger='["console","wandb"]' \\
    trainer.total_epochs=15 $@
"""


def converted(tmp_path: Path, text: str, name: str = "run.sh", rows: int | None = 7473):
    path = tmp_path / name
    path.write_text(text)
    result = from_verl(path, rows=rows)
    return result, load_config(result.tree)


def test_migration_verl_every_key_of_verl_has_a_rule():
    """`verl_keys.txt` has the leaves of its generated reference, `_generated_ppo_trainer.yaml`."""
    keys = Path(__file__).with_name("verl_keys.txt").read_text().split()
    assert len(keys) > 400
    assert [key for key in keys if not any(rule.covers(key) for rule in VERL_RULES)] == []


def test_migration_verl_every_single_rule_is_a_key_of_verl_or_of_its_recipes():
    keys = set(Path(__file__).with_name("verl_keys.txt").read_text().split())
    further = {rule.key for rule in VERL_RULES if not rule.key.endswith(".*")} - keys
    recipes = ("algorithm.filter_groups.", "reward_model.overlong_buffer.")
    assert {key for key in further if not key.startswith(recipes)} == set()


def test_migration_verl_an_example_script_means_the_same(tmp_path):
    _, config = converted(tmp_path, SCRIPT)
    assert config.model.path == "Qwen/Qwen2-7B-Instruct"
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (1024, 5)
    assert config.algorithm.updates.num_minibatches == 4
    assert config.training.num_steps == 7473 // 1024 * 15 == 105
    assert config.training.learning_rate == 3e-6
    gate = config.algorithm.gate
    assert (gate.type, gate.low, gate.high, gate.bound) == ("dual_clip", 0.2, 0.2, 3.0)
    assert config.algorithm.aggregation == "token_mean"
    kl = config.algorithm.kl
    assert (kl.coefficient, kl.estimator, kl.apply_to) == (0.002, "k3", "loss")
    assert (config.algorithm.advantage.mean, config.algorithm.advantage.std) == ("group", "group")
    assert not config.algorithm.filters.skip_zero_variance
    assert list(config.cluster.device_mapping.actor_train) == list(range(8))
    assert config.tracking.wandb == "verl_examples"


def test_migration_verl_a_yaml_tree_and_the_overrides_are_read_alike(tmp_path):
    tree = """\
defaults: [ppo_trainer, _self_]
algorithm: {adv_estimator: rloo, use_kl_in_reward: true, kl_penalty: kl, kl_ctrl: {kl_coef: 0.01, type: adaptive}}
actor_rollout_ref:
  actor: {loss_agg_mode: seq-mean-token-sum, use_kl_loss: false, clip_ratio_high: 0.28}
  rollout: {n: 4, tensor_model_parallel_size: 1, prompt_length: "${oc.select:data.max_prompt_length,512}"}
trainer: {total_training_steps: 9, n_gpus_per_node: 1}
"""
    lines = """\
algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=true algorithm.kl_penalty=kl
algorithm.kl_ctrl.kl_coef=0.01 +algorithm.kl_ctrl.type=adaptive
actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.use_kl_loss=false actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.tensor_model_parallel_size=1
trainer.total_training_steps=9 trainer.n_gpus_per_node=1
"""
    one, config = converted(tmp_path, tree, "run.yaml", rows=None)
    other, _ = converted(tmp_path, lines, "run.txt", rows=None)
    assert one.tree == other.tree
    assert config.algorithm.advantage.mean == "leave_one_out"
    assert config.algorithm.aggregation == "sequence_sum"
    kl = config.algorithm.kl
    assert (kl.apply_to, kl.estimator, kl.coefficient, kl.target) == ("reward", "k1", 0.01, 0.1)
    assert config.algorithm.gate.high == 0.28


def test_migration_verl_gae_brings_the_critic(tmp_path):
    _, config = converted(tmp_path, "critic.optim.lr=2e-5 trainer.critic_warmup=3 trainer.total_training_steps=5")
    assert config.algorithm.uses_critic
    assert (config.algorithm.advantage.gae_lambda, config.algorithm.advantage.whiten) == (1.0, "token")
    assert (config.algorithm.critic.learning_rate, config.algorithm.critic.warmup_steps) == (2e-5, 3)


def test_migration_verl_dynamic_sampling_is_refilling(tmp_path):
    text = (
        "algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc "
        "algorithm.filter_groups.max_num_gen_batches=10 actor_rollout_ref.rollout.n=8 trainer.total_training_steps=5"
    )
    _, config = converted(tmp_path, text)
    filters = config.algorithm.filters
    assert (filters.refill, filters.metric, filters.max_refills) == (True, "accuracy", 9)


@pytest.mark.parametrize(
    "override",
    ["algorithm.adv_estimator=grpo_passk", "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", "a.b=1"],
)
def test_migration_verl_what_cannot_be_converted_is_said(tmp_path, override):
    result, _ = converted(tmp_path, f"trainer.total_training_steps=5 actor_rollout_ref.rollout.n=8 {override}")
    assert override.split("=")[0] in {said.key for said in result.unsupported_keys}


def test_migration_verl_epochs_need_the_number_of_rows(tmp_path):
    with pytest.raises(ConfigError, match="--rows"):
        converted(tmp_path, SCRIPT, rows=None)


def test_migration_verl_sums_of_a_script_are_computed_and_what_it_does_not_set_is_said(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(
        "prompts=$((1024 * 2))\nlong=$((1024*4))\n"
        "python3 -m verl.trainer.main_ppo data.train_batch_size=$((prompts / 8)) \\\n"
        "  data.max_response_length=$(( (long + 1) / 2 )) data.max_prompt_length=${prompts} \\\n"
        "  actor_rollout_ref.actor.ppo_mini_batch_size=64 trainer.total_training_steps=3 \\\n"
        "  actor_rollout_ref.model.path=${MODEL} trainer.nnodes=$NODES 'data.train_files=$HOME/x.parquet'\n"
    )
    converted = from_verl(path)
    config = load_config(converted.tree)
    assert (config.rollout.prompts_per_step, config.rollout.max_new_tokens) == (256, 2048)
    assert config.data[0].path.endswith("/x.parquet") and "$" not in config.data[0].path
    lost = {said.key: said.text for said in converted.unsupported_keys}
    assert "resolve $MODEL," in lost["actor_rollout_ref.model.path"]
    assert "resolve $NODES," in lost["trainer.nnodes"]


@pytest.mark.parametrize("text", ["$((2**9**9))", "$((NODES+1))", "$((1/0))", "$(wc -l nodes)"])
def test_migration_verl_what_only_a_shell_knows_is_said(tmp_path, text):
    path = tmp_path / "run.sh"
    path.write_text(f"python3 -m verl.trainer.main_ppo 'trainer.nnodes={text}' trainer.total_training_steps=3\n")
    lost = {said.key: said.text for said in from_verl(path).unsupported_keys}
    assert "only a shell can resolve $(…)" in lost["trainer.nnodes"]


@pytest.mark.parametrize(
    ("overrides", "low", "high"),
    [
        ("", 0.2, 0.2),
        ("_low=null", 0.3, 0.2),
        ("_low=null {}_high=null", 0.3, 0.3),
        ("_low=0.1 {}_high=0.28", 0.1, 0.28),
    ],
)
def test_migration_verl_one_clip_for_both_sides_counts_only_where_a_side_has_none(tmp_path, overrides, low, high):
    """verl's own defaults of both sides, 0.2, go before `clip_ratio` (`actor.yaml`, `compute_policy_loss_vanilla`)."""
    clip = "actor_rollout_ref.actor.clip_ratio"
    sides = f"{clip}{overrides.format(clip)}" if overrides else ""
    _, config = converted(tmp_path, f"{SCRIPT.replace('$@', '')} \\\n {clip}=0.3 {sides}")
    assert (config.algorithm.gate.low, config.algorithm.gate.high) == (low, high)


def test_migration_verl_what_a_key_is_called_stays_in_its_comment(tmp_path):
    hostile = '"a\\nname: other": 1\n"b\\x1b[2J\\u202e": 1\n"%s": 1\n' % ("c" * 1000)
    text = f"trainer:\n  total_training_steps: 5\nactor_rollout_ref:\n  rollout:\n    n: 8\n{hostile}"
    result, _ = converted(tmp_path, text, name="x.yaml")
    assert "\nname: other" not in result.format_yaml()
    for shown in (result.format_yaml(), result.format_report()):
        assert shown.replace("\n", "").isprintable() and len(max(shown.splitlines(), key=len)) < 1100


def test_migration_verl_variables_of_variables_do_not_fill_the_memory(tmp_path):
    lines = ["a0=xxxxxxxxxx", *(f"a{i}={f'$a{i - 1}' * 10}" for i in range(1, 12))]
    with pytest.raises(ConfigError, match="exceeds 100000 characters"):
        converted(tmp_path, "\n".join([*lines, SCRIPT]))


@pytest.mark.parametrize("number", [".inf", ".nan", "1e400", "'x'", "[]", "{a: 1}", "null", "0", "9" * 4000])
def test_migration_verl_no_value_of_a_rule_is_unexpected(number):
    """Values in place of every key's: a rule takes them, or says that they are none."""
    values = {rule.key: rule.default for rule in VERL_RULES if not rule.key.endswith(".*")} | {"rows": 7473}
    hostile = parse(number, "x")[0]
    for rule in VERL_RULES:
        for key in [key for key in values if rule.convert is not None and rule.covers(key)]:
            refused_or_taken(rule, {**values, key: hostile})
        if rule.convert is not None:
            refused_or_taken(rule, dict.fromkeys(values, hostile))


def refused_or_taken(rule, values):
    with contextlib.suppress(UnsupportedValueError, ConfigError, *INVALID_VALUE_ERRORS):
        rule.convert(LibraryValues(values))


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("trainer.nnodes=.inf", "cannot convert float infinity to integer"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=0", "modulo by zero"),
    ],
)
def test_migration_verl_a_value_that_cannot_be_counted_with_is_named(tmp_path, override, why):
    with pytest.raises(ConfigError, match=rf"verl's run\.sh: '[\w.]+' is .*{why}"):
        converted(tmp_path, f"{SCRIPT.replace(' $@', '').strip()} {override}")


@pytest.mark.parametrize(
    "text", ["$((" + "-" * 20_000 + "1))", "$((" + "(" * 20_000 + "))", "${a:-" * 20_000, "$((" * 20_000]
)
def test_migration_verl_sums_and_variables_without_end_are_no_work(tmp_path, text):
    (tmp_path / "run.sh").write_text(f"python3 data.train_batch_size=8 trainer.project_name='{text}'\n")
    assert read_keys(tmp_path / "run.sh").get("trainer.project_name", text) == text


def test_migration_verl_a_file_without_end_is_refused(tmp_path):
    with (tmp_path / "run.sh").open("wb") as file:
        file.truncate(2**20 + 1)
    with pytest.raises(ConfigError, match="exceeds 1 MiB"):
        read_keys(tmp_path / "run.sh")
