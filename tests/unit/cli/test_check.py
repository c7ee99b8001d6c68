"""`roll check`, and the message for every kind of bad input before anything is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from worlds.timing import LOOPS

from roll.cli.main import run
from roll.config.load import load_config
from roll.pipelines.rlvr.check import inspect
from roll.preflight import layout
from roll.preflight.machine import Machine

pytestmark = pytest.mark.integration

EXTENSION = Path(__file__).parents[3] / "examples/extension/src/roll_example"


@pytest.fixture
def place(tmp_path, monkeypatch, tiny_model):
    """A working directory with a configuration of the tiny model."""
    monkeypatch.chdir(tmp_path)
    config = {
        "name": "trial",
        "model": str(tiny_model),
        "data": [{"source": "arithmetic", "reward": "math"}],
        "rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 8},
        "training": {"num_steps": 6},
        "evaluation": {"num_prompts": 3, "samples_per_prompt": 2},
        "inference": {"engine": "hf"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


FROM_FILE = ["data.0.source=file", "data.0.path=rows.jsonl"]


def test_cli_check_a_run_that_can_start_is_described_and_0(place, capsys):
    assert run(["check", "config.yaml"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for words in (
        "trial: rlvr, grpo, 6 steps",
        "actor_train  this process",
        "actor_infer  this process",
        "2 prompts x 4 = 8 rollouts per step, up to 64 generated tokens",
        "evaluation 2 times: 3 prompts x 2 = 6 samples",
        "arithmetic: 57 prompts to train on, 0.21 epochs in the run",
        "runs/trial/",
        "the step time can be measured only after the first step",
        "(correct) scores 1",
        "(incorrect) scores 0",
    ):
        assert words in shown.out


def test_cli_check_a_judge_is_shown_with_its_place_and_its_memory_and_is_not_asked(place, capsys, tmp_path):
    from worlds.tiny_model import write_tiny_model

    write_tiny_model(tmp_path / "judge", context_length=4096)
    asking = ["data.0.reward={type: judge, rubric: quality}", "judge.model=judge", "judge.engine=hf"]
    on_ray = ["cluster.type=ray", "cluster.devices_per_node=4", "cluster.device_mapping.judge=2-3"]
    assert run(["check", "config.yaml", *asking, *on_ray]) == 0
    shown = capsys.readouterr().out
    assert "judge judge: 0 M parameters, bfloat16, hf, context 4,096, frozen" in shown
    assert "judge        node 0 device 2; node 0 device 3  2 " in shown
    assert "the judge answers only during a run, so the reward of arithmetic is not tested." in shown
    assert run(["check", "config.yaml", *asking, "judge.max_context=9000"]) == 2
    assert "judge.max_context must be <= 4096, the context length of the judge, got 9000" in capsys.readouterr().err


def test_cli_check_critics_and_a_reference_are_shown_with_what_they_need(place):
    from worlds.tiny_model import write_tiny_model

    smaller = write_tiny_model(place / "smaller", layers=1)
    own = ["algorithm.type=asy_ppo", f"algorithm.critic.model={smaller}", "algorithm.kl.coefficient=0.1"]
    report = inspect(load_config("config.yaml", own))
    roles = {role.role: role for role in report.memory}
    assert roles["critic"].count == 2
    assert roles["critic"].parts["AdamW"] == 8 * report.critic.num_parameters < roles["actor_train"].parts["AdamW"]
    assert roles["reference"].parts["weights"] == 2 * report.model.num_parameters
    assert not report.problems


def test_cli_check_critics_are_shown_where_they_sit(place, capsys):
    changes = ["cluster.type=ray", "cluster.devices_per_node=4", "cluster.device_mapping.critic=2-3"]
    assert run(["check", "config.yaml", "algorithm.type=ppo", *changes]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("critic ")]
    assert "node 0 device 2; node 0 device 3" in line


def test_cli_check_a_critics_model_that_is_not_here_is_noted(place, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    report = inspect(load_config("config.yaml", ["algorithm.type=ppo", "algorithm.critic.model=nobody/nothing"]))
    assert any("the critics' model 'nobody/nothing' is not on this machine yet" in note for note in report.notes)


def test_cli_check_nothing_is_written(place):
    before = sorted(place.rglob("*"))
    assert run(["check", "config.yaml"]) == 0
    assert sorted(place.rglob("*")) == before


def test_cli_check_it_takes_seconds_and_imports_no_torch(place):
    program = (
        f"{LOOPS}\n"
        "import sys, time\n"
        "from roll.cli.main import run\n"
        "code = run(['check', 'config.yaml'], own_process=True)\n"
        "print('\\n', code, loops(time.process_time()), sys.modules.get('torch'), 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    code, loops, torch, vllm = done.stdout.splitlines()[-1].split()
    assert (code, torch, vllm) == ("0", "None", "False")
    assert float(loops) < 400  # about 100


def test_cli_check_of_every_pipeline_needs_no_torch():
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from roll.pipelines.registry import CHECKS, CONFIGURATIONS\n"
        "print([CHECKS.get(name).__module__ for name in CONFIGURATIONS.built_in_names])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "roll.pipelines.distill_offline.check" in done.stdout


def test_cli_check_the_prompt_is_shown_as_the_model_sees_it(place):
    report = inspect(load_config("config.yaml", FROM_FILE))
    prompt, text, num_tokens = report.sample
    assert prompt.messages[-1].text in text
    assert 0 < num_tokens <= report.longest_prompt
    assert report.train_prompts["file"] + report.num_held_out == 20


def test_cli_check_every_domain_has_its_reward_tried(place):
    report = inspect(
        load_config("config.yaml", ["data.1={source: file, path: rows.jsonl, reward: exact, weight: 0.2}"])
    )
    assert {trial.domain: trial.prefers_correct for trial in report.trials} == {"arithmetic": True, "file": True}
    assert report.problems == []


def test_cli_check_a_reward_that_looks_for_a_box_gets_one(place):
    report = inspect(load_config("config.yaml", ["data.0.reward={type: math, extract: boxed}"]))
    assert report.trials[0].correct_answer.startswith("\\boxed{")
    assert (report.trials[0].correct_reward, report.trials[0].incorrect_reward) == (1.0, 0.0)


def test_cli_check_a_reward_that_cannot_tell_right_from_wrong_is_noted(place, capsys):
    assert run(["check", "config.yaml", "data.0.reward={type: regex, pattern: 'The answer is {answer}'}"]) == 0
    assert "check whether the reward requires" in capsys.readouterr().out


def test_cli_check_what_truncated_sampling_does_to_ratios_is_noted(place):
    (note,) = (n for n in inspect(load_config("config.yaml", ["rollout.top_p=0.9"])).notes if "top_p" in n)
    assert "the correction weights tokens by it" in note


def test_cli_check_an_engine_that_cannot_continue_with_the_same_random_numbers_is_noted(place):
    assert not any("was interrupted" in note for note in inspect(load_config("config.yaml")).notes)
    speculative = ["inference.engine=vllm", "inference.options.speculative_config={num_speculative_tokens: 2}"]
    own = [f"inference.engine={EXTENSION / 'engine.py'}:PlainEngine"]
    for overrides, cause in ((speculative, "speculative decoding"), (own, "does not declare the capability")):
        (note,) = (n for n in inspect(load_config("config.yaml", overrides)).notes if "was interrupted" in n)
        assert cause in note


def test_cli_check_too_little_memory_and_disk_are_noted(place):
    overrides = ["inference.kv_cache_bytes=9000000000000", "checkpoint.keep_best=true"]
    report = inspect(load_config("config.yaml", overrides))
    assert any("GiB free, but the run needs up to" in note for note in report.notes)
    assert report.problems == []


def test_cli_check_roles_that_hand_a_devices_memory_over_need_it_one_after_the_other(place, monkeypatch):
    def looked_at(free, *overrides):
        machine = Machine(num_cores=2, memory_bytes=10**12, accelerator_bytes=(free,))
        monkeypatch.setattr("roll.pipelines.online.check.inspection.inspect_machine", lambda: machine)
        return inspect(load_config("config.yaml", overrides))

    trainer, engine = (role.bytes_total for role in looked_at(10**12).memory)
    assert not any("GiB free" in note for note in looked_at(max(trainer, engine)).notes)
    assert any("device 0 has" in note for note in looked_at(max(trainer, engine) - 1).notes)
    assert any(
        "device 0 has" in note for note in looked_at(trainer + engine - 1, "cluster.sharing=disaggregated").notes
    )
    assert "engines and trainers share devices" in str(looked_at(10**12))


def test_cli_check_places_on_ray_are_listed(place, capsys):
    overrides = ["cluster.type=ray", "cluster.devices_per_node=2", "cluster.num_nodes=2"]
    mapping = ["cluster.device_mapping.actor_train=0-1", "cluster.device_mapping.actor_infer=2-3"]
    assert run(["check", "config.yaml", *overrides, *mapping]) == 0
    shown = capsys.readouterr().out
    assert "node 0 device 0; node 0 device 1" in shown
    assert "node 1 device 0; node 1 device 1" in shown


RANKS = ["cluster.type=ray", "cluster.devices_per_node=4", "cluster.device_mapping.actor_train=0-3"]


def test_cli_check_a_dry_run_says_what_ranks_hold_and_send_and_how_far_it_is(place, capsys, monkeypatch):
    monkeypatch.setattr(layout, "PROGRESS_INTERVAL_S", 0.05)
    assert run(["check", "config.yaml", *RANKS, "training.parallel.tp=2", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "a trainer rank uses 0.00 GiB between steps" in shown
    assert "x all_gather between 2 (tp): 0.00 GiB" in shown


def test_cli_check_a_layout_that_does_not_divide_the_model_is_a_problem(place, capsys):
    assert run(["check", "config.yaml", *RANKS, "training.parallel.tp=4"]) == 2
    assert "num_key_value_heads (2) must be divisible by training.parallel.tp (4)" in capsys.readouterr().err


def test_cli_check_experts_that_are_not_there_are_one_problem(place, capsys):
    assert run(["check", "config.yaml", *RANKS, "training.parallel.ep=2"]) == 2
    assert capsys.readouterr().err.count("is not a mixture of experts") == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.lora.target_modules=[v_prj]", "target_modules has 'v_prj', which is not a linear layer"),
        ("model.lora.target_modules=[lm_head]", "target_modules has 'lm_head', which is not a linear layer"),
        ("model.lora.rank_pattern={v_prj: 4}", "rank_pattern has 'v_prj', which matches no layer with an adapter"),
    ],
)
def test_cli_check_adapters_on_layers_that_are_not_there_are_a_problem(place, capsys, override, message):
    assert run(["check", "config.yaml", override]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["deepspeed", "megatron"])
def test_cli_check_a_back_end_that_is_not_installed_is_a_problem_here_and_a_note_for_a_cluster(
    place, capsys, monkeypatch, name
):
    monkeypatch.setattr(layout, "find_spec", lambda package: None)
    assert run(["check", "config.yaml", f"training.backend={name}"]) == 2
    said = f"training.backend is '{name}', which is not installed here: pip install 'roll-rl[{name}]'"
    assert f"{said}, or set training.backend to 'torch'" in capsys.readouterr().err
    assert run(["check", "config.yaml", f"training.backend={name}", "cluster.type=ray"]) == 0
    assert f"{said} on every machine of the run." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (["training.parallel.ep=2"], "ep is 2, but this model has no experts"),
        (["training.parallel.vpp=2", "training.parallel.pp=2"], "does not support dp_replicate and vpp"),
        (["training.tiled_mlp_tokens=64"], "does not support tiled MLPs"),
        (["model.lora.use_dora=true"], "use_dora requires whole rows of the weights"),
    ],
)
def test_cli_check_megatron_settings_that_it_does_not_support_are_problems(place, capsys, monkeypatch, sizes, message):
    monkeypatch.setattr(layout, "find_spec", lambda package: True)
    assert run(["check", "config.yaml", *RANKS, "training.backend=megatron", *sizes]) == 2
    assert message in capsys.readouterr().err


def test_cli_check_all_problems_of_a_run_come_in_one_look(place, capsys):
    (place / "runs" / "trial").mkdir(parents=True)
    (place / "runs" / "trial" / "config.yaml").write_text("name: trial")
    assert run(["check", "config.yaml", "model=nowhere", "data.0={source: file, path: no.jsonl, reward: exact}"]) == 2
    shown = capsys.readouterr().err
    assert "the run cannot start" in shown
    assert "model 'nowhere'" in shown
    assert "already has a run" in shown
    assert "'no.jsonl' does not exist" in shown


BAD_ROWS = {
    "unknown key": (["training.lerning_rate=1"], "Did you mean 'learning_rate'?"),
    "wrong type": (["training.num_steps=many"], "must be an integer >= 1, got 'many'"),
    "missing data file": ([*FROM_FILE, "data.0.path=rowz.jsonl"], "Did you mean 'rows.jsonl'?"),
    "malformed data file": ([*FROM_FILE, "data.0.path=bad.jsonl"], "line 2"),
    "unknown model": (["model=nowhere"], "model 'nowhere'"),
    "impossible devices": (
        [
            *("cluster.type=ray", "cluster.devices_per_node=2"),
            *("cluster.device_mapping.actor_train=0", "cluster.device_mapping.actor_infer=0-3"),
        ],
        "device_mapping.actor_infer contains device 2",
    ),
    "prompt longer than the context": (["inference.max_context=12"], "tokens, but the context leaves 4 for prompts"),
    "context without room": (["inference.max_context=8"], "to leave space for prompts"),
    "first turn that does not fit": (
        ["data=[{source: guess_number, max_number: 3}]", "inference.max_context=40"],
        "but the context leaves 32 for prompts",
    ),
    "existing run": (["name=there"], "already has a run"),
    "disk that cannot be written": (["output_dir=/proc/nowhere"], "cannot write"),
    "path through a file": (["output_dir=config.yaml/runs"], "is a file"),
}


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize("kind", BAD_ROWS)
def test_cli_check_bad_input_is_one_clear_message_and_2(place, capsys, command, kind):
    overrides, expected = BAD_ROWS[kind]
    (place / "bad.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt": \n')
    there = place / "runs" / "there"
    there.mkdir(parents=True)
    (there / "config.yaml").write_text("name: there\n")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert run([command, "config.yaml", "tracking.console=quiet", *overrides]) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert "Traceback" not in shown
    assert {path: path.read_bytes() for path in before} == before, "nothing is overwritten"


def test_cli_check_the_same_report_comes_from_python_on_objects_inside_a_running_loop(place):
    import asyncio

    import roll

    def reward(text, answer, metadata):
        return float(answer in text)

    async def cell():
        rows = [{"prompt": f"{n} + 1", "answer": str(n + 1)} for n in range(30)]
        return roll.check("config.yaml", data=rows, reward=reward)

    report = asyncio.run(cell())
    assert not report.problems
    (trial,) = report.trials
    assert trial.prefers_correct and trial.domain == "python"
    assert "rlvr, grpo" in str(report) and sum(report.train_prompts.values()) + report.num_held_out == 30


def test_cli_check_a_row_without_an_answer_has_no_right_one(place):
    import roll

    greetings = [f"Say hello to {n}." for n in range(20)]
    report = roll.check("config.yaml", data=greetings, reward=lambda text, answer, metadata: len(text) / 100)
    assert not report.problems and not report.notes
    assert "'' (empty answer) scores 0, 'no idea' (the reference answer is unknown) scores 0.07" in str(report)


def test_cli_check_a_misspelt_function_is_not_taken_for_an_import(place, capsys):
    (place / "own.py").write_text("import os\n\n\ndef score(text, answer, metadata):\n    return 0.0\n")
    for written, hint in (("nosuch", "'nosuch'."), ("scor", "Did you mean 'score'?"), ("os2", "'os2'.")):
        assert run(["check", "config.yaml", f"data.0.reward={{type: python, function: 'own.py:{written}'}}"]) == 2
        assert capsys.readouterr().err.rstrip().endswith(hint)


def test_cli_check_public_without_an_upload_is_refused(capsys):
    assert run(["export", "runs/x", "y", "--public"]) == 2
    assert "--public requires --to-hub OWNER/NAME" in capsys.readouterr().err
