"""The environment with screenshots and clicks."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from PIL import Image

from roll.envs import make
from roll.envs.worlds.screen import COLORS

SMALL: dict[str, Any] = {
    "width": 64,
    "height": 64,
    "rows": 3,
    "columns": 3,
    "num_widgets": 4,
    "max_turns": 1,
    "scale": 8,
}


def _reset(seed: int, **options: Any) -> tuple[Any, Image.Image, str, str]:
    env: Any = make("gui:Click-v0-easy", SMALL | options)
    (image, text), info = env.reset(seed=seed)
    return env, Image.open(io.BytesIO(image.data)), text.text, info["state"]


def test_screen_task_describes_the_coordinate_frame_unless_told_otherwise() -> None:
    _, image, described, state = _reset(3)
    _, other, short, other_state = _reset(3, describe_frame=False)
    assert state == other_state
    assert image.tobytes() == other.tobytes()
    assert short == f"Click the {re.search('goal (.*);', state)[1]}."  # type: ignore[index]
    assert described == (
        f"{short} Answer with click(x, y): x from 0 (left) to 7 (right), y from 0 (top) to 7 (bottom)."
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("rows", "columns", "width", "height"), [(3, 3, 15, 15), (4, 1, 45, 11)])
def test_screen_click_is_in_the_target_if_the_center_of_its_position_is(
    rows: int, columns: int, width: int, height: int, seed: int
) -> None:
    grid = {"rows": rows, "columns": columns}
    _, image, _, state = _reset(seed, **grid)
    goal = re.search(r"goal (\w+ \w+);", state)[1]  # type: ignore[index]
    left, top = map(int, re.search(rf"{goal} (\d+),(\d+);", state).groups())  # type: ignore[union-attr]
    assert image.getpixel((left + width // 2, top + height - 2)) == COLORS[goal.split()[0]]
    for x in range(8):
        for y in range(8):
            # Positions are 8 x 8 pixels.
            inside = left <= 8 * x + 4 < left + width and top <= 8 * y + 4 < top + height
            env = _reset(seed, **grid)[0]
            assert env.step(f"click({x},{y})")[1] == float(inside)


def test_screen_shuffled_shows_other_widgets_for_the_same_task() -> None:
    _, image, task, state = _reset(5)
    _, other, same_task, same_state = _reset(5, shuffled=True)
    assert (task, state) == (same_task, same_state)
    assert image.tobytes() != other.tobytes()
