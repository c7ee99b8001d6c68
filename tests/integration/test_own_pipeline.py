"""A pipeline of the user's own, from one file of theirs: named in the configuration, run by the loop of all others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config

import roll
from roll.cli.main import run as command
from roll.errors import CheckpointError, ConfigError

LONGEST_PIPELINE = Path(__file__).parents[2] / "examples/extension/src/roll_example/pipeline.py"
PIPELINE = "pipelines/pipeline.py:Longest"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's, with the pipeline in it; commands are run there."""
    (tmp_path / "pipelines").mkdir()
    shutil.copy(LONGEST_PIPELINE, tmp_path / "pipelines")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(model: Path, num_steps: int = 2, ratio: float = 0.0, **changes: Any) -> dict[str, Any]:
    base = tiny_config(model, num_steps=num_steps) | {"pipeline": PIPELINE, "num_kept": 2, "output_dir": "runs"}
    base["rollout"] = {**base["rollout"], "scheduling": {"async_ratio": ratio}}
    return base | {"evaluation": {"before_training": False, "num_prompts": 1}} | changes


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


@pytest.mark.parametrize("ratio", [0.0, 2.0])
def test_own_pipeline_of_one_file_trains_by_the_loop_of_all(folder: Path, tiny_model: Path, ratio: float) -> None:
    base = config(tiny_model, 4, ratio)
    assert roll.check(base).problems == []
    roll.train(base)
    found = steps(folder)
    assert [row["step"] for row in found] == [1, 2, 3, 4] and found[-1]["policy_version"] == 4
    assert max(row["rollout/staleness_max"] for row in found) <= ratio
    assert all(row["data/groups_trained"] == 3 for row in found)


def test_own_pipeline_is_run_by_the_commands(
    folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.yaml").write_text(json.dumps(config(tiny_model)))
    assert command(["check", "run.yaml"]) == 0 and command(["train", "run.yaml"]) == 0
    assert command(["resume", "runs/run", "training.num_steps=3"]) == 0
    assert [row["step"] for row in steps(folder)] == [1, 2, 3]
    assert command(["eval", "run.yaml", "--model", "runs/run"]) == 0
    assert command(["config", "explain", "--pipeline", PIPELINE, "num_kept"]) == 0
    assert "of each group" in capsys.readouterr().out


@pytest.mark.ray
def test_own_pipeline_with_a_loss_of_its_file_trains_on_the_ranks_of_ray(folder: Path, tiny_model: Path) -> None:
    file = folder / "pipelines" / "pipeline.py"
    own = "class OwnLoss(LikelihoodLoss):\n    pass\n\n\nclass Longest:"
    file.write_text(file.read_text().replace("class Longest:", own).replace("LikelihoodLoss())", "OwnLoss())"))
    apart = {"type": "ray", "device_mapping": {"actor_train": 0, "actor_infer": [1]}, "devices_per_node": 2}
    roll.train(config(tiny_model, cluster=apart))
    assert [row["step"] for row in steps(folder)] == [1, 2]


def test_own_pipeline_that_changed_is_no_longer_the_runs(folder: Path, tiny_model: Path) -> None:
    roll.train(config(tiny_model, 1))
    with (folder / "pipelines" / "pipeline.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(CheckpointError, match=f"the code of '{PIPELINE}' changed"):
        roll.resume("runs/run", ["training.num_steps=2"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Longest = 3", "pipeline 'wrong.py:Longest' must be a function or a class, got int."),
        (
            "class Longest:\n    config = 1",
            "pipeline 'wrong.py:Longest' does not define state, check, open, facts, ev",
        ),
        (
            "class Longest:\n    config = check = open = facts = evaluate = state = 1",
            "pipeline 'wrong.py:Longest': its `config` must be a subclass of roll.config.run.RunConfig.",
        ),
        ("def Longest(x): ...", "pipeline 'wrong.py:Longest' is called with (), which (x) does not accept"),
        (
            "from pipelines.pipeline import LongestConfig as Longest",
            "pipeline 'wrong.py:Longest' is called with (), which its signature does not accept: missing a required",
        ),
        (
            "import pipelines.pipeline as base\nclass Longest(base.Longest):\n    def open(self, config): ...",
            "pipeline 'wrong.py:Longest': open is called with (config, session), which (config) does not accept: ",
        ),
        (
            "import pipelines.pipeline as base\nclass Longest(base.Longest):\n    check = 3",
            "pipeline 'wrong.py:Longest': check must be a function or a class, got int.",
        ),
        (
            "class Longest:\n    def __init__(self): raise SystemExit(3)",
            "pipeline 'wrong.py:Longest' cannot be created (",
        ),
        ("class Longes: ...", "pipeline: 'wrong.py' has no 'Longest'. Did you mean 'Longes'?"),
    ],
)
def test_own_pipeline_that_is_wrong_is_refused_when_the_configuration_is_loaded(
    folder: Path, tiny_model: Path, text: str, words: str
) -> None:
    (folder / "wrong.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        roll.load_config(config(tiny_model, pipeline="wrong.py:Longest"))
    assert words in str(caught.value)
