"""A reward that grows as an answer comes closer to the right number."""

import re
from typing import Any


def sum_distance(text: str, answer: str, metadata: dict[str, Any], scale: float = 10.0) -> float:
    """Return 1 for the right number, less the further the last number of `text` is from it, and 0 without a number.

    Args:
        text: The model's answer.
        answer: The right number.
        metadata: Further columns of the data set's row.
        scale: The distance at which the reward is 0.5; `options: {scale: 5.0}` in the configuration sets it.
    """
    numbers = re.findall(r"-?\d{1,12}", text)
    return 1 / (1 + abs(int(numbers[-1]) - int(answer)) / scale) if numbers else 0.0
