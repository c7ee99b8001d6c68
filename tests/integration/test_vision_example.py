"""The example of a tiny vision-language model: its data, its model and both of its runs."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest

import roll

ROOT = Path(__file__).parents[2]


def test_vision_example_trains_with_examples_and_then_with_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples" / "vision", tmp_path / "examples" / "vision")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["shapes.py", "data"])
    runpy.run_path("examples/vision/shapes.py", run_name="__main__")
    assert len(list(Path("data/shapes/images").iterdir())) == 400
    brief = {"training.num_steps": 3, "tracking.rollouts": False}
    first = roll.train("examples/vision/shapes-sft.yaml", {**brief, "training.warmup_steps": 1})
    assert first.num_steps == 3 and first.measure == "loss" and first.score_after < first.score_before  # type: ignore[operator]
    second = roll.train("examples/vision/shapes-grpo.yaml", {**brief, "rollout.prompts_per_step": 2})
    assert second.num_steps == 3 and second.score_before is not None and 0 <= second.score_before <= 1


@pytest.mark.parametrize(
    ("text", "reward"),
    [("red", 1.0), (" red\n", 1.0), ("blue", 0.1), ("red blue", 0.0), ("It is red.", 0.0), ("", 0.0)],
)
def test_vision_example_reward_is_1_for_the_color_alone(text: str, reward: float) -> None:
    names_color = runpy.run_path(str(ROOT / "examples/vision/shapes.py"))["names_color"]
    assert names_color(text, "red", {}) == pytest.approx(reward)
