"""What users name as they like stays in its place on the card."""

from __future__ import annotations

from roll.pipelines.model_card import _settings, _shown, _use


def test_odd_names_break_no_table() -> None:
    rewards = [{"type": "python", "name": "half|full\n"}, {"type": "math"}]
    rows = list(_settings({"data": [{"domain": "a|b`\n## owned", "reward": rewards}]}))
    assert r"| data `a\|b' ## owned` | rewards: half\|full, math |" in rows
    assert not any("\n" in row for row in rows)
    assert _shown("odd`\nname") == "`odd' name`"


def test_an_adapter_says_how_it_is_put_on_its_base() -> None:
    ours = list(_use("smollm2-135m-instruct"))
    assert 'base = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2-135m-instruct"))' in ours
    assert 'base = AutoModelForCausalLM.from_pretrained("me/model")' in list(_use("me/model"))
    assert 'base = AutoModelForCausalLM.from_pretrained("mine")' in list(_use("/home/me/mine"))
    for name in ("smollm2-135m-instruct", "me/model"):
        compile("\n".join(line for line in _use(name) if not line.startswith("```")), "card", "exec")
