"""What is done to a rollout's reward before advantages."""

from __future__ import annotations

from roll.algorithms.episodes import bounded

__all__ = ["shaped_reward", "soft_overlong"]


def soft_overlong(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476 eq. 13), 0 … 1.

    0 up to `max_length` - `buffer` tokens, then linear, 1 at `max_length` and beyond; a buffer of 0 switches it off.
    """
    if buffer <= 0:
        return 0.0
    return min(max((length - (max_length - buffer)) / buffer, 0.0), 1.0)


def shaped_reward(
    reward: float,
    *,
    length: int,
    max_length: int,
    well_formed: bool,
    scale: float = 1.0,
    shift: float = 0.0,
    clip: float | None = None,
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
    format_penalty: float = 0.0,
) -> float:
    """clip(scale x reward + shift) - overlong penalty - format penalty; see `RewardShapingConfig`.

    Within ± `LARGEST`.
    """
    value = scale * reward + shift
    if clip is not None:
        value = min(max(value, -clip), clip)
    value -= overlong_penalty * soft_overlong(length, max_length, overlong_buffer)
    return bounded(value if well_formed else value - format_penalty)
