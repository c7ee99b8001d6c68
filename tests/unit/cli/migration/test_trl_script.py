"""Python scripts for TRL: read by their syntax, never run; what is not a constant is listed with its line."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll.cli.migration.trl import from_trl
from roll.cli.migration.trl_script import ParsedScript, read_script
from roll.config.load import load_config
from roll.errors import ConfigError

GRPO = """\
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.rewards import accuracy_reward

    {before}
    training_args = GRPOConfig(max_steps=100, {arguments})
    {between}
    trainer = GRPOTrainer(
        model="some/model",
        reward_funcs=accuracy_reward,
        args=training_args,
        train_dataset=load_dataset("some/set", split="train"),
        {further}
    )
    trainer.train()
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


def script(
    tmp_path: Path, arguments: str = "", *, before: str = "", between: str = "", further: str = ""
) -> ParsedScript:
    """What is read of a script for GRPO, whose line 6 has the arguments."""
    text = textwrap.dedent(GRPO).format(arguments=arguments, before=before, between=between, further=further)
    return read_script(written(tmp_path, text))


def unread(found: ParsedScript) -> dict[str, str]:
    return {said.key: said.text for said in found.unreadable}


def test_migration_trl_script_is_converted_with_its_model_data_rewards_and_adapters(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """\
        import torch
        from datasets import load_dataset
        from peft import LoraConfig
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig as Config, GRPOTrainer
        from trl.rewards import accuracy_reward
        import mine.rewards
        from mine.rewards import short

        MODEL = "some/model"
        BATCH = 4 * 2
        COMMON = {"beta": 0.04, "num_generations": 8}
        raise SystemExit("a script that is only read may say this")

        def own(completions, **kwargs):
            return [1.0 for _ in completions]

        def main():
            model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.bfloat16, device_map="auto")
            args = Config(
                f"runs/{'grpo'}-x",
                learning_rate=2e-6,
                per_device_train_batch_size=BATCH,
                max_steps=50,
                warmup_ratio=0.1,
                **COMMON,
            )
            trainer = GRPOTrainer(
                model,
                [accuracy_reward, own, short],
                args=args,
                train_dataset=load_dataset("some/set", "main", split="train").shuffle(seed=1),
                processing_class=AutoTokenizer.from_pretrained(MODEL),
                peft_config=LoraConfig(r=16, target_modules=["q_proj"], bias="none"),
            )
            trainer.train()

        if __name__ == "__main__":
            main()
        """,
    )
    result = from_trl(path)
    config = load_config(result.tree)
    assert (config.pipeline, config.name, config.output_dir, config.model.path) == (
        "rlvr",
        "grpo-x",
        "runs",
        "some/model",
    )
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.training.num_steps) == (1, 8, 50)
    assert (config.training.learning_rate, config.training.warmup_steps) == (2e-6, 5)
    assert config.algorithm.kl.coefficient == 0.04
    lora = config.model.lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.target_modules) == (16, 8.0, 0.0, ["q_proj"])  # alpha is peft's
    (source,) = config.data
    assert (source.path, source.name, source.answer_key) == ("some/set", "main", "solution")
    assert [getattr(reward, "function", None) for reward in source.reward] == [None, "train:own", "mine.rewards:short"]
    assert [said.key for said in result.unsupported_keys] == ["reward_funcs", "use_bias_correction_kl"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-1e-5", -1e-5),
        ("+2", 2),
        ("True", True),
        ("None", None),
        ("2 * 3 + 4", 10),
        ("7 // 2", 3),
        ("7 % 4", 3),
        ("1 / 4", 0.25),
        ("'a' 'b'", "ab"),
        ("'a' + 'b'", "ab"),
        ("f'{1}-x'", "1-x"),
        ("[1, (2, 'x')]", [1, [2, "x"]]),
        ("{'a': [1], **{'b': 2}}", {"a": [1], "b": 2}),
        ("{'a': {'b': 5}}['a']['b']", 5),
        ("[4, 5][1]", 5),
    ],
)
def test_migration_trl_script_constants_are_read(tmp_path: Path, text: str, value: Any) -> None:
    for found in (script(tmp_path, f"key={text}"), script(tmp_path, "key=X", before=f"X = {text}")):
        assert (found.values["key"], found.unreadable) == (value, [])
        assert type(found.values["key"]) is type(value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("os.environ['LR']", "`os.environ` is known only at run time"),
        ("int('3')", "known only at run time"),
        ("1 if x else 2", "known only at run time"),
        ("lambda: 1", "known only at run time"),
        ("[x for x in (1, 2)]", "known only at run time"),
        ("2 ** 10", "known only at run time"),
        ("1 << 4", "known only at run time"),
        ("'a' * 3", "known only at run time"),
        ("True + 1", "known only at run time"),
        ("b'x'", "known only at run time"),
        ("...", "known only at run time"),
        ("[*range(2)]", "known only at run time"),
        ("{1: 2}", "the key `1` is not a string"),
        ("{**1}", "is not a dictionary"),
        ("-'a'", "is not a number"),
        ("1 / 0", "cannot be evaluated (division by zero)"),
        ("[1][3]", "cannot be evaluated without running the script"),
        ("f'{1:>3}'", "formatted at run time"),
        ("nowhere", "`nowhere` is not assigned in the script"),
        ("load_dataset", "`load_dataset` is imported (line 1)"),
    ],
)
def test_migration_trl_script_lists_what_only_a_run_would_know(tmp_path: Path, text: str, why: str) -> None:
    found = script(tmp_path, f"key={text}")
    assert "key" not in found.values
    assert unread(found)["key"].startswith("line 6: ") and why in unread(found)["key"]


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("X = 1; X = 2", "is assigned on lines 5, 5"),
        ("X = 1; X += 1", "is assigned on lines 5, 5"),
        ("if a: X = 1", "conditionally"),
        ("while a: X = 1", "conditionally or in a loop"),
        ("for X in (1, 2): pass", "is not assigned as one value (line 5)"),
        ("with open('f') as X: pass", "is not assigned as one value"),
        ("X, Y = 1, 2", "is not assigned as one value"),
        ("print(X := 1)", "is not assigned as one value"),
        ("import X", "is imported"),
        ("def X(): pass", "is defined in the script"),
        ("X = 1; del X", "is assigned on lines 5, 5"),
        ("X = Y; Y = X", "is defined in terms of itself"),
        ("X = [X]", "nested too deeply|defined"),
        ("X = 1; from settings import *", "may be replaced by `import *` on line 5"),
        ("X = [1]; X.append(2)", "may be changed on line 5"),
        ("X = {'a': 1}; X['a'] = 2", "may be changed on line 5"),
        ("X = {'a': {}}; X['a']['b'] = 2", "may be changed on line 5"),
        ("X = [1]; Y = X", "may be changed on line 5"),
        ("X = [1]; change(X)", "may be changed on line 5"),
        ("X = 1\ndef f():\n    global X\n    X = 2", "is assigned on lines 5, 7"),
        ("try:\n    X = 1\nexcept E:\n    pass", "conditionally"),
        ("class A:\n    X = 1", "is not assigned"),
        ("def f(X): pass", "is not assigned"),
    ],
)
def test_migration_trl_script_never_guesses_what_a_name_stands_for(tmp_path: Path, before: str, why: str) -> None:
    if "|" in why:  # it names itself without end
        with pytest.raises(ConfigError, match=why):
            script(tmp_path, "key=X", before=before)
        return
    found = script(tmp_path, "key=X", before=before)
    assert "key" not in found.values
    assert why in unread(found)["key"]


def test_migration_trl_script_takes_the_name_of_the_nearest_function(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """\
        from trl import SFTConfig
        lr = 1
        def main():
            lr = 2
            def inner():
                return SFTConfig(learning_rate=lr)
        def other():
            lr = 3
        """,
    )
    assert read_script(path).values == {"learning_rate": 2}


def test_migration_trl_script_arguments_that_are_set_later_are_listed(tmp_path: Path) -> None:
    found = script(tmp_path, "beta=0.1, epsilon=0.3", between="training_args.beta = 0.2")
    assert "beta" not in found.values and found.values["epsilon"] == 0.3
    assert unread(found) == {
        "beta": "line 7: the value is set after `training_args` was created; pass it to the call that creates "
        "`training_args`"
    }
    found = script(tmp_path, between="training_args.set_lr_scheduler(); setattr(training_args, 'beta', 1)")
    assert list(unread(found)) == ["training_args.set_lr_scheduler", "setattr(training_args, …)"]
    found = script(tmp_path, between="training_args = replace(training_args, beta=1)")
    assert list(unread(found)) == ["args"] and "beta" not in found.values


@pytest.mark.parametrize(
    ("before", "arguments", "key"),
    [
        ("", "**make()", "**make()"),
        ("X = {'beta': 1}; X.update(y)", "**X", "**X"),
        ("X = [('beta', 1)]", "**X", "**X"),
    ],
)
def test_migration_trl_script_unknown_dictionaries_of_arguments_are_listed(
    tmp_path: Path, before: str, arguments: str, key: str
) -> None:
    assert list(unread(script(tmp_path, arguments, before=before))) == [key]


def test_migration_trl_script_further_arguments_of_the_trainer_are_listed_by_name(tmp_path: Path) -> None:
    found = script(tmp_path, further="callbacks=[print], optimizers=None, peft_config=make(), eval_dataset=rows,")
    assert sorted(unread(found)) == ["callbacks", "eval_dataset", "peft_config"]


@pytest.mark.parametrize(
    ("rows", "given_keys", "lost"),
    [
        ("load_dataset('a/b', split='train')", {"dataset_name": "a/b", "dataset_train_split": "train"}, []),
        ("load_dataset('a/b')['train']", {"dataset_name": "a/b", "dataset_train_split": "train"}, []),
        ("load_dataset('json', data_files='x.jsonl', split='train')", {"dataset_name": "x.jsonl"}, []),
        ("load_dataset('a/b', split='s').filter(f).map(g)", {"dataset_train_split": "s"}, [".filter", ".map"]),
        ("load_dataset('a/b', revision='r')", {}, ["revision"]),
        ("load_dataset('json', data_files={'train': 'x.jsonl'})", {}, ["not load exactly one file"]),
        ("load_dataset('json', data_files='x.json')", {}, ["not load exactly one file"]),
        ("Dataset.from_list([])", {}, ["is not a call of load_dataset"]),
        ("rows", {}, ["is not assigned"]),
    ],
)
def test_migration_trl_script_rows_are_those_of_load_dataset(
    tmp_path: Path, rows: str, given_keys: dict[str, Any], lost: list[str]
) -> None:
    path = written(
        tmp_path, f"from datasets import Dataset\nSFTTrainer('some/model', train_dataset={rows}, args=SFTConfig())"
    )
    found = read_script(path)
    assert given_keys.items() <= found.values.items()
    assert ("dataset_name" in found.values) == bool(given_keys)
    assert len(found.unreadable) == len(lost)
    assert all(part in said.text for part, said in zip(lost, found.unreadable, strict=True))


def test_migration_trl_script_rows_that_are_assigned_anew_from_themselves_are_followed(tmp_path: Path) -> None:
    text = """\
        rows = load_dataset("a/b")
        rows = rows["train"].shuffle(seed=1)
        rows = rows.map(f)
        DPOTrainer("some/model", args=DPOConfig(), train_dataset=rows)
        """
    found = read_script(written(tmp_path, text))
    assert (found.values["dataset_name"], found.values["dataset_train_split"]) == ("a/b", "train")
    assert [said.text.partition(":")[0] for said in found.unreadable] == ["line 3"]
    other = text.replace("rows = rows.map(f)", "rows = make(rows)")
    assert "dataset_name" not in read_script(written(tmp_path, other)).values


def test_migration_trl_script_reward_models_come_first_or_are_listed(tmp_path: Path) -> None:
    call = "GRPOTrainer('m', reward_funcs={rewards}, args=GRPOConfig())"
    found = read_script(written(tmp_path, call.format(rewards="['a/scorer']")))
    assert found.values["reward_model_name_or_path"] == "a/scorer"
    found = read_script(written(tmp_path, "def f(): pass\n" + call.format(rewards="[f, 'a/scorer', g, lambda: 0]")))
    assert found.values["reward_funcs"] == ["train.f"]
    assert list(unread(found)) == ["reward_funcs[1]", "reward_funcs[2]", "reward_funcs[3]"]


def test_migration_trl_script_trainers_of_its_own_are_named(tmp_path: Path) -> None:
    text = "import trl\nclass Mine(trl.SFTTrainer):\n    pass\nMine('some/model', trl.SFTConfig(learning_rate=1))"
    found = read_script(written(tmp_path, text))
    assert (found.trainer, found.values["learning_rate"]) == ("sft", 1)
    assert unread(found) == {"Mine": "line 2: the methods of a class defined in the script are not converted"}


@pytest.mark.parametrize(
    ("before", "text"),
    [
        ("from mine import SFTConfig", "line 1: imported from `mine` and treated as TRL's class"),
        ("class SFTConfig(Base): pass", "line 1: the class defined in the script is treated as TRL's class"),
        ("from trl.trainer.sft_config import SFTConfig", ""),
    ],
)
def test_migration_trl_script_classes_of_the_same_name_from_elsewhere_are_listed(
    tmp_path: Path, before: str, text: str
) -> None:
    found = read_script(written(tmp_path, before + "\nSFTConfig(learning_rate=1)"))
    assert unread(found) == ({"SFTConfig": text} if text else {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "does not call a supported trainer of TRL. Supported: GRPOTrainer, SFTTrainer, DPOTrainer, Reward"),
        ("KTOTrainer(model)", r"train\.py:1: KTOTrainer is not supported"),
        ("SFTTrainer(a)\nDPOTrainer(b)", r"creates 2 trainers \(lines 1, 2\)"),
        ("SFTConfig()\nSFTConfig()", r"creates 2 configurations \(lines 1, 2\)"),
        ("def f(:", r"train\.py:1: the file is not valid Python"),
        ("a\0b", "is not a Python script|is not valid Python"),
        ("(" * 5000 + ")" * 5000, "nested|not Python"),
        ("+".join("1" * 20_000), "nested too deeply"),
        ("x" * (2**20 + 1), "exceeds 1,048,576 bytes"),
    ],
)
def test_migration_trl_script_files_that_are_none_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_script(path)
    assert str(caught.value).startswith(str(path)) and str(caught.value).count(str(path)) == 1
    with pytest.raises(ConfigError, match="cannot be read"):
        read_script(tmp_path / "none.py")


@pytest.mark.parametrize(
    "doubling",
    [
        "\n".join(["a0 = 'x'", *(f"a{i + 1} = a{i} + a{i}" for i in range(200)), "SFTConfig(key=a200)"]),
        "\n".join(["a0 = 9", *(f"a{i + 1} = a{i} * a{i}" for i in range(200)), "SFTConfig(key=a200)"]),
        "\n".join(["a0 = 9", *(f"a{i + 1} = {{'a': a{i}, 'b': a{i}}}" for i in range(200)), "SFTConfig(key=a200)"]),
    ],
)
def test_migration_trl_script_values_that_double_with_each_line_end_soon(tmp_path: Path, doubling: str) -> None:
    assert list(unread(read_script(written(tmp_path, doubling)))) == ["key"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**40), 2**40)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=3),
        max_leaves=8,
    )
)
def test_migration_trl_script_values_are_those_that_python_gives(tmp_path: Path, value: Any) -> None:
    for text in (f"SFTConfig(key={value!r})", f"X = {value!r}\nSFTConfig(**{{'key': X}})"):
        path = tmp_path / "train.py"
        path.write_text(text, encoding="utf-8")
        found = read_script(path)
        assert (found.values, found.unreadable) == ({"key": value}, [])


def test_migration_trl_script_problems_are_all_listed_with_what_was_not_read(tmp_path: Path) -> None:
    path = written(tmp_path, "GRPOTrainer(model, args=GRPOConfig(temperature='x', learning_rate=lr))")
    with pytest.raises(ConfigError) as caught:
        from_trl(path)
    message = str(caught.value)
    for part in (
        "the key model_name_or_path",
        "'temperature'",
        "one of reward_funcs",
        "one of dataset_name and datasets",
        "--rows",
        "Not converted, or not readable without running the script (write constants",
        "model_name_or_path: line 1: `model` is not assigned",
        "learning_rate: line 1: `lr` is not assigned",
    ):
        assert message.count(part) == 1, part
    said = {"model_name_or_path": "some/model", "temperature": 1, "learning_rate": 1e-5, "max_steps": 5}
    result = from_trl(path, extra_values={**said, "reward_funcs": "accuracy_reward", "dataset_name": "a/b"})
    assert load_config(result.tree).training.learning_rate == 1e-5
    assert "learning_rate" not in {one.key for one in result.unsupported_keys}


def test_migration_trl_script_may_declare_its_encoding(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes("# -*- coding: latin-1 -*-\nSFTConfig(run_name='é')".encode("latin-1"))
    assert read_script(path).values == {"run_name": "é"}
    path.write_bytes(b"\xef\xbb\xbfSFTConfig(run_name='\xc3\xa9')")
    assert read_script(path).values == {"run_name": "é"}
    path.write_bytes(b"SFTConfig(run_name='\xe9')")
    with pytest.raises(ConfigError, match=r"train\.py"):
        read_script(path)


def test_migration_trl_script_and_trainer_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="creates a trainer of type sft, but --trainer is dpo"):
        from_trl(written(tmp_path, "SFTTrainer('m', train_dataset=load_dataset('a/b'))"), trainer="dpo")
