"""Fit the engine model's coefficients to measured step times, by least squares.

    duration of a span = steps x (curve(requests) + context x c) + prefilled tokens x p

The curve is piecewise linear and never decreases, so it is a sum of ramps, and the model is linear in all unknowns. A
coefficient that would be negative is set to 0, and the others are fitted again. A span of n steps has weight 1 /
sqrt(n), assuming that the noise of different steps is independent. Spans that take more than twice as long as the model
predicts are dropped, because other work disturbed them, and the model is fitted again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roll.errors import DataError
from roll.types import EngineStepSpan

__all__ = ["EngineFit", "fit_engine"]

KNOTS = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of requests between which the curve is linear, if there are steps near them."""
SMOOTHNESS = 0.03
"""Weight of the penalty on the curve's changes of slope; it only has an effect where there is almost no data."""
MIN_STEPS = 20
"""Minimum number of recorded engine steps for a fit."""
MAX_SLOWDOWN = 2.0
"""Maximum ratio of measured to predicted duration; a slower span was disturbed by other work on the machine."""
NUM_FIT_ROUNDS = 3
"""Number of rounds in which disturbed spans are dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFit:
    """The fitted coefficients, and their errors on the measurements."""

    curve: tuple[tuple[float, float], ...]
    """(requests in a step, seconds without context) pairs."""
    prefill_token_s: float
    context_token_s: float
    num_steps: int
    num_dropped: int
    """Number of disturbed spans, which were dropped."""
    measured_s: float
    """Total duration of all spans that were not dropped."""
    fitted_s: float
    """The model's prediction of `measured_s`."""
    step_error: float
    """Mean absolute error of a span, as a fraction of its duration, weighted by duration."""
    by_requests: tuple[tuple[int, int, float, float], ...]
    """Steps, measured seconds, and the model's relative error, by the upper end of each band of requests."""


def fit_engine(spans: Sequence[EngineStepSpan]) -> EngineFit:
    """Fit an engine's costs to measured spans of steps; drop spans that took much longer than the fit predicts.

    Raises:
        DataError: There are too few steps.
    """
    kept = list(spans)
    for _ in range(NUM_FIT_ROUNDS):
        fit, fitted = _fit(kept, len(spans) - len(kept))
        calm = [s for s, expected in zip(kept, fitted, strict=True) if s.duration_s <= MAX_SLOWDOWN * expected]
        if len(calm) == len(kept):
            break
        kept = calm
    return fit


def _fit(spans: Sequence[EngineStepSpan], num_dropped: int) -> tuple[EngineFit, NDArray[np.float64]]:
    """Fit the costs to these spans; return the fit and the predicted seconds of each span.

    Raises:
        DataError: There are too few steps.
    """
    num_steps = sum(span.num_steps for span in spans)
    if num_steps < MIN_STEPS:
        raise DataError(
            f"a fit requires at least {MIN_STEPS} recorded engine steps, got {num_steps}: calibrate on a longer run."
        )
    steps = np.array([s.num_steps for s in spans], float)
    requests = np.array([s.num_decoding + s.num_started for s in spans], float)
    context = np.array([s.context_tokens for s in spans], float)
    further = np.array([max(0, s.num_prefilled - s.num_started) for s in spans], float)
    seconds = np.array([s.duration_s for s in spans], float)
    knots = _choose_knots(requests)
    ramps = np.tril(np.ones((len(knots), len(knots))))  # from rises to heights
    hats = _evaluate_hat_functions(requests, knots) * steps[:, None]
    design = np.column_stack([hats @ ramps, steps * context, further])
    scale = np.sqrt(steps)
    bends = _compute_bends(knots) @ ramps * SMOOTHNESS * np.sqrt(num_steps)
    found = _solve_non_negative(
        np.vstack([design / scale[:, None], np.column_stack([bends, np.zeros((len(bends), 2))])]),
        np.concatenate([seconds / scale, np.zeros(len(bends))]),
    )
    fitted = design @ found
    fit = EngineFit(
        curve=tuple(zip(knots.tolist(), (ramps @ found[: len(knots)]).tolist(), strict=True)),
        prefill_token_s=float(found[-1]),
        context_token_s=float(found[-2]),
        num_steps=num_steps,
        num_dropped=num_dropped,
        measured_s=float(seconds.sum()),
        fitted_s=float(fitted.sum()),
        step_error=float(np.abs(fitted - seconds).sum() / seconds.sum()),
        by_requests=_compute_bands(knots, requests, steps, seconds, fitted),
    )
    return fit, fitted


def _choose_knots(requests: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the knots of the curve, in requests per step.

    A value in `KNOTS` is used if there are measurements between it and the next value. The last knot is the largest
    measured number of requests.
    """
    most = requests.max()
    inside = [knot for knot in KNOTS if knot < most]
    used = [
        low
        for low, high in itertools.pairwise([*inside, most])
        if low == inside[0] or ((requests > low - 1e-9) & (requests <= high)).any()
    ]
    return np.array([*used, most], float)


def _evaluate_hat_functions(points: NDArray[np.float64], knots: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights, shape [n, k], that interpolate values at k knots to n points."""
    return np.column_stack([np.interp(points, knots, row) for row in np.eye(len(knots))])


def _compute_bends(knots: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the matrix [k - 2, k] that maps a curve's heights to its bend at each inner knot.

    The bend is the height above the straight line between the neighboring knots.
    """
    rows = np.zeros((max(0, len(knots) - 2), len(knots)))
    for index, row in enumerate(rows):
        left, middle, right = knots[index : index + 3]
        share = (middle - left) / (right - left)
        row[index : index + 3] = share - 1, 1, -share
    return rows


def _solve_non_negative(design: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve a least-squares problem with coefficients >= 0.

    While a coefficient is negative, the lowest coefficient is fixed at 0 and the problem is solved again.
    """
    free = np.ones(design.shape[1], bool)
    while True:
        found = np.zeros(design.shape[1])
        found[free] = np.linalg.lstsq(design[:, free], target, rcond=None)[0]
        if (found >= 0).all():
            return found
        norms = np.linalg.norm(design, axis=0)
        free[np.argmin(found * norms)] = False


def _compute_bands(
    knots: NDArray[np.float64],
    requests: NDArray[np.float64],
    steps: NDArray[np.float64],
    seconds: NDArray[np.float64],
    fitted: NDArray[np.float64],
) -> tuple[tuple[int, int, float, float], ...]:
    bands = []
    for low, high in itertools.pairwise(knots):
        inside = (requests > low) & (requests <= high)
        if inside.any():
            measured = float(seconds[inside].sum())
            error = float(fitted[inside].sum() / measured - 1)
            bands.append((int(high), int(steps[inside].sum()), measured, error))
    return tuple(bands)
