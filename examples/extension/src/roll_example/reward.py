"""A reward that increases as an answer approaches the correct number."""

import re
from typing import Any


def sum_distance(text: str, answer: str, metadata: dict[str, Any], scale: float = 10.0) -> float:
    """Return 1 if the last number of `text` is correct, less the farther it is off, and 0 without a number.

    Args:
        text: The model's answer.
        answer: The correct number.
        metadata: The other columns of the row.
        scale: The distance at which the reward is 0.5; `options: {scale: 5.0}` in the configuration sets it.
    """
    numbers = re.findall(r"-?\d{1,12}", text)
    return 1 / (1 + abs(int(numbers[-1]) - int(answer)) / scale) if numbers else 0.0
