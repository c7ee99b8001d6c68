"""The probe: a comparison of the engines' and the trainer's log-probs of fixed tokens. Pure; NumPy only.

Checksums prove which bytes arrived, and read-back which bytes an engine holds. Only the probe checks whether the engine
*computes* with them. Its resolution is limited by the difference between two correct implementations ("noise").
Measured with two attention kernels, mean over tokens, a step of ±lr on every weight:

                                  noise     after a step, one layer not applied    the same at
    SmolLM2-135M float32, lr 1e-6   3e-6      weakest of 30: 1.3e-5, median 6e-5     lr 1e-5: 1.2e-4, 6e-4
    tiny model   float32, lr 1e-6   5e-7      weakest of 2:  2e-5                    lr 1e-5: 2e-4
    SmolLM2-135M bfloat16, lr 1e-5  4.6e-2    6e-4: hidden in the noise              lr 1e-4: hidden
    tiny model   bfloat16, lr 1e-5  1.2e-2    3e-4: hidden in the noise              lr 1e-4: hidden

So in float32 one layer that misses one step is detected, at a learning rate of about 3e-6 and above. In bfloat16 no
comparison detects it: rounding is chaotic, so the noise of one policy version does not predict that of the next, and
comparing changes (now − before) does not cancel it. There the probe detects a layer that never had this model's
weights, an engine that did not change at all, and an error that accumulates over many steps; read-back covers the rest.

If weights are quantized, the quantization error is part of the noise, whatever the dtype of the other weights: with
SmolLM2-135M 0.09 (int8) and 0.18 (fp8) on text.

If engine and trainer differ *smoothly* (for example by another scaling in float32), their difference is the same before
and after a step. The comparison of changes cancels it, and still detects a missed layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from roll.types import FloatArray, IntArray, TensorSpec, TrainingBatch, TrainingSample

__all__ = ["NOISE", "NoiseBounds", "ProbeGauge", "ProbeResult", "majority_dtype", "probe_batch"]

MARGIN = 3.0
"""Tolerance as a multiple of the first difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseBounds:
    """The possible difference of two correct implementations: mean absolute difference of log-probs in nats."""

    floor: float
    """Differences up to this are always tolerated."""
    ceiling: float
    """Differences above this are never tolerated, not even in the first sync, which is the reference for all later
    ones."""
    smooth: bool
    """Whether the noise changes little with a small step, so that comparing changes is meaningful."""


NOISE = {
    "float32": NoiseBounds(floor=3e-5, ceiling=1e-2, smooth=True),
    "bfloat16": NoiseBounds(floor=2e-2, ceiling=0.3, smooth=False),
    "float16": NoiseBounds(floor=5e-3, ceiling=0.1, smooth=False),
    "int8": NoiseBounds(floor=5e-2, ceiling=0.5, smooth=False),
    "float8_e4m3fn": NoiseBounds(floor=1e-1, ceiling=1.0, smooth=False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """The comparison of one engine with the trainer after one sync. Differences are of log-probs, in nats."""

    mean_abs: float
    max_abs: float
    tolerance: float
    """The tolerance of `mean_abs`."""
    change: float = 0.0
    """Mean absolute change of the trainer's log-probs since this engine's last probe; 0 at its first."""
    change_missed: float = 0.0
    """Mean absolute difference between the engine's change and the trainer's; 0 at its first."""
    change_tolerance: float | None = None
    """The tolerance of `change_missed`; `None` if it is not checked."""
    problem: str = ""
    """A sentence that describes the problem; empty if there is none."""


@dataclass(frozen=True, slots=True)
class _Reading:
    trainer: NDArray[np.float64]
    engine: NDArray[np.float64]


@dataclass(eq=False)
class ProbeGauge:
    """Judges differences relative to those of the first sync. Only readings without a problem are stored."""

    noise: NoiseBounds
    """The noise of the dtype that the engines compute in."""
    tolerance: float | None = None
    """The tolerance of the mean absolute difference; by default `MARGIN` times the first one, within `noise`."""
    _first: float | None = field(init=False, default=None)
    _first_scale: float = field(init=False, default=1.0)
    _first_change: tuple[float, float] | None = field(init=False, default=None)
    _last: dict[str, _Reading] = field(init=False, default_factory=dict)

    def forget(self, engine_id: str) -> None:
        """Drop the reading of an engine that was replaced: it is not comparable with the new engine's."""
        self._last.pop(engine_id, None)

    def judge(
        self,
        engine_id: str,
        engine: Sequence[FloatArray],
        trainer: Sequence[FloatArray],
        *,
        weights_changed: bool = True,
    ) -> ProbeResult:
        """Compare one engine's log-probs with the trainer's.

        Args:
            engine_id: The id of the engine.
            engine: The engine's log-probs of each sequence [L]; entry 0 is not compared.
            trainer: The trainer's log-probs, in the same form.
            weights_changed: Whether most tensors have changed since this engine's last probe.
        """
        now = _Reading(_flat(trainer), _flat(engine))
        before = self._last.get(engine_id)
        result = self._compare(now, before, weights_changed)
        if not result.problem:
            self._last[engine_id] = now
            if self._first is None:
                self._first, self._first_scale = result.mean_abs, float(np.abs(now.trainer).mean())
            if self._first_change is None and result.change > 0:
                self._first_change = (result.change, result.change_missed)
        return result

    def _compare(self, now: _Reading, before: _Reading | None, weights_changed: bool) -> ProbeResult:
        gap = np.abs(now.engine - now.trainer)
        mean_abs, max_abs = float(gap.mean()), float(gap.max())
        tolerance = self._tolerance(now)
        problem = ""
        if not np.isfinite(mean_abs):
            problem = "log-probs are not finite"
        elif mean_abs > tolerance:
            problem = f"log-probs differ from the trainer's by {mean_abs:.2g} on average; tolerated: {tolerance:.2g}"
        if before is None or problem:
            return ProbeResult(mean_abs=mean_abs, max_abs=max_abs, tolerance=tolerance, problem=problem)
        trainer_change, engine_change = now.trainer - before.trainer, now.engine - before.engine
        change = float(np.abs(trainer_change).mean())
        missed = float(np.abs(engine_change - trainer_change).mean())
        limit = self._change_tolerance(change)
        if weights_changed and np.mean(trainer_change != 0) > 0.5 and not engine_change.any():
            problem = "log-probs did not change at all, though the trainer's did: it computes with the old weights"
        elif limit is not None and missed > limit:
            problem = (
                f"log-probs changed otherwise than the trainer's (which moved by {change:.2g}): the changes differ by "
                f"{missed:.2g} on average; tolerated: {limit:.2g}"
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

    def _tolerance(self, now: _Reading) -> float:
        if self.tolerance is not None:
            return self.tolerance
        if self._first is None:
            return self.noise.ceiling
        # Rounding errors of a log-prob grow with its size; a policy that sharpens is not an error.
        growth = max(1.0, float(np.abs(now.trainer).mean()) / max(self._first_scale, 1e-6))
        return min(self.noise.ceiling, max(self.noise.floor, MARGIN * self._first) * growth)

    def _change_tolerance(self, change: float) -> float | None:
        """Return `MARGIN` times the first missed change, in proportion to the size of the change."""
        if not self.noise.smooth:
            return None
        if self._first_change is None:
            return None if self._first is None or self._first > self.noise.floor else self.noise.floor * 2
        first_change, first_missed = self._first_change
        return max(self.noise.floor, MARGIN * first_missed * max(1.0, change / first_change))


def _flat(logprobs: Sequence[FloatArray]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(entry, dtype=np.float64)[1:] for entry in logprobs])


def majority_dtype(manifest: Sequence[TensorSpec]) -> str:
    """Return the dtype of most elements."""
    counts: dict[str, int] = {}
    for spec in manifest:
        counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.num_elements
    return max(counts, key=lambda dtype: counts[dtype], default="float32")


def probe_batch(sequences: Sequence[IntArray]) -> TrainingBatch:
    """Return the probe's sequences as a batch for the trainer: every token but the first is in the loss."""

    def sample(index: int, token_ids: IntArray) -> TrainingSample:
        return TrainingSample(
            sample_id=f"probe-{index}",
            unit=index,
            token_ids=np.asarray(token_ids, dtype=np.int32),
            loss_mask=np.arange(len(token_ids)) > 0,
        )

    return TrainingBatch(samples=tuple(sample(i, s) for i, s in enumerate(sequences)))
