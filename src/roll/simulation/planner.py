"""`roll plan`: choose the placement of roles, the size of engines and the async ratio, and report the bottleneck.

    memory ──► sizes of engines that fit ──► simulate synchronous, colocated
                                                    │ mean and longest answer, time of training and sync
                                                    ▼
             predict all splits ──► simulate them in this order, until no prediction is lower than the fastest plan

The prediction of a split is the time of its weight sync and the maximum of three times: training, generation with full
engines, and the longest answer, for which `async_ratio + 1` steps are available. The simulation also includes waiting,
prefill, preemption and rewards. Simulated times are longer than predicted by a similar ratio for all splits of a
workload; the search therefore scales the predictions by the lowest ratio so far.

The bound of the gain is that of ROLL Flash (P2, arXiv 2510.11345): let K be the number of devices, N the samples per
step, g the mean generation time of a sample in device-seconds, L the time of the longest answer in seconds, and t the
training time of a sample in device-seconds. Then the speed-up over synchronous training is at most

    1 + K L / (N (g + t))

The simulated gain may exceed the bound, which assumes a constant g: engines whose batches are always full spend less
time on each answer.

Large plans are compared at a fraction of their devices and prompts; the best plans are then simulated at full size, and
only these are recommended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from roll.config.estimate import RoleMemory
from roll.config.simulation import SimulationConfig
from roll.errors import ConfigError
from roll.simulation.candidate import Candidate, build_candidate
from roll.simulation.experts import ExpertParallel, choose_expert_parallel
from roll.simulation.hardware import load_device, load_model_sizes
from roll.simulation.memory import TrainerSettings, estimate_memory, find_memory_problem
from roll.simulation.run import build_engine_settings, simulate

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
"""Minimum number of simulated steps of an asynchronous plan, without the warm-up."""
DIVISORS = (4, 2, 1)
"""Divisors of devices and prompts for comparing plans; the first that leaves at least `MIN_SIZE` of both is used."""
MIN_SIZE = 32
"""Minimum number of devices and prompts of a scaled-down plan: with fewer, one long answer would have too much
influence."""
NUM_FULL_SIZE_PLANS = 2
"""Number of asynchronous plans that are simulated at full size, in addition to the synchronous plan."""
MIN_TIME_FRACTION = 0.95
"""Lower bound of an update's duration, as a fraction of its prediction; the number of tokens varies slightly."""
MAX_UNITS = 16
"""Maximum number of parts of equal size that the devices are divided into to list the splits."""
MAX_SPLITS = 10
"""Maximum number of splits that are simulated."""
PREDICTION_FACTOR = 0.75
"""Factor by which predictions, scaled by the lowest ratio of simulated to predicted time so far, may be too high."""
MAX_SLOWDOWN = 1.02
"""Maximum slowdown for which a smaller async ratio is preferred."""
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
    colocated = search.search_synchronous_plans()
    asynchronous = search.search_asynchronous_plans(colocated)
    fastest_colocated = min(colocated, key=lambda c: c.step_s, default=None)
    synchronous = search.simulate_full_size(fastest_colocated) if fastest_colocated else None
    asynchronous = _sort_by_preference(asynchronous)[:NUM_FULL_SIZE_PLANS]
    asynchronous = _sort_by_preference([search.simulate_full_size(candidate) for candidate in asynchronous])
    found = [candidate for candidate in (synchronous, *asynchronous) if candidate is not None]
    if not found:
        raise ConfigError(search.describe_no_feasible_plan())
    reference = synchronous or found[0]
    best_ahead = asynchronous[0] if asynchronous else None
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


def _sort_by_preference(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort plans by step time, but put plans first that are nearly the fastest and have a smaller async ratio."""
    fastest = min((candidate.step_s for candidate in candidates), default=0.0)

    def compute_rank(candidate: Candidate) -> tuple[bool, float, float]:
        is_slower = candidate.step_s > MAX_SLOWDOWN * fastest
        return is_slower, 0.0 if is_slower else candidate.config.rollout.scheduling.async_ratio, candidate.step_s

    return sorted(candidates, key=compute_rank)


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
        self._too_slow = ""
        """Reason why the split with the lowest prediction among the remaining splits was not simulated."""

    # ---- candidates

    def search_synchronous_plans(self) -> list[Candidate]:
        """Simulate a synchronous plan for each engine size, and return the candidates; empty if no plan fits.

        In a synchronous plan, all devices first generate and then train.
        """
        found: list[Candidate] = []
        placement = {"placement.generation": self.total, "placement.training": 0}
        for width in (*TP_SIZES, *LARGE_TP_SIZES):
            if width in LARGE_TP_SIZES and found:
                break
            if self.total % width == 0:
                name = f"synchronous, TP {width}"
                candidate = self._try_plan(name, width, placement, SYNC_STEPS, 0, {"async_ratio": 0.0})
                found += [candidate] if candidate is not None else []
        return found

    def search_asynchronous_plans(self, synchronous: Sequence[Candidate]) -> list[Candidate]:
        """Simulate splits of the devices between generation and training, and return the candidates.

        With the largest async ratio, splits are simulated in ascending order of their predicted step times, until no
        prediction is lower than the fastest plan. The fastest splits are then simulated with smaller ratios.
        """
        largest = ASYNC_RATIOS[-1]
        splits = self._list_splits()
        found: list[Candidate] = []
        factors: list[float] = []
        while splits and len(found) < MAX_SPLITS:
            known = [*synchronous, *found]
            predicted = {split: self._predict_step_s(*split, largest, known[0] if known else None) for split in splits}
            width, training = split = min(splits, key=lambda each: (predicted[each], abs(each[1] - self.total / 2)))
            fastest = min((candidate.step_s for candidate in known), default=math.inf)
            if min(factors, default=1.0) * predicted[split] >= fastest:
                self._record_too_slow(known[0], training, predicted[split], fastest)
                break
            splits.remove(split)
            candidate = self._try_split(width, largest, training)
            if candidate is not None:
                found.append(candidate)
                factors += [PREDICTION_FACTOR * candidate.step_s / predicted[split]] if predicted[split] else []
        return [*found, *self._lower_async_ratio(found)]

    def _lower_async_ratio(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Simulate the fastest of the given plans with smaller async ratios, while these are nearly as fast."""
        fastest = sorted(found, key=lambda candidate: candidate.step_s)[:NUM_FULL_SIZE_PLANS]
        lower: list[Candidate] = []
        for ratio in reversed(ASYNC_RATIOS[:-1]):
            candidates = [
                self._try_split(each.config.engine.tensor_parallel, ratio, each.config.placement.training)
                for each in fastest
            ]
            simulated = [candidate for candidate in candidates if candidate is not None]
            lower += simulated
            if not simulated or min(each.step_s for each in simulated) > MAX_SLOWDOWN * fastest[0].step_s:
                break
        return lower

    def _list_splits(self) -> list[tuple[int, int]]:
        """Return the compared splits as pairs of engine size and number of training devices.

        In large plans, the numbers of engines and training devices can be divided by `DIVISORS`.
        """
        size = min(self.total, self.config.rollout.prompts_per_step)
        divisor = next((divisor for divisor in DIVISORS if size // divisor >= MIN_SIZE), 1)
        splits: list[tuple[int, int]] = []
        for width in (*TP_SIZES, *LARGE_TP_SIZES):
            unit = max(1, self.total // MAX_UNITS // (width * divisor)) * width * divisor
            splits += [(width, self.total - generation) for generation in range(unit, self.total, unit)]
        return splits

    def _predict_step_s(self, width: int, training: int, ratio: float, reference: Candidate | None) -> float:
        """Return a lower estimate of the step time of a split: the maximum of the time to train a step, to generate its
        tokens with full engines, and to generate the longest answer within `ratio + 1` steps.

        The numbers of tokens are those of the simulated plan `reference`; without it, the estimate is 0.
        """
        if reference is None:
            return 0.0
        changes = {"placement.generation": self.total - training, "placement.training": training}
        config = self.config.with_changes(changes | {"engine.tensor_parallel": width})
        try:
            settings = build_engine_settings(config, self.model, self.device)
        except ConfigError:
            return 0.0  # simulating the split records the reason
        costs, limits = settings.costs, settings.limits
        num_engines = (self.total - training) / width
        mean = reference.num_tokens / self.config.rollouts_per_step
        in_flight = self.config.rollouts_per_step * (ratio + 1) / num_engines
        batch = max(1, math.floor(min(limits.max_num_seqs, in_flight, limits.kv_capacity / max(1.0, mean / 2))))
        token_s = costs.compute_decode_s(batch) / batch + costs.context_s * mean / 2
        longest_s = reference.longest * (costs.compute_decode_s(1) + costs.context_s * reference.longest / 2)
        return reference.sync_s + max(
            self._predict_train_s(reference, training),
            reference.num_tokens * token_s / num_engines,
            longest_s / (ratio + 1),
        )

    def _predict_train_s(self, reference: Candidate, training: int) -> float:
        """Return the time of an update on `training` devices."""
        fixed = self.config.training.overhead_s if self.config.training.duration is None else reference.train_s
        devices = reference.config.placement.num_training_devices
        return fixed + max(0.0, reference.train_s - fixed) * devices / training

    def _record_too_slow(self, reference: Candidate, training: int, predicted_s: float, best_s: float) -> None:
        """Record why a split is not simulated: training alone takes longer than the best step, or generation does."""
        train_s = self._predict_train_s(reference, training)
        if MIN_TIME_FRACTION * train_s >= best_s:
            self._too_slow = (
                f"on {training} of {self.total} devices training alone would take {train_s:.4g} s, but a whole step of "
                f"the best plan takes {best_s:.4g} s"
            )
        else:
            self._too_slow = (
                f"a step of the best split is predicted to take at least {predicted_s:.4g} s, because fewer devices "
                "would generate"
            )

    def _try_split(self, width: int, ratio: float, training: int) -> Candidate | None:
        placement = {"placement.generation": self.total - training, "placement.training": training}
        name = f"async {ratio:g}, {self.total - training} + {training}, TP {width}"
        changes = {"async_ratio": ratio, "type": "queue", "prompt_redundancy": None, "choose": None}
        warmup = math.ceil(ratio) + ASYNC_WARMUP
        steps = max(ASYNC_STEPS, math.ceil(ratio) + 1)  # all rollouts in flight finish within these steps
        return self._try_plan(name, width, placement, warmup + steps, warmup, changes)

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
        """Return device-seconds of a synchronous step for the bound P2 (see the module's docstring).

        The terms are the device-seconds of generation without the longest answer (N g), of all devices during the
        longest answer (K L), and of training (N t).
        """
        long = reference.tail_share * reference.step_s
        generation = reference.busy_share * reference.step_s * self.total
        return max(generation - long, 1e-9), self.total * long, self.total * reference.train_s

    def compute_gain_bound(self, reference: Candidate) -> float:
        """Return the upper bound of the speed-up of asynchronous plans over a synchronous plan, for any async ratio."""
        generation, tail, training = self._compute_terms(reference)
        return 1 + tail / (generation + training)

    def describe_missing_gain(self, reference: Candidate, asynchronous: Candidate | None) -> str:
        """Return the reason why no asynchronous plan is sufficiently faster than `reference`."""
        if asynchronous is None and self._too_slow:
            return self._too_slow
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
