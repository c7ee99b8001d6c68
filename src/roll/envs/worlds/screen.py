"""A graphical user interface, drawn with Pillow: the player receives a screenshot and clicks on the widget that the
task names.

Coordinate frame: `click(x, y)` with integers from 0 to `scale` - 1 in both directions; x goes from the left edge to the
right, y from the top edge down. With the default scale of 1000, (500, 500) is the center of the screen, as in Qwen-VL.
If `scale` is `None`, coordinates are pixels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from roll.envs.base import ResetResult, StepResult
from roll.envs.worlds.world import FORMAT_ERROR_REWARD, World, extract_answer
from roll.types import Content, ImageData, TextPart

__all__ = ["COLORS", "SHAPES", "Screen", "Widget", "draw_screen"]

COLORS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 119, 240),
    "yellow": (240, 200, 30),
    "purple": (148, 80, 200),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle")
_BACKGROUND = (232, 232, 236)
_CLICK_PATTERN = re.compile(r"click\(\s*(-?\d{1,6})\s*,\s*(-?\d{1,6})\s*\)", re.IGNORECASE)


class Widget(NamedTuple):
    """A shape on the screen."""

    color: str
    shape: str
    left: int
    top: int
    width: int
    height: int

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"

    def contains(self, x: float, y: float) -> bool:
        """Return whether a point, in pixels, is in the widget's bounding box."""
        return self.left <= x < self.left + self.width and self.top <= y < self.top + self.height


@dataclass(kw_only=True, eq=False)
class Screen(World):
    """Click on the widgets that the task names, in order.

    A click on the correct widget gives 1 / `num_targets`, and the next screenshot shows the widget with a frame. Any
    other click only uses up a turn. An action without `click(x, y)` gives -0.1 and ends the episode.

    Args:
        width: Width of the screen, in pixels.
        height: Height of the screen, in pixels.
        rows: Rows of the grid in which widgets are placed. A widget takes 0.7 of the width and of the height of its
            cell.
        columns: Columns of the grid.
        num_widgets: Number of widgets; each has a different color or shape.
        num_targets: Number of widgets to click.
        max_turns: Number of clicks in an episode.
        scale: Size of the coordinate frame; if `None`, coordinates are pixels.
        describe_frame: Whether the task describes the answer's format and the coordinate frame. A model that was
            fine-tuned on this frame does not need the description; without it, prompts are 34 tokens shorter.
        shuffled: Show the screenshot of another episode. A policy that depends on the screenshot then succeeds only by
            chance.
    """

    width: int = 448
    height: int = 448
    rows: int = 4
    columns: int = 4
    num_widgets: int = 6
    num_targets: int = 1
    max_turns: int = 2
    scale: int | None = 1000
    describe_frame: bool = True
    shuffled: bool = False
    _widgets: tuple[Widget, ...] = field(default=(), init=False, repr=False)
    _shown: tuple[Widget, ...] = field(default=(), init=False, repr=False)
    _targets: tuple[Widget, ...] = field(default=(), init=False, repr=False)
    _clicked: int = field(default=0, init=False, repr=False)
    _turn: int = field(default=0, init=False, repr=False)
    _over: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        most = min(self.rows * self.columns, len(COLORS) * len(SHAPES))
        if not 1 <= self.num_targets <= self.num_widgets <= most:
            raise ValueError(
                f"num_targets must be from 1 to num_widgets, and num_widgets at most {most} on a grid of {self.rows} x "
                f"{self.columns}; got {self.num_targets} and {self.num_widgets}"
            )
        if self.max_turns < self.num_targets:
            raise ValueError(f"max_turns must be at least num_targets ({self.num_targets}), got {self.max_turns}")
        if min(self.width // self.columns, self.height // self.rows) < 8 or max(self.width, self.height) > 4096:
            raise ValueError(
                f"a cell must have at least 8 pixels, and the screen at most 4096: got {self.width} x {self.height} "
                f"pixels with {self.rows} x {self.columns} cells"
            )
        if self.scale is not None and self.scale < 2:
            raise ValueError(f"scale must be at least 2, or None for pixels, got {self.scale}")

    def reset(self, seed: int | None = None) -> ResetResult:
        self.begin(seed)
        self._widgets = self._place_widgets(self.random)
        other = Random(self.random.getrandbits(64))
        self._targets = tuple(self.random.sample(self._widgets, self.num_targets))
        self._shown = self._place_widgets(other) if self.shuffled else self._widgets
        self._clicked, self._turn, self._over = 0, 0, False
        names = ", then the ".join(target.name for target in self._targets)
        task = f"Click the {names}."
        if self.describe_frame:
            width, height = self._frame
            task += (
                f" Answer with click(x, y): x from 0 (left) to {width - 1} (right), y from 0 (top) to {height - 1} "
                "(bottom)."
            )
        return self._observe(task), self._describe_state()

    def step(self, action: str) -> StepResult:
        if self._over:
            raise RuntimeError("no episode is running: call reset() first")
        self._turn += 1
        found = _CLICK_PATTERN.findall(extract_answer(action) or action)
        if not found:
            self._over = True
            return "The action is not click(x, y).", FORMAT_ERROR_REWARD, True, False, {"state": "unreadable"}
        x, y = (int(value) for value in found[-1])
        target = self._targets[self._clicked]
        hit = target.contains(*self._to_pixels(x, y))
        self._clicked += hit
        reward = hit / self.num_targets
        done, last = self._clicked == self.num_targets, self._turn == self.max_turns
        self._over = done or last
        text = f"You clicked the {target.name}." if hit else f"({x}, {y}) is not on the {target.name}."
        if self._over:
            return text, reward, True, last and not done, self._describe_state()
        return self._observe(text), reward, False, False, self._describe_state()

    def sample_random_action(self) -> str:
        """Return a click at a random position."""
        width, height = self._frame
        return f"click({self.action_random.randrange(width)}, {self.action_random.randrange(height)})"

    def solution(self) -> str:
        """Return a click in the center of the next target."""
        target = self._targets[self._clicked]
        width, height = self._frame
        x, y = target.left + target.width / 2, target.top + target.height / 2
        return f"click({int(x * width / self.width)}, {int(y * height / self.height)})"

    @property
    def _frame(self) -> tuple[int, int]:
        return (self.width, self.height) if self.scale is None else (self.scale, self.scale)

    def _to_pixels(self, x: int, y: int) -> tuple[float, float]:
        """Convert a position in the coordinate frame to pixels; return the center of the position."""
        width, height = self._frame
        return (x + 0.5) * self.width / width, (y + 0.5) * self.height / height

    def _place_widgets(self, random: Random) -> tuple[Widget, ...]:
        cells = random.sample(range(self.rows * self.columns), self.num_widgets)
        kinds = random.sample([(color, shape) for color in COLORS for shape in SHAPES], self.num_widgets)
        cell_width, cell_height = self.width // self.columns, self.height // self.rows
        width, height = round(cell_width * 0.7), round(cell_height * 0.7)
        return tuple(
            Widget(
                color,
                shape,
                cell % self.columns * cell_width + random.randint(0, cell_width - width),
                cell // self.columns * cell_height + random.randint(0, cell_height - height),
                width,
                height,
            )
            for cell, (color, shape) in zip(cells, kinds, strict=True)
        )

    def _observe(self, text: str) -> Content:
        image = draw_screen(self.width, self.height, self._shown, self._targets[: self._clicked])
        # Without a separator: chat templates write the tokens or line breaks that their model expects after an image.
        return (image, TextPart(text=text))

    def _describe_state(self) -> dict[str, Any]:
        names = " ".join(f"{widget.name} {widget.left},{widget.top};" for widget in self._widgets)
        goal = ", ".join(target.name for target in self._targets)
        return {"state": f"{names} goal {goal}; {self._clicked} clicked, turn {self._turn}"}


def draw_screen(width: int, height: int, widgets: tuple[Widget, ...], framed: tuple[Widget, ...] = ()) -> ImageData:
    """Draw widgets on a gray background, and frames around some of them; return the image as PNG."""
    import io

    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, height), _BACKGROUND)
    draw = ImageDraw.Draw(image)
    for widget in widgets:
        box = widget.left, widget.top, widget.left + widget.width - 1, widget.top + widget.height - 1
        color = COLORS[widget.color]
        if widget.shape == "circle":
            draw.ellipse(box, fill=color)
        elif widget.shape == "square":
            draw.rectangle(box, fill=color)
        else:
            draw.polygon([((box[0] + box[2]) // 2, box[1]), (box[2], box[3]), (box[0], box[3])], fill=color)
        if widget in framed:
            draw.rectangle(box, outline=(0, 0, 0), width=max(min(widget.width, widget.height) // 16, 1))
    encoded = io.BytesIO()
    image.save(encoded, "PNG", compress_level=1)
    return ImageData.from_bytes(encoded.getvalue())
