"""What users name as they like stays in its place on the card."""

from __future__ import annotations

from roll.config.pipelines import PIPELINES
from roll.pipelines.model_card import _method_of, _public_name, _settings, _use


def test_model_card_odd_names_break_no_table() -> None:
    rewards = [{"type": "python", "name": "half|full\n"}, {"type": "math"}]
    rows = list(_settings({"data": [{"domain": "a|b`\n## owned", "reward": rewards}]}))
    assert r"| data `a\|b' ## owned` | rewards: half\|full, math |" in rows
    assert not any("\n" in row for row in rows)
    assert _public_name("odd`\nname") == "`odd' name`"


def test_model_card_an_adapter_says_how_it_is_put_on_its_base() -> None:
    ours = list(_use("smollm2-135m-instruct"))
    assert 'base = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2-135m-instruct"))' in ours
    assert 'base = AutoModelForCausalLM.from_pretrained("me/model")' in list(_use("me/model"))
    assert 'base = AutoModelForCausalLM.from_pretrained("mine")' in list(_use("/home/me/mine"))
    scorer = list(_use("me/model", scores=True))
    assert 'base = AutoModelForSequenceClassification.from_pretrained("me/model", num_labels=1)' in scorer
    for lines in (scorer, _use("smollm2-135m-instruct"), _use("me/model")):
        compile("\n".join(line for line in lines if not line.startswith("```")), "card", "exec")


def test_model_card_what_was_learnt_by_is_said_of_every_pipeline() -> None:
    from_rewards = {name for name in PIPELINES if _method_of({"pipeline": name}) == "reinforcement learning"}
    assert from_rewards == {"rlvr", "agentic"}
    assert _method_of({"pipeline": "distill_offline"}) == _method_of({"pipeline": "distill"}) == "distillation"


def test_model_card_a_run_on_examples_says_no_steps_that_it_had_not_and_no_rewards() -> None:
    config = {"data": [{"source": "file", "domain": ""}], "training": {"num_steps": 0, "num_epochs": 2.0}}
    assert list(_settings(config))[4:] == ["| `training.num_epochs` | 2.0 |", "| data `file` | examples |", ""]
    assert "| `training.num_steps` | 3 |" in list(_settings({"training": {"num_steps": 3}}))
