"""`roll plan`: choose the placement of roles, the size of engines and the async ratio, and report the bottleneck.

    memory ──► widths of engines that fit ──► simulate synchronous, colocated ──► best width
                                                    │ mean and longest answer, time of training
                                                    ▼
               ROLL Flash's best split (P2) for each alpha ──► simulate it and its neighbors ──► the fastest

P2 (arXiv 2510.11345): let K be the number of devices, N the samples per step, g the mean generation time of a sample in
device-seconds, L the time of the longest answer in seconds, and t the training time of a sample in device-seconds. The
best fraction beta of devices that train, and the bound of the speed-up over synchronous training, are

    beta* = N t / (N g + K L / (alpha + 1) + N t)            gain <= 1 + K L / (N (g + t))

The formula proposes candidates; the simulation, which includes batching, prefill, preemption and syncs, selects the
fastest. The simulated gain may exceed the formula's bound, which assumes a constant g: engines whose batches are always
full spend less time on each answer.

A split is not simulated if training alone takes longer than the best step so far, because no async ratio could make the
split faster. Large plans are compared at a fraction of their devices and prompts; the best plans are then simulated at
full size, and only these are recommended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roll.config.estimate import RoleMemory
from roll.config.simulation import SimulationConfig
from roll.errors import ConfigError
from roll.simulation.candidate import Candidate, build_candidate
from roll.simulation.experts import ExpertParallel, choose_expert_parallel
from roll.simulation.hardware import load_device, load_model_sizes
from roll.simulation.memory import TrainerSettings, estimate_memory, find_memory_problem
from roll.simulation.run import simulate

__all__ = ["Plan", "make_plan"]

TP_SIZES = (1, 2, 4, 8)
LARGE_TP_SIZES = (16, 32)
"""Tensor-parallel sizes over several machines, tried only if no engine on one machine can hold the model."""
ASYNC_RATIOS = (1.0, 2.0, 4.0)
SYNC_STEPS = 2
"""Number of simulated steps of a synchronous plan."""
ASYNC_WARMUP = 2
"""Number of warm-up steps in addition to the steps that generation may run ahead."""
ASYNC_STEPS = 3
"""Number of simulated steps of an asynchronous plan, without the warm-up."""
DIVISORS = (4, 2, 1)
"""Divisors of devices and prompts for comparing plans; the first that leaves at least `MIN_SIZE` of both is used."""
MIN_SIZE = 32
"""Minimum number of devices and prompts of a scaled-down plan: with fewer, one long answer would have too much
influence."""
NUM_FULL_SIZE_PLANS = 2
"""Number of asynchronous plans that are simulated at full size, in addition to the synchronous plan."""
MIN_TIME_FRACTION = 0.95
"""Lower bound of an update's duration, as a fraction of its prediction; the number of tokens varies slightly."""
MIN_GAIN = 1.05
"""Minimum speed-up for which an asynchronous plan is recommended; a smaller speed-up does not justify the staleness."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The recommended plan, with the candidates and estimates behind it."""

    config: SimulationConfig
    best: Candidate
    synchronous: Candidate
    candidates: tuple[Candidate, ...]
    memory: tuple[RoleMemory, ...]
    """Memory of `best` by role."""
    gain_bound: float
    """Upper bound of the gain from asynchrony, by P2 with the synchronous plan's costs."""
    no_gain_reason: str
    """Reason why asynchrony does not help; empty if it does."""
    split: Candidate | None = None
    """The synchronous plan with larger batches, each split into several updates, with the same staleness as `best`;
    `None` if `best` is synchronous.
    """
    experts: tuple[ExpertParallel, ...] = ()
    """Compared sizes of `training.parallel.ep` for `best`; empty for a dense model."""


def make_plan(
    config: SimulationConfig,
    progress: Callable[[str], None] = lambda line: None,
    trainer: TrainerSettings | None = None,
) -> Plan:
    """Search for the fastest plan that runs a workload on all its devices, and return it.

    Args:
        config: The workload; `placement` gives the number of devices.
        progress: Called with a line for every simulated candidate.
        trainer: Settings of the run that affect the trainer's memory; by default all weights with AdamW and activation
            checkpointing.

    Raises:
        ConfigError: No plan fits into the memory of these devices.
    """
    search = _PlanSearch(config, progress, trainer)
    synchronous = search.search_synchronous_plan()
    asynchronous = search.search_asynchronous_plans(synchronous)
    synchronous = search.simulate_full_size(synchronous) if synchronous else None
    fastest = sorted(asynchronous, key=lambda c: c.step_s)[:NUM_FULL_SIZE_PLANS]
    asynchronous = [search.simulate_full_size(candidate) for candidate in fastest]
    found = [candidate for candidate in (synchronous, *asynchronous) if candidate is not None]
    if not found:
        raise ConfigError(search.describe_no_feasible_plan())
    reference = synchronous or found[0]
    best_ahead = min(asynchronous, key=lambda c: c.step_s, default=None)
    helps = best_ahead is not None and best_ahead.step_s * MIN_GAIN < reference.step_s
    best = best_ahead if best_ahead is not None and (helps or synchronous is None) else reference
    return Plan(
        config=config,
        best=best,
        synchronous=reference,
        candidates=tuple(search.candidates),
        memory=tuple(estimate_memory(best.config, search.model, search.device, trainer)),
        split=search.simulate_split(reference, best) if synchronous and best is not reference else None,
        experts=search.compare_expert_sizes(best.config),
        gain_bound=search.compute_gain_bound(reference),
        no_gain_reason="" if helps else search.describe_missing_gain(reference, best_ahead),
    )


class _PlanSearch:
    """Simulates the plans of a workload, and stores the results."""

    def __init__(
        self, config: SimulationConfig, progress: Callable[[str], None], trainer: TrainerSettings | None
    ) -> None:
        self.config = config
        self._trainer = trainer
        self.model, self.device = load_model_sizes(config.model), load_device(config.device)
        self.total = config.placement.num_devices
        self.candidates: list[Candidate] = []
        self._progress = progress
        self._too_big: list[str] = []
        self._too_slow: list[tuple[float, str]] = []

    # ---- candidates

    def search_synchronous_plan(self) -> Candidate | None:
        """Return the fastest synchronous plan over all engine sizes; `None` if no plan fits.

        In a synchronous plan, all devices first generate and then train.
        """
        found: list[Candidate | None] = []
        placement = {"placement.generation": self.total, "placement.training": 0}
        for width in (*TP_SIZES, *LARGE_TP_SIZES):
            if width in LARGE_TP_SIZES and any(found):
                break
            if self.total % width == 0:
                found.append(
                    self._try_plan(f"synchronous, TP {width}", width, placement, SYNC_STEPS, 0, {"async_ratio": 0.0})
                )
        return min((c for c in found if c is not None), key=lambda c: c.step_s, default=None)

    def search_asynchronous_plans(self, synchronous: Candidate | None) -> list[Candidate]:
        """Simulate asynchronous plans with increasing async ratios until a higher ratio gains little; return the
        candidates.

        Each plan splits the devices between generation and training. Engines have the tensor-parallel size of the
        synchronous plan or half of it, which allows more splits; without a synchronous plan, all sizes are tried.
        """
        width = synchronous.config.engine.tensor_parallel if synchronous else 0
        found: list[Candidate] = []
        at_ratio: dict[float, float] = {}
        widths = sorted({width, max(1, width // 2)}, reverse=True) if width else [*TP_SIZES, *LARGE_TP_SIZES]
        for tried_width in widths:
            before: Candidate | None = None
            for ratio in ASYNC_RATIOS:
                start = round(
                    (self._compute_best_training_fraction(synchronous, ratio) if synchronous else 0.5) * self.total
                )
                if before is not None:
                    start = max(start, before.config.placement.training)  # with a larger ratio, engines wait less
                climbed = self._search_splits(tried_width, ratio, start, synchronous)
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

    def _search_splits(self, width: int, ratio: float, start: int, synchronous: Candidate | None) -> list[Candidate]:
        """Simulate splits of the devices by hill climbing, and return the candidates.

        The search begins with `start` training devices and moves devices to the bottleneck while this reduces the step
        time.
        """
        unit = max(width, self.total // 16 // width * width)
        training = min(max(round(start / unit) * unit, unit), self.total - unit)
        found: list[Candidate] = []
        seen: set[int] = set()
        while 0 < training < self.total and training not in seen and (self.total - training) % width == 0:
            seen.add(training)
            if synchronous is not None and self._is_training_too_slow(synchronous, training):
                training += unit
                continue
            candidate = self._try_split(width, ratio, training)
            if candidate is None:
                training += unit  # helps if a trainer's rank is too small, but not if the KV cache is
                continue
            if found and candidate.step_s >= found[-1].step_s:
                found.append(candidate)
                break
            found.append(candidate)
            training += unit if candidate.bottleneck == "training" else -unit
        return found

    def _is_training_too_slow(self, synchronous: Candidate, training: int) -> bool:
        """Return whether an update on `training` devices takes longer than the best step so far; if so, record the
        reason.
        """
        fixed = self.config.training.overhead_s if self.config.training.duration is None else synchronous.train_s
        arithmetic = max(0.0, synchronous.train_s - fixed) * self.total / training
        best = min(candidate.step_s for candidate in self.candidates)
        takes_s = fixed + arithmetic
        if MIN_TIME_FRACTION * takes_s < best:
            return False
        why = (
            f"on {training} of {self.total} devices training alone would take {takes_s:.4g} s, but a whole step of the "
        )
        self._too_slow.append((takes_s, f"{why}best plan takes {best:.4g} s"))
        return True

    def _try_split(self, width: int, ratio: float, training: int) -> Candidate | None:
        placement = {"placement.generation": self.total - training, "placement.training": training}
        name = f"async {ratio:g}, {self.total - training} + {training}, TP {width}"
        changes = {"async_ratio": ratio, "type": "queue", "prompt_redundancy": None, "choose": None}
        warmup = math.ceil(ratio) + ASYNC_WARMUP
        return self._try_plan(name, width, placement, warmup + ASYNC_STEPS, warmup, changes)

    def _try_plan(
        self,
        name: str,
        width: int,
        placement: Mapping[str, int],
        steps: int,
        warmup: int,
        scheduling: Mapping[str, object],
    ) -> Candidate | None:
        changes = {f"rollout.scheduling.{key}": value for key, value in scheduling.items()}
        sizes = {"engine.tensor_parallel": width, "num_steps": steps, "warmup_steps": warmup, "num_seeds": 1}
        config = self.config.with_changes({**placement, **sizes, **changes}, name)
        if self.model.num_experts:
            config = config.with_changes({"training.expert_parallel": self.compare_expert_sizes(config)[0].size}, name)
        why = find_memory_problem(config, self.model, self.device, self._trainer)
        if why:
            self._too_big.append(f"{name}: {why}")
            return None
        candidate = self._simulate_candidate(name, config, self._choose_divisor(config))
        self.candidates.append(candidate)
        return candidate

    def _choose_divisor(self, config: SimulationConfig) -> int:
        """Return the divisor by which devices and prompts are scaled down when plans are compared; 1 for full size."""
        placement, prompts = config.placement, config.rollout.prompts_per_step
        for divisor in DIVISORS:
            whole = (placement.generation // config.engine.tensor_parallel, placement.training, prompts)
            if min(self.total, prompts) // divisor >= MIN_SIZE and not any(number % divisor for number in whole):
                return divisor
        return 1

    def _simulate_candidate(self, name: str, config: SimulationConfig, divisor: int) -> Candidate:
        placement, prompts = config.placement, config.rollout.prompts_per_step
        smaller = {
            "placement.generation": placement.generation // divisor,
            "placement.training": placement.training // divisor,
            "rollout.prompts_per_step": prompts // divisor,
        }
        run = simulate(config.with_changes(smaller, name) if divisor > 1 else config)
        candidate = build_candidate(name, config, run, self.model, self.device, divisor)
        about = "about " if divisor > 1 else ""
        self._progress(f"{name}: {about}{candidate.step_s:.4g} s a step, limited by {candidate.bottleneck}")
        return candidate

    def simulate_full_size(self, candidate: Candidate) -> Candidate:
        """Simulate a plan on all devices with all prompts; replace the candidate with the result, and return it."""
        if candidate.divisor == 1:
            return candidate
        confirmed = self._simulate_candidate(candidate.name, candidate.config, 1)
        self.candidates[self.candidates.index(candidate)] = confirmed
        return confirmed

    def simulate_split(self, synchronous: Candidate, asynchronous: Candidate) -> Candidate:
        """Simulate the synchronous plan with several updates per batch, at the same staleness as the plan
        `asynchronous`.

        Samples and tokens per update stay the same. A batch is generated by one policy version, so its longest answers
        delay only one of its updates.
        """
        scheduling, updates = asynchronous.config.rollout.scheduling, synchronous.config.training.num_updates
        split = updates + math.ceil(scheduling.async_ratio)
        prompts = synchronous.config.rollout.prompts_per_step // updates * split
        name = f"{synchronous.name}, {split} updates per batch"
        changes = {"rollout.prompts_per_step": prompts, "training.num_updates": split, "warmup_steps": 0}
        config = synchronous.config.with_changes({**changes, "num_steps": SYNC_STEPS}, name)
        return self._simulate_candidate(name, config, self._choose_divisor(config))

    def compare_expert_sizes(self, config: SimulationConfig) -> tuple[ExpertParallel, ...]:
        """Return estimates for all sizes of `ep` with the devices of `config`, the best size first."""
        return choose_expert_parallel(config, self.model, self.device, self._trainer)

    # ---- theory

    def _compute_terms(self, reference: Candidate) -> tuple[float, float, float]:
        """Return device-seconds of a synchronous step for the formula P2 (see the module's docstring).

        The terms are the device-seconds of generation without the longest answer (N g), of all devices during the
        longest answer (K L), and of training (N t).
        """
        long = reference.tail_share * reference.step_s
        generation = reference.busy_share * reference.step_s * self.total
        return max(generation - long, 1e-9), self.total * long, self.total * reference.train_s

    def _compute_best_training_fraction(self, reference: Candidate, ratio: float) -> float:
        generation, tail, training = self._compute_terms(reference)
        return training / (generation + tail / (ratio + 1) + training) if training else 0.0

    def compute_gain_bound(self, reference: Candidate) -> float:
        """Return the upper bound of the speed-up of asynchronous plans over a synchronous plan, for any async ratio."""
        generation, tail, training = self._compute_terms(reference)
        return 1 + tail / (generation + training)

    def describe_missing_gain(self, reference: Candidate, asynchronous: Candidate | None) -> str:
        """Return the reason why no asynchronous plan is sufficiently faster than `reference`."""
        if asynchronous is None and self._too_slow:
            return min(self._too_slow)[1]
        if asynchronous is None:
            what = self._too_big[-1] if self._too_big else f"{self.total} devices cannot be split"
            return f"no split of the devices fits ({what})"
        if reference.train_s + reference.sync_s < 0.05 * reference.step_s and reference.tail_share < 0.3:
            if reference.bottleneck in ("rewards", "environments"):
                limit = reference.bottleneck
                return f"{limit} take nearly all of a step: more or faster {limit} would help"
            return "generation takes nearly all of a step, and keeps its engines busy: there is nothing to overlap with"
        if self.compute_gain_bound(reference) < 1.1:
            return "the longest answers hardly delay a step"
        return (
            f"the best split ({asynchronous.name}) is {'only ' if asynchronous.step_s < reference.step_s else ''}"
            f"{reference.step_s / asynchronous.step_s:.2f} times as fast: the overlap does not make up for fewer "
            "devices per role"
        )

    def describe_no_feasible_plan(self) -> str:
        """Return the error message for a search in which no plan fits into the devices' memory."""
        lines = "; ".join(dict.fromkeys(self._too_big)) or "there are too few devices"
        return (
            f"no plan for {self.model.name} fits {self.total} x {self.device.name} ({lines}): use more or larger "
            "devices, or lower rollout.max_new_tokens."
        )
