"""`roll config from-trl` and `from-verl`: the configuration on standard output, the report on standard error."""

from pathlib import Path

from roll.cli.main import run
from roll.config.load import load_config

TRL = """\
model_name_or_path: some/model
dataset_name: some/set
reward_funcs: [accuracy_reward]
max_steps: 5
beta: 0.04
"""


def test_cli_migration_what_is_printed_is_a_configuration(tmp_path: Path, capsys):
    (tmp_path / "trl.yaml").write_text(TRL)
    assert run(["config", "from-trl", str(tmp_path / "trl.yaml"), "--processes", "2"]) == 0
    out, err = capsys.readouterr()
    (tmp_path / "roll.yaml").write_text(out)
    assert load_config(tmp_path / "roll.yaml").algorithm.kl.coefficient == 0.04
    assert "beta=0.04: algorithm.kl.coefficient=0.04" in err


def test_cli_migration_a_file_is_never_overwritten(tmp_path: Path, capsys):
    (tmp_path / "verl.sh").write_text("trainer.total_training_steps=5")
    target = tmp_path / "roll.yaml"
    command = ["config", "from-verl", str(tmp_path / "verl.sh"), "-o", str(target)]
    assert run(command) == 0
    written = target.read_text()
    assert load_config(target).training.num_steps == 5
    assert run(command) == 2
    assert "already exists" in capsys.readouterr().err
    assert target.read_text() == written


def test_cli_migration_a_script_of_trl_is_converted_with_what_its_user_says_of_it(tmp_path: Path, capsys):
    (tmp_path / "train.py").write_text(
        "SFTTrainer('some/model', SFTConfig(learning_rate=lr, max_steps=3), train_dataset=load_dataset('some/set'))"
    )
    assert run(["config", "from-trl", str(tmp_path / "train.py")]) == 0
    out, err = capsys.readouterr()
    assert "learning_rate='lr': line 1: `lr` is not assigned in the script" in err
    assert "#   learning_rate: line 1: `lr` is not assigned" in out
    assert run(["config", "from-trl", str(tmp_path / "train.py"), "--set", "learning_rate=2e-6"]) == 0
    out, err = capsys.readouterr()
    (tmp_path / "roll.yaml").write_text(out)
    assert load_config(tmp_path / "roll.yaml").training.learning_rate == 2e-6
    assert "assigned nowhere" not in err
    assert run(["config", "from-trl", str(tmp_path / "train.py"), "--set", "2e-6"]) == 2
    assert "expected KEY=VALUE, got '2e-6'" in capsys.readouterr().err
