"""TRL's configurations: every key of its dataclasses has a rule, and the run means the same."""

import dataclasses
import json
from pathlib import Path

import pytest

from roll.cli.migration.trl import TRAINERS, TRL_VERSION, from_trl
from roll.config.load import load_config
from roll.errors import ConfigError

pytestmark = pytest.mark.integration

GRPO = {
    "model_name_or_path": "some/model",
    "dataset_name": "some/set",
    "reward_funcs": ["accuracy_reward"],
    "num_generations": 8,
    "max_steps": 100,
}


def converted(tmp_path: Path, values: dict, **said):
    path = tmp_path / "trl.json"
    path.write_text(json.dumps(values))
    result = from_trl(path, **said)
    return result, load_config(result.tree)


def dataclass_defaults(*kinds) -> dict:
    found = {}
    for kind in kinds:
        for field in dataclasses.fields(kind):
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            found[field.name] = default
    return found


@pytest.mark.parametrize("trainer", TRAINERS)
def test_migration_trl_every_key_of_trl_has_one_rule_with_its_default(trainer):
    trl = pytest.importorskip("trl")
    from trl.scripts.grpo import GRPOScriptArguments
    from trl.scripts.utils import DatasetMixtureConfig

    assert trl.__version__.startswith(TRL_VERSION)
    kind = {"grpo": trl.GRPOConfig, "sft": trl.SFTConfig, "dpo": trl.DPOConfig, "reward": trl.RewardConfig}[trainer]
    script = GRPOScriptArguments if trainer == "grpo" else trl.ScriptArguments
    theirs = dataclass_defaults(trl.ModelConfig, script, DatasetMixtureConfig, kind)
    ours = {rule.key: rule.default for rule in TRAINERS[trainer]}
    assert len(ours) == len(TRAINERS[trainer]), "a key has two rules"
    assert sorted(ours) == sorted(theirs)
    different = {key: (ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]}
    assert different == {}


def test_migration_trl_batches_are_counted_as_grpo_config_counts_them(tmp_path):
    trl = pytest.importorskip("trl")
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8}
    theirs = trl.GRPOConfig(output_dir=str(tmp_path), num_generations=8, bf16=False, report_to=[], **sizes)
    _, config = converted(tmp_path, GRPO | sizes)
    assert config.rollout.prompts_per_step * config.rollout.group_size == theirs.generation_batch_size == 32
    assert config.algorithm.updates.num_minibatches == 8 // 2
    assert config.training.num_steps == 25  # 100 updates, 4 of each generation


def test_migration_trl_processes_multiply_the_batch(tmp_path):
    _, config = converted(tmp_path, GRPO | {"gradient_accumulation_steps": 4}, processes=6)
    assert config.rollout.prompts_per_step == 6 * 8 * 4 // 8


@pytest.mark.parametrize(
    ("kind", "gate", "aggregation"),
    [
        ("grpo", "min_clip", "sequence_mean"),
        ("dapo", "min_clip", "token_mean"),
        ("bnpo", "min_clip", "token_mean"),
        ("dr_grpo", "min_clip", "constant_length"),
        ("luspo", "min_clip", "sequence_sum"),
        ("cispo", "stop_gradient", "token_mean"),
        ("sapo", "soft", "sequence_mean"),
    ],
)
def test_migration_trl_a_loss_type_becomes_gate_and_aggregation(tmp_path, kind, gate, aggregation):
    _, config = converted(tmp_path, GRPO | {"loss_type": kind})
    assert (config.algorithm.gate.type, config.algorithm.aggregation) == (gate, aggregation)


def test_migration_trl_the_clip_is_the_same_on_both_sides(tmp_path):
    _, config = converted(tmp_path, GRPO | {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 4.0})
    gate = config.algorithm.gate
    assert (gate.type, gate.low, gate.high, gate.bound) == ("dual_clip", 0.1, 0.3, 4.0)
    _, config = converted(tmp_path, GRPO | {"loss_type": "cispo", "epsilon_high": 5.0})
    assert (config.algorithm.gate.lower, config.algorithm.gate.upper) == (0.0, 5.0)


def test_migration_trl_what_trl_does_by_default_and_roll_does_not_is_written(tmp_path):
    """Groups that all agree count, there is no correction without vLLM, the rate decays, and the optimiser's rate."""
    _, config = converted(tmp_path, GRPO)
    assert not config.algorithm.filters.skip_zero_variance
    assert config.algorithm.correction.upper is None
    assert (config.training.schedule, config.training.learning_rate) == ("linear", 1e-6)
    assert config.algorithm.aggregation == "token_mean"
    assert config.data[0].held_out == 0


def test_migration_trl_sequence_masks_of_vllm_are_masks(tmp_path):
    _, config = converted(tmp_path, GRPO | {"use_vllm": True})
    correction = config.algorithm.correction
    assert (correction.level, correction.upper, correction.mask_high) == ("sequence", 3.0, 3.0)


def test_migration_trl_warm_up_counts_steps_of_roll(tmp_path):
    """10 of 100 updates, and a tenth of them: both are 5 of the 50 steps with two updates each."""
    for warmup in (10, 0.1):
        _, config = converted(tmp_path, GRPO | {"num_iterations": 2, "warmup_steps": warmup})
        assert (config.training.num_steps, config.training.warmup_steps) == (50, 5)


def test_migration_trl_epochs_need_the_number_of_rows(tmp_path):
    epochs = {key: value for key, value in GRPO.items() if key != "max_steps"} | {"num_train_epochs": 2}
    with pytest.raises(ConfigError, match="--rows"):
        converted(tmp_path, epochs)
    _, config = converted(tmp_path, epochs, rows=50)
    assert config.training.num_steps == 100  # one prompt of 8 answers in each


def test_migration_trl_a_share_of_steps_by_its_older_name_is_warm_up(tmp_path):
    """transformers 4 takes a fraction of all steps where warmup_steps is 0, and ignores it elsewhere."""
    _, config = converted(tmp_path, GRPO | {"num_iterations": 2, "warmup_ratio": 0.1})
    assert (config.training.num_steps, config.training.warmup_steps) == (50, 5)
    _, config = converted(tmp_path, GRPO | {"warmup_steps": 7, "warmup_ratio": 0.1})
    assert config.training.warmup_steps == 7
    _, config = converted(tmp_path, GRPO | {"warmup_ratio": 1.0})
    assert config.training.warmup_steps == 100
    with pytest.raises(
        ConfigError, match=r"'warmup_ratio' is 1\.5: it is a fraction of all steps and must be between 0 and 1"
    ):
        converted(tmp_path, GRPO | {"warmup_ratio": 1.5})
    texts = {"model_name_or_path": "some/model", "dataset_name": "chats.jsonl", "warmup_ratio": 0.1}
    result, _ = converted(tmp_path, texts, trainer="sft")
    assert "set --rows" in next(said.text for said in result.unsupported_keys if said.key == "warmup_ratio")
    _, config = converted(tmp_path, texts, trainer="sft", rows=800)
    assert config.training.warmup_steps == 30  # 3 epochs of 100 steps


def test_migration_trl_the_longest_prompt_of_older_versions_is_spoken_of(tmp_path):
    result, _ = converted(tmp_path, GRPO | {"max_prompt_length": 512})
    (said,) = [said for said in result.unsupported_keys if said.key == "max_prompt_length"]
    assert "prompts are never truncated" in said.text and "inference.max_context" in said.text
    assert "max_prompt_length=512" in result.format_report()
    result, _ = converted(tmp_path, GRPO | {"max_prompt_length": None})
    assert "max_prompt_length" not in {said.key for said in result.unsupported_keys}


def test_migration_trl_keys_that_were_renamed_are_read_and_spoken_of_by_the_name_in_the_file(tmp_path):
    texts = {"model_name_or_path": "some/model", "dataset_name": "chats.jsonl", "max_seq_length": 77}
    result, config = converted(tmp_path, texts | {"torch_dtype": "bfloat16"}, trainer="sft")
    assert config.training.max_example_tokens == 77
    assert {"max_seq_length", "torch_dtype"} <= {each.key for each in result.results if each.in_file}
    result, config = converted(tmp_path, texts | {"max_length": 88}, trainer="sft")
    assert config.training.max_example_tokens == 88
    assert "max_seq_length" in {said.key for said in result.unsupported_keys}


def test_migration_trl_all_problems_of_a_file_are_told_at_once(tmp_path):
    values = {"reward_funcs": ["nowhere", 7], "temperature": "warm", "beta": [1], "reward_weights": [1]}
    with pytest.raises(ConfigError) as caught:
        converted(tmp_path, values)
    lines = str(caught.value).splitlines()
    parts = ("model_name_or_path", "'temperature'", "'beta'", "reward_funcs", "dataset_name", "--rows")
    assert lines[0] == f"TRL's trl.json (grpo) has {len(lines) - 1} problems:"
    for part in parts:
        assert sum(part in line for line in lines) == 1, (part, lines)
    assert len(lines) == len(parts) + 1


def test_migration_trl_reward_models_are_converted(tmp_path):
    values = {"model_name_or_path": "some/model", "dataset_name": "pairs.jsonl", "center_rewards_coefficient": 0.01}
    _, config = converted(tmp_path, values)
    assert (config.pipeline, config.reward_model.centering, config.data[0].too_long) == ("reward_model", 0.01, "skip")
    assert (config.training.learning_rate, config.training.examples_per_step) == (1e-4, 8)


def test_migration_trl_rewards_keep_their_weights_and_columns(tmp_path):
    names = ["accuracy_reward", "think_format_reward", "mine.rewards.short"]
    result, config = converted(tmp_path, GRPO | {"reward_funcs": names, "reward_weights": [1.0, 0.5, 0.25]})
    source = config.data[0]
    assert [(reward.type, reward.weight) for reward in source.reward] == [
        ("math", 1.0),
        ("format", 0.5),
        ("python", 0.25),
    ]
    assert source.answer_key == "solution"
    assert source.reward[2].function == "mine.rewards:short"
    assert any(said.key == "reward_funcs" and "rewritten" in said.text for said in result.unsupported_keys)


def test_migration_trl_rank_stabilised_adapters_have_the_same_scale(tmp_path):
    lora = {"use_peft": True, "lora_r": 16, "lora_alpha": 8, "use_rslora": True, "lora_target_modules": ["q_proj"]}
    _, config = converted(tmp_path, GRPO | lora)
    assert config.model.lora.compute_scale("model.layers.0.self_attn.q_proj") == 8 / 16**0.5


@pytest.mark.parametrize(
    ("key", "value"),
    [("loss_type", "vespo"), ("min_p", 0.1), ("sync_ref_model", True), ("fp16", True), ("top_entropy_quantile", 0.2)],
)
def test_migration_trl_what_cannot_be_converted_is_said(tmp_path, key, value):
    result, _ = converted(tmp_path, GRPO | {key: value})
    assert key in {said.key for said in result.unsupported_keys}
    assert f"#   {key}: " in result.format_yaml()


def test_migration_trl_every_key_of_the_file_is_spoken_of_once(tmp_path):
    result, _ = converted(tmp_path, GRPO | {"logging_steps": 1, "epsilon": 0.2, "no_such_key": 3})
    given = [each.key for each in result.results if each.in_file]
    assert sorted(given) == sorted([*GRPO, "logging_steps", "epsilon", "no_such_key"])


def test_migration_trl_sft_keeps_batch_length_and_epochs(tmp_path):
    values = {"model_name_or_path": "some/model", "dataset_name": "chats.jsonl", "packing": False, "max_length": 512}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "num_train_epochs": 2}
    result, config = converted(tmp_path, values | sizes)
    training = config.training
    assert (config.pipeline, training.examples_per_step, training.num_epochs) == ("sft", 16, 2)
    assert (training.max_example_tokens, training.learning_rate) == (512, 2e-5)
    assert [said.key for said in result.unsupported_keys] == ["assistant_only_loss"]


@pytest.mark.parametrize(
    ("theirs", "ours", "settings"),
    [
        ({"loss_type": ["sigmoid"], "beta": 0.2}, "dpo", {"beta": 0.2}),
        ({"loss_type": ["ipo"]}, "ipo", {"beta": 0.1}),
        ({"loss_type": ["robust"], "label_smoothing": 0.2}, "robust", {"label_smoothing": 0.2}),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, "dpo", {"likelihood": 0.5}),
        ({"loss_type": "sppo_hard"}, "sppo", {"beta": 0.1}),
    ],
)
def test_migration_trl_dpo_losses_are_methods(tmp_path, theirs, ours, settings):
    values = {"model_name_or_path": "some/model", "dataset_name": "pairs.jsonl", "max_steps": 5}
    _, config = converted(tmp_path, values | theirs, trainer="dpo")
    assert config.preference.type == ours
    given = config.preference.settings | config.preference.pairwise_settings
    assert {key: given[key] for key in settings} == settings


def test_migration_trl_a_file_that_fits_several_trainers_is_asked_about(tmp_path):
    with pytest.raises(ConfigError, match="--trainer"):
        converted(tmp_path, {"model_name_or_path": "some/model", "dataset_name": "rows.jsonl"})


def test_migration_trl_one_reward_function_needs_no_list(tmp_path):
    _, alone = converted(tmp_path, GRPO | {"reward_funcs": "accuracy_reward"})
    assert alone == converted(tmp_path, GRPO)[1]
    with pytest.raises(
        ConfigError, match=r"reward_funcs must be a list of names, such as \[accuracy_reward\], got '7'"
    ):
        converted(tmp_path, GRPO | {"reward_funcs": 7})
