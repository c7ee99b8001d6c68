"""`roll plan`: placement of roles, size of engines, how far generation runs ahead, and what then limits a step.

    memory ──► widths of engines that fit ──► simulate synchronous, colocated ──► best width
                                                    │ mean and longest answer, time of training
                                                    ▼
               ROLL Flash's best split (P2) for each alpha ──► simulate it and its neighbors ──► the fastest

P2 (arXiv 2510.11345): with K devices, N samples a step of mean generation g and longest L (device-seconds and seconds),
and training of t device-seconds a sample, the share beta of devices that train and the gain over synchronous are

    beta* = N t / (N g + K L / (alpha + 1) + N t)            gain <= 1 + K L / (N (g + t))

The formula proposes candidates; the simulation, with batching, prefill, preemption and syncs, decides. It may exceed
the formula's bound, which assumes a constant g: engines that never run empty decode more answers at once, each in less
time.

A division in which training alone would take longer than the best step found so far is not simulated: no ratio could
make it faster. Large plans are compared on a part of the devices with the same part of the prompts; then the best ones
are simulated as a whole, and only these are recommended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roll.config.estimate import RoleMemory
from roll.config.simulation import SimulationConfig
from roll.errors import ConfigError
from roll.simulation.experts import ExpertParallel, choose_expert_parallel
from roll.simulation.hardware import Device, Model, device, model
from roll.simulation.memory import TrainerSettings, find_misfit, memory_of
from roll.simulation.run import SimulatedRun, engine_settings, simulate

__all__ = ["Candidate", "Plan", "make_plan"]

WIDTHS = (1, 2, 4, 8)
WIDER = (16, 32)
"""Tensor-parallel sizes over several machines, tried only if no engine on one machine can hold the model."""
RATIOS = (1.0, 2.0, 4.0)
SYNC_STEPS = 2
ASYNC_WARMUP = 2
"""Number of warm-up steps in addition to the steps that generation may run ahead."""
ASYNC_STEPS = 3
PARTS = (4, 2, 1)
"""Divisors of devices and prompts for comparing plans: the first that leaves enough of both is used."""
ENOUGH = 32
"""Minimum number of devices and prompts: with fewer, one long answer matters too much."""
NUM_CONFIRMED = 2
"""Number of asynchronous plans that are simulated as a whole, in addition to the synchronous one."""
SURE = 0.95
"""Certain share of the predicted training time on other devices, since the number of tokens varies a little."""
WORTH = 1.05
"""A smaller gain than this is not worth the staleness."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A simulated plan."""

    name: str
    config: SimulationConfig
    step_s: float
    wait_s: float
    train_s: float
    sync_s: float
    busy_share: float
    """Share of the engines' time in which they were busy."""
    tail_share: float
    """Share of a step's time that its longest answer would take if generated alone."""
    num_preempted: float
    scoring_share: float = 0.0
    """Share of scoring in the time from rollouts' admission by engines to their rewards."""
    part: int = 1
    """Divisor of the devices and prompts with which the plan was simulated."""

    @property
    def generation_s(self) -> float:
        """Device-seconds of generation in one step."""
        return self.busy_share * self.step_s * self.config.placement.generation

    @property
    def limit(self) -> str:
        """What limits the speed of a step."""
        if self.sync_s > 0.25 * self.step_s:
            return "weight sync"
        if self.config.rollout.scheduling.async_ratio > 0 and self.wait_s < 0.1 * self.step_s:
            return "training"
        if self.train_s > self.wait_s:
            return "training"
        if self.tail_share > 0.6:
            return "the longest answers"
        if max(self.busy_share, self.tail_share) * self.step_s >= 0.5 * self.wait_s:
            return "generation throughput"
        if self.scoring_share > 0.5:
            return "rewards"
        return "environments" if self.has_turns else "generation throughput"

    @property
    def has_turns(self) -> bool:
        """Whether rollouts may wait for an environment."""
        return self.config.environment is not None or self.config.recording is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The recommended plan, and the reasons for it."""

    config: SimulationConfig
    best: Candidate
    synchronous: Candidate
    candidates: tuple[Candidate, ...]
    memory: tuple[RoleMemory, ...]
    """Memory of `best` by role."""
    gain_bound: float
    """Upper bound of the gain from asynchrony, by P2 with the synchronous plan's costs."""
    why_not: str
    """Why asynchrony does not help; empty if it does."""
    experts: tuple[ExpertParallel, ...] = ()
    """For an MoE model, the sizes of `training.parallel.ep` that were compared for `best`."""


def make_plan(
    config: SimulationConfig,
    progress: Callable[[str], None] = lambda line: None,
    trainer: TrainerSettings | None = None,
) -> Plan:
    """Search for the fastest plan of a workload on its devices (all that `placement` names).

    Args:
        config: the workload.
        progress: called with a line for every simulated candidate.
        trainer: how the run trains, for its memory; by default all weights with AdamW and activation checkpointing.

    Raises:
        ConfigError: the model cannot be trained, or cannot generate, on these devices at all.
    """
    search = _Search(config, progress, trainer)
    synchronous = search.synchronous()
    ahead = search.asynchronous(synchronous) if synchronous else search.asynchronous(None)
    synchronous = search.whole(synchronous) if synchronous else None
    ahead = [search.whole(candidate) for candidate in sorted(ahead, key=lambda c: c.step_s)[:NUM_CONFIRMED]]
    found = [candidate for candidate in (synchronous, *ahead) if candidate is not None]
    if not found:
        raise ConfigError(search.why_nothing_fits())
    reference = synchronous or found[0]
    best_ahead = min(ahead, key=lambda c: c.step_s, default=None)
    helps = best_ahead is not None and best_ahead.step_s * WORTH < reference.step_s
    best = best_ahead if best_ahead is not None and (helps or synchronous is None) else reference
    return Plan(
        config=config,
        best=best,
        synchronous=reference,
        candidates=tuple(search.candidates),
        memory=tuple(memory_of(best.config, search.model, search.device, trainer)),
        experts=search.experts(best.config),
        gain_bound=search.gain_bound(reference),
        why_not="" if helps else search.why_not(reference, best_ahead),
    )


class _Search:
    def __init__(
        self, config: SimulationConfig, progress: Callable[[str], None], trainer: TrainerSettings | None
    ) -> None:
        self.config = config
        self._trainer = trainer
        self.model, self.device = model(config.model), device(config.device)
        self.total = config.placement.num_devices
        self.candidates: list[Candidate] = []
        self._progress = progress
        self._too_big: list[str] = []
        self._too_slow: list[tuple[float, str]] = []

    # ---- candidates

    def synchronous(self) -> Candidate | None:
        """Return the best synchronous plan, over engine sizes: all devices generate, then all train."""
        found: list[Candidate | None] = []
        place = {"placement.generation": self.total, "placement.training": 0}
        for width in (*WIDTHS, *WIDER):
            if width in WIDER and any(found):
                break
            if self.total % width == 0:
                found.append(self._try(f"synchronous, TP {width}", width, place, SYNC_STEPS, 0, {"async_ratio": 0.0}))
        return min((c for c in found if c is not None), key=lambda c: c.step_s, default=None)

    def asynchronous(self, synchronous: Candidate | None) -> list[Candidate]:
        """Return asynchronous plans, which divide the devices, for rising async ratios until more staleness gains
        nothing.

        Engines have the tensor-parallel size of the synchronous plan, or half of it for more ways to divide the
        devices.
        """
        width = synchronous.config.engine.tensor_parallel if synchronous else 0
        found: list[Candidate] = []
        at_ratio: dict[float, float] = {}
        for tried_width in sorted({width, max(1, width // 2)}, reverse=True) if width else (*WIDTHS, *WIDER):
            before: Candidate | None = None
            for ratio in RATIOS:
                start = round((self._best_share(synchronous, ratio) if synchronous else 0.5) * self.total)
                if before is not None:
                    start = max(start, before.config.placement.training)  # with a larger ratio, engines wait less
                climbed = self._climb(tried_width, ratio, start, synchronous)
                found += climbed
                fastest = min(climbed, key=lambda candidate: candidate.step_s, default=None)
                if fastest is None:
                    continue
                if before is not None and fastest.step_s > 0.98 * before.step_s:
                    break
                if fastest.step_s > at_ratio.setdefault(ratio, fastest.step_s):
                    break  # engines of another tensor-parallel size are faster
                before = fastest
        return found

    def _climb(self, width: int, ratio: float, start: int, synchronous: Candidate | None) -> list[Candidate]:
        """Begin with a number of training devices, and give devices to the limiting role as long as that helps."""
        unit = max(width, self.total // 16 // width * width)
        training = min(max(round(start / unit) * unit, unit), self.total - unit)
        found: list[Candidate] = []
        seen: set[int] = set()
        while 0 < training < self.total and training not in seen and (self.total - training) % width == 0:
            seen.add(training)
            if synchronous is not None and self._trains_too_long(synchronous, training):
                training += unit
                continue
            candidate = self._split(width, ratio, training)
            if candidate is None:
                training += unit  # helps if a trainer's rank is too small, but not if the KV cache is
                continue
            if found and candidate.step_s >= found[-1].step_s:
                found.append(candidate)
                break
            found.append(candidate)
            training += unit if candidate.limit == "training" else -unit
        return found

    def _trains_too_long(self, synchronous: Candidate, training: int) -> bool:
        """Return whether an update on this many devices takes longer than the best step found so far."""
        fixed = self.config.training.overhead_s if self.config.training.duration is None else synchronous.train_s
        arithmetic = max(0.0, synchronous.train_s - fixed) * self.total / training
        best = min(candidate.step_s for candidate in self.candidates)
        takes_s = fixed + arithmetic
        if SURE * takes_s < best:
            return False
        why = f"on {training} of {self.total} devices training alone would take {takes_s:.4g} s, a whole step of the "
        self._too_slow.append((takes_s, f"{why}best plan {best:.4g} s"))
        return True

    def _split(self, width: int, ratio: float, training: int) -> Candidate | None:
        place = {"placement.generation": self.total - training, "placement.training": training}
        name = f"async {ratio:g}, {self.total - training} + {training}, TP {width}"
        changes = {"async_ratio": ratio, "type": "queue", "prompt_redundancy": None, "choose": None}
        warmup = math.ceil(ratio) + ASYNC_WARMUP
        return self._try(name, width, place, warmup + ASYNC_STEPS, warmup, changes)

    def _try(
        self,
        name: str,
        width: int,
        place: Mapping[str, int],
        steps: int,
        warmup: int,
        scheduling: Mapping[str, object],
    ) -> Candidate | None:
        changes = {f"rollout.scheduling.{key}": value for key, value in scheduling.items()}
        sizes = {"engine.tensor_parallel": width, "num_steps": steps, "warmup_steps": warmup, "num_seeds": 1}
        config = self.config.changed({**place, **sizes, **changes}, name)
        if self.model.num_experts:
            config = config.changed({"training.expert_parallel": self.experts(config)[0].size}, name)
        why = find_misfit(config, self.model, self.device, self._trainer)
        if why:
            self._too_big.append(f"{name}: {why}")
            return None
        candidate = self._simulated(name, config, self._part(config))
        self.candidates.append(candidate)
        return candidate

    def _part(self, config: SimulationConfig) -> int:
        """Return the divisor by which this plan is scaled down to be compared with others."""
        place, prompts = config.placement, config.rollout.prompts_per_step
        for part in PARTS:
            whole = (place.generation // config.engine.tensor_parallel, place.training, prompts)
            if min(self.total, prompts) // part >= ENOUGH and not any(number % part for number in whole):
                return part
        return 1

    def _simulated(self, name: str, config: SimulationConfig, part: int) -> Candidate:
        place, prompts = config.placement, config.rollout.prompts_per_step
        smaller = {
            "placement.generation": place.generation // part,
            "placement.training": place.training // part,
            "rollout.prompts_per_step": prompts // part,
        }
        run = simulate(config.changed(smaller, name) if part > 1 else config)
        candidate = _candidate(name, config, run, self.model, self.device, part)
        about = "about " if part > 1 else ""
        self._progress(f"{name}: {about}{candidate.step_s:.4g} s a step, limited by {candidate.limit}")
        return candidate

    def whole(self, candidate: Candidate) -> Candidate:
        """Simulate the same plan on all devices with all prompts, and replace the candidate by the result."""
        if candidate.part == 1:
            return candidate
        confirmed = self._simulated(candidate.name, candidate.config, 1)
        self.candidates[self.candidates.index(candidate)] = confirmed
        return confirmed

    def experts(self, config: SimulationConfig) -> tuple[ExpertParallel, ...]:
        """Return the sizes of `ep` for this division of the devices, the best one first."""
        return choose_expert_parallel(config, self.model, self.device, self._trainer)

    # ---- theory

    def _terms(self, reference: Candidate) -> tuple[float, float, float]:
        """Return the terms N g, K L and N t of P2, in device-seconds, from a synchronous run."""
        long = reference.tail_share * reference.step_s
        generation = reference.busy_share * reference.step_s * self.total
        return max(generation - long, 1e-9), self.total * long, self.total * reference.train_s

    def _best_share(self, reference: Candidate, ratio: float) -> float:
        generation, tail, training = self._terms(reference)
        return training / (generation + tail / (ratio + 1) + training) if training else 0.0

    def gain_bound(self, reference: Candidate) -> float:
        """Return the upper bound of the gain from asynchrony, with any ratio."""
        generation, tail, training = self._terms(reference)
        return 1 + tail / (generation + training)

    def why_not(self, reference: Candidate, ahead: Candidate | None) -> str:
        """Return why asynchrony does not help."""
        if ahead is None and self._too_slow:
            return min(self._too_slow)[1]
        if ahead is None:
            what = self._too_big[-1] if self._too_big else f"{self.total} devices cannot be divided"
            return f"no division of the devices fits ({what})"
        if reference.train_s + reference.sync_s < 0.05 * reference.step_s and reference.tail_share < 0.3:
            if reference.limit in ("rewards", "environments"):
                return f"{reference.limit} take nearly all of a step: more or quicker ones would help"
            return "generation takes nearly all of a step, and keeps its engines busy: there is nothing to overlap with"
        if self.gain_bound(reference) < 1.1:
            return "its longest answers hold a step up only little"
        return (
            f"the best division ({ahead.name}) is {'only ' if ahead.step_s < reference.step_s else ''}"
            f"{reference.step_s / ahead.step_s:.2f} times as fast: fewer devices for each role cost what overlap gains"
        )

    def why_nothing_fits(self) -> str:
        """Return the message for a search without a feasible plan."""
        lines = "; ".join(dict.fromkeys(self._too_big)) or "there are too few devices"
        return (
            f"no plan for {self.model.name} fits {self.total} x {self.device.name} ({lines}): use more or larger "
            "devices, or lower rollout.max_new_tokens."
        )


def _candidate(
    name: str, config: SimulationConfig, run: SimulatedRun, made_of: Model, on: Device, part: int
) -> Candidate:
    def mean(field: str) -> float:
        return math.fsum(getattr(step, field) for step in run.steps) / len(run.steps)

    costs = engine_settings(config, made_of, on).costs
    longest = mean("longest")
    alone = longest * (costs.decode_s(1) + costs.context_s * longest / 2)
    return Candidate(
        name=name,
        config=config,
        step_s=run.step_s,
        tail_share=min(1.0, alone / run.step_s),
        **{name: mean(name) for name in ("wait_s", "train_s", "sync_s", "busy_share", "num_preempted")},
        scoring_share=run.recorder.scoring_share,
        part=part,
    )
