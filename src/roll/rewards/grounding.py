"""Score boxes and points in answers about images."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TypeAlias

from roll.config.rewards import BoxReward, PointReward
from roll.errors import MalformedPromptError, shorten
from roll.protocols import WorkerPool
from roll.rewards.base import MAX_TEXT_LENGTH, Judgement, Verifier, run_in_pool
from roll.types import Prompt, Rollout

__all__ = ["Box", "build_box_verifier", "build_point_verifier", "compute_iou", "find_last_box", "find_last_point"]

Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, right and bottom edge."""

# Every repetition is bounded, so that a search takes linear time.
_NUMBER = r"([-+]?\d{1,9}(?:\.\d{1,9})?)"
_COMMA = r"\s{0,4},\s{0,4}"
_BOX_PATTERN = re.compile(
    rf"(?<![\d.]){_NUMBER}{_COMMA}{_NUMBER}\s{{0,4}}(?:,|[\])]\s{{0,4}},?)\s{{0,4}}[\[(]?\s{{0,4}}"
    rf"{_NUMBER}{_COMMA}{_NUMBER}(?![\d.]?\d)"
)
_POINT_PATTERN = re.compile(rf"[\[(]\s{{0,4}}{_NUMBER}{_COMMA}{_NUMBER}\s{{0,4}}[\])]")


def find_last_box(text: str) -> Box | None:
    """Return the last box of a text, with ordered edges; `None` if the text has none.

    >>> find_last_box("<box>(10,20),(50,80)</box>")
    (10.0, 20.0, 50.0, 80.0)
    """
    found = list(_BOX_PATTERN.finditer(text))
    if not found:
        return None
    x1, y1, x2, y2 = map(float, found[-1].groups())
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def find_last_point(text: str) -> tuple[float, float] | None:
    """Return the last point (x, y) of a text; `None` if the text has none.

    >>> find_last_point("I click(30, 40).")
    (30.0, 40.0)
    """
    found = list(_POINT_PATTERN.finditer(text))
    return (float(found[-1][1]), float(found[-1][2])) if found else None


def compute_iou(box: Box, other_box: Box) -> float:
    """Return the intersection over union of two boxes, between 0 and 1."""
    width = min(box[2], other_box[2]) - max(box[0], other_box[0])
    height = min(box[3], other_box[3]) - max(box[1], other_box[1])
    common = max(width, 0.0) * max(height, 0.0)
    union = _compute_area(box) + _compute_area(other_box) - common
    return common / union if union > 0 else 0.0


def _compute_area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _score_box(text: str, reference: Box) -> float | None:
    box = find_last_box(text)
    return None if box is None else compute_iou(box, reference)


def _score_point(text: str, reference: Box) -> bool | None:
    point = find_last_point(text)
    return None if point is None else is_in_box(point, reference)


def is_in_box(point: Sequence[float], box: Box) -> bool:
    """Return whether a point (x, y) is in a box, edges included."""
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


def _read_reference(prompt: Prompt) -> Box:
    box = find_last_box(prompt.answer)
    if box is None or not math.isfinite(_compute_area(box)) or _compute_area(box) <= 0:
        raise MalformedPromptError(
            prompt.uid,
            "the reference must be a nonempty box x1, y1, x2, y2 such as [10, 20, 50, 80], got "
            f"{shorten(prompt.answer)}.",
        )
    return box


def build_box_verifier(config: BoxReward, pool: WorkerPool) -> Verifier:
    """Build a verifier that returns the IoU of the answer's last box and the reference box. It runs in the pool."""

    async def judge(rollout: Rollout) -> Judgement:
        reference, text = _read_reference(rollout.prompt), rollout.text[-MAX_TEXT_LENGTH:]
        iou = await run_in_pool(pool, _score_box, text, reference, time_limit_s=config.time_limit_s)
        if iou is None:
            return Judgement(value=0.0, verdict="no box", correct=False)
        solved = iou >= config.solved_at
        value = float(solved) if config.score == "hit" else iou
        return Judgement(value=value, verdict="correct" if solved else "wrong", correct=solved)

    return Verifier(judge=judge, decides_correctness=True)


def build_point_verifier(config: PointReward, pool: WorkerPool) -> Verifier:
    """Build a verifier that returns 1 if the answer's last point is in the reference box. It runs in the pool."""

    async def judge(rollout: Rollout) -> Judgement:
        reference, text = _read_reference(rollout.prompt), rollout.text[-MAX_TEXT_LENGTH:]
        hit = await run_in_pool(pool, _score_point, text, reference, time_limit_s=config.time_limit_s)
        verdict = "no point" if hit is None else "correct" if hit else "wrong"
        return Judgement(value=float(bool(hit)), verdict=verdict, correct=bool(hit))

    return Verifier(judge=judge, decides_correctness=True)
