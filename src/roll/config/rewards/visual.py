"""Rewards for answers about images: bounding boxes, points, and recognized text (OCR)."""

from __future__ import annotations

from typing import Literal

from roll.config.base import option
from roll.config.rewards.adaptive import PooledReward
from roll.config.rewards.base import build_auto_reasoning_option

__all__ = ["BoxReward", "EditDistanceReward", "PointReward"]


class BoxReward(PooledReward):
    """Bounding boxes: the intersection over union (IoU) of the answer's last box and the reference box.

    A box is four numbers `x1, y1, x2, y2`, as in `[10, 20, 50, 80]` or `(10,20),(50,80)`. Answer and reference must use
    the same coordinate frame.
    """

    type: Literal["box"] = option(..., "Reward type.")
    reasoning: str = build_auto_reasoning_option()
    score: Literal["iou", "hit"] = option(
        "iou", "`iou`: the IoU. `hit`: 1 if the IoU reaches `solved_at`, otherwise 0."
    )
    solved_at: float = option(0.5, "The task is solved if the IoU is at least this value.", gt=0, le=1)

    @property
    def needs_answer(self) -> bool:
        """True if rows must have a reference answer."""
        return True


class PointReward(PooledReward):
    """Points: 1 if the answer's last point is in the reference box, otherwise 0.

    A point is two numbers in brackets, as in `(30, 40)` or `click(30, 40)`. The reference is a box, as in `BoxReward`.
    """

    type: Literal["point"] = option(..., "Reward type.")
    reasoning: str = build_auto_reasoning_option()

    @property
    def needs_answer(self) -> bool:
        """True if rows must have a reference answer."""
        return True


class EditDistanceReward(PooledReward):
    """Recognized text (OCR): 1 - edit distance to the reference / length of the longer text.

    The text between the last `<answer>` and `</answer>` is compared, or the whole text without these tags. Runs of
    whitespace are treated as one space.
    """

    type: Literal["edit_distance"] = option(..., "Reward type.")
    reasoning: str = build_auto_reasoning_option()
    ignore_case: bool = option(False, "Whether the comparison ignores case.")
    solved_at: float = option(1.0, "The task is solved if the reward is at least this value.", gt=0, le=1)

    @property
    def needs_answer(self) -> bool:
        """True if rows must have a reference answer."""
        return True
