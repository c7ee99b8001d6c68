"""The probe compares the engines' and the trainer's log-probs of fixed tokens. Pure functions; NumPy only.

Checksums verify which bytes arrived, and read-back verifies which bytes an engine stores. Only the probe verifies that
the engine *computes* with them. Its resolution is limited by the difference between two correct implementations
("noise"). Measured with two attention kernels, as means over tokens, after a step of ±lr on every weight:

                                  noise     if the step is missing in one layer    the same, larger lr
    SmolLM2-135M float32, lr 1e-6   3e-6      weakest of 30: 1.3e-5, median 6e-5     lr 1e-5: 1.2e-4, 6e-4
    tiny model   float32, lr 1e-6   5e-7      weakest of 2:  2e-5                    lr 1e-5: 2e-4
    SmolLM2-135M bfloat16, lr 1e-5  4.6e-2    6e-4: hidden in the noise              lr 1e-4: hidden
    tiny model   bfloat16, lr 1e-5  1.2e-2    3e-4: hidden in the noise              lr 1e-4: hidden

In float32, the probe therefore detects a single layer that misses a single step, at learning rates of about 3e-6 and
above. In bfloat16, no comparison detects it: rounding is chaotic, so the noise of one policy version does not predict
the noise of the next, and comparing changes (now − before) does not cancel it. In bfloat16 the probe detects a layer
that never had this model's weights, an engine that did not change at all, and an error that accumulates over many
steps; read-back covers the rest.

If weights are quantized, the quantization error adds to the noise, with any dtype of the other weights: 0.09 (int8)
and 0.18 (fp8) for SmolLM2-135M on text. If the engine also computes in int8, it is 0.20 on text, and 0.35 to 0.50 on
the sequences of the quickstart's probe.

If engine and trainer differ *smoothly* (for example by a different scale in float32), their difference is the same
before and after a step. Comparing the changes cancels it, and still detects a layer that was not updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from roll.types import FloatArray, IntArray, SequenceMedia, TensorSpec, TrainingBatch, TrainingSample

__all__ = [
    "COMPUTE_BOUNDS",
    "NOISE_BOUNDS",
    "NoiseBounds",
    "ProbeChecker",
    "ProbeResult",
    "build_probe_batch",
    "find_majority_dtype",
    "get_noise_bounds",
]

TOLERANCE_FACTOR = 3.0
"""The tolerance is this multiple of the first difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseBounds:
    """Bounds on the mean absolute difference of log-probs between two correct implementations, in nats."""

    floor: float
    """Differences up to this bound are always tolerated."""
    ceiling: float
    """Differences above this bound are never tolerated, even in the first sync, which sets the tolerance of later
    syncs."""
    smooth: bool
    """True if a small step changes the noise only a little, so that changes of log-probs can be compared."""


NOISE_BOUNDS = {
    "float32": NoiseBounds(floor=3e-5, ceiling=1e-2, smooth=True),
    "bfloat16": NoiseBounds(floor=2e-2, ceiling=0.3, smooth=False),
    "float16": NoiseBounds(floor=5e-3, ceiling=0.1, smooth=False),
    "int8": NoiseBounds(floor=5e-2, ceiling=0.5, smooth=False),
    "float8_e4m3fn": NoiseBounds(floor=1e-1, ceiling=1.0, smooth=False),
}
"""The bounds by the dtype of the sent weights."""
COMPUTE_BOUNDS = {
    "int8": NoiseBounds(floor=5e-2, ceiling=1.0, smooth=False),
    "float8_e4m3fn": NoiseBounds(floor=1e-1, ceiling=1.0, smooth=False),
}
"""The bounds for engines that also compute in 8 bits, by the dtype of the sent weights."""


def get_noise_bounds(dtype: str, *, computes_in_8_bits: bool) -> NoiseBounds:
    """Return the bounds for weights of a dtype; those of bfloat16 for other dtypes."""
    if computes_in_8_bits and dtype in COMPUTE_BOUNDS:
        return COMPUTE_BOUNDS[dtype]
    return NOISE_BOUNDS.get(dtype, NOISE_BOUNDS["bfloat16"])


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """The differences between one engine's and the trainer's log-probs after one sync, in nats."""

    mean_abs: float
    max_abs: float
    tolerance: float
    """The tolerance of `mean_abs`."""
    change: float = 0.0
    """Mean absolute change of the trainer's log-probs since this engine's last probe; 0 at its first probe."""
    change_missed: float = 0.0
    """Mean absolute difference between the engine's change and the trainer's change; 0 at its first probe."""
    change_tolerance: float | None = None
    """The tolerance of `change_missed`; `None` if it is not checked."""
    problem: str = ""
    """A sentence that describes the problem; empty if there is none."""


@dataclass(frozen=True, slots=True)
class _ProbeLogprobs:
    trainer: NDArray[np.float64]
    engine: NDArray[np.float64]


@dataclass(eq=False)
class ProbeChecker:
    """Compares each engine's log-probs with the trainer's log-probs, with a tolerance derived from the first sync."""

    noise: NoiseBounds
    """The noise of the dtype that the engines compute in."""
    tolerance: float | None = None
    """The tolerance of the mean absolute difference. By default it is `TOLERANCE_FACTOR` times the first difference,
    within `noise`.
    """
    _first: float | None = field(init=False, default=None)
    _first_scale: float = field(init=False, default=1.0)
    _first_change: tuple[float, float] | None = field(init=False, default=None)
    _last: dict[str, _ProbeLogprobs] = field(init=False, default_factory=dict)

    def discard_logprobs(self, engine_id: str) -> None:
        """Discard the last log-probs of a replaced engine, because the new engine's log-probs cannot be compared with
        them.
        """
        self._last.pop(engine_id, None)

    def check(
        self,
        engine_id: str,
        engine: Sequence[FloatArray],
        trainer: Sequence[FloatArray],
        *,
        weights_changed: bool = True,
    ) -> ProbeResult:
        """Compare the log-probs of one engine and of the trainer; store both for the next probe if there is no problem.

        Args:
            engine_id: The id of the engine.
            engine: The engine's log-probs of each sequence [L]; entry 0 is not compared.
            trainer: The trainer's log-probs of the same sequences [L].
            weights_changed: True if most tensors have changed since this engine's last probe.
        """
        now = _ProbeLogprobs(_flatten(trainer), _flatten(engine))
        before = self._last.get(engine_id)
        result = self._compare(now, before, weights_changed)
        if not result.problem:
            self._last[engine_id] = now
            if self._first is None:
                self._first, self._first_scale = result.mean_abs, float(np.abs(now.trainer).mean())
            if self._first_change is None and result.change > 0:
                self._first_change = (result.change, result.change_missed)
        return result

    def _compare(self, current: _ProbeLogprobs, previous: _ProbeLogprobs | None, weights_changed: bool) -> ProbeResult:
        gap = np.abs(current.engine - current.trainer)
        mean_abs, max_abs = float(gap.mean()), float(gap.max())
        tolerance = self._compute_tolerance(current)
        problem = ""
        if not np.isfinite(mean_abs):
            problem = "log-probs are not finite"
        elif mean_abs > tolerance:
            problem = f"log-probs differ from the trainer's by {mean_abs:.3g} on average; tolerated: {tolerance:.3g}"
        if previous is None or problem:
            return ProbeResult(mean_abs=mean_abs, max_abs=max_abs, tolerance=tolerance, problem=problem)
        trainer_change, engine_change = current.trainer - previous.trainer, current.engine - previous.engine
        change = float(np.abs(trainer_change).mean())
        missed = float(np.abs(engine_change - trainer_change).mean())
        limit = self._compute_change_tolerance(change)
        if weights_changed and np.mean(trainer_change != 0) > 0.5 and not engine_change.any():
            problem = "log-probs did not change although the trainer's did: it computes with the old weights"
        elif limit is not None and missed > limit:
            problem = (
                f"log-probs changed differently from the trainer's (which changed by {change:.2g}): the changes differ "
                f"by {missed:.2g} on average; tolerated: {limit:.2g}"
            )
        return ProbeResult(
            mean_abs=mean_abs,
            max_abs=max_abs,
            tolerance=tolerance,
            change=change,
            change_missed=missed,
            change_tolerance=limit,
            problem=problem,
        )

    def _compute_tolerance(self, current: _ProbeLogprobs) -> float:
        if self.tolerance is not None:
            return self.tolerance
        if self._first is None:
            return self.noise.ceiling
        # The rounding error of a log-prob grows with its magnitude, which grows as the policy sharpens.
        growth = max(1.0, float(np.abs(current.trainer).mean()) / max(self._first_scale, 1e-6))
        return min(self.noise.ceiling, max(self.noise.floor, TOLERANCE_FACTOR * self._first) * growth)

    def _compute_change_tolerance(self, change: float) -> float | None:
        """Return the tolerance of `change_missed` if the trainer's log-probs changed by `change`; `None` if there is no
        check.

        The tolerance is `TOLERANCE_FACTOR` times the first `change_missed` times the ratio of `change` to the first
        change, and at least the noise floor. Before the first change, the tolerance is twice the noise floor if the
        first difference between engine and trainer was at most the noise floor; otherwise the change is not checked.
        """
        if not self.noise.smooth:
            return None
        if self._first_change is None:
            # Before the first change, a small first difference is the only sign that the noise is small.
            return None if self._first is None or self._first > self.noise.floor else self.noise.floor * 2
        first_change, first_missed = self._first_change
        return max(self.noise.floor, TOLERANCE_FACTOR * first_missed * max(1.0, change / first_change))


def _flatten(logprobs: Sequence[FloatArray]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(entry, dtype=np.float64)[1:] for entry in logprobs])


def find_majority_dtype(manifest: Sequence[TensorSpec]) -> str:
    """Return the name of the most common dtype among the elements of a manifest."""
    counts: dict[str, int] = {}
    for spec in manifest:
        counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.num_elements
    return max(counts, key=lambda dtype: counts[dtype], default="float32")


def build_probe_batch(sequences: Sequence[IntArray], media: SequenceMedia = ()) -> TrainingBatch:
    """Return the probe's sequences as a training batch whose loss mask contains every token but the first."""

    def build_sample(index: int, token_ids: IntArray) -> TrainingSample:
        return TrainingSample(
            sample_id=f"probe-{index}",
            unit=index,
            token_ids=np.asarray(token_ids, dtype=np.int32),
            loss_mask=np.arange(len(token_ids)) > 0,
            media=tuple(media[index]) if media else (),
        )

    return TrainingBatch(samples=tuple(build_sample(i, s) for i, s in enumerate(sequences)))
