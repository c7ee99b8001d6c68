"""The search for the fastest plan: which plans are simulated, and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from roll.config.sharing import SharingRule
from roll.config.simulation import SimulationConfig
from roll.simulation.candidate import Candidate, build_candidate
from roll.simulation.experts import ExpertParallel, choose_expert_parallel
from roll.simulation.hardware import load_device, load_model_sizes
from roll.simulation.memory import TrainerSettings, compute_switch_s, find_memory_problem
from roll.simulation.plan_prediction import Split, predict_step_s, predict_train_s
from roll.simulation.run import simulate

__all__ = ["PlanSearch", "sort_by_preference"]

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
DIVISORS = (8, 4, 2, 1)
"""Divisors of devices and prompts for comparing plans; the first that leaves enough of both is used."""
MIN_DEVICES, MIN_ROLLOUTS = 8, 128
"""Minimum number of devices, and of rollouts per step, of a scaled-down plan: with fewer rollouts, one long answer
would have too much influence."""
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


def sort_by_preference(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort plans by step time, but put plans first that are nearly the fastest and have a smaller async ratio."""
    fastest = min((candidate.step_s for candidate in candidates), default=0.0)

    def compute_rank(candidate: Candidate) -> tuple[bool, float, float]:
        is_slower = candidate.step_s > MAX_SLOWDOWN * fastest
        return is_slower, 0.0 if is_slower else candidate.config.rollout.scheduling.async_ratio, candidate.step_s

    return sorted(candidates, key=compute_rank)


class PlanSearch:
    """Simulates the plans of a workload, and stores the results.

    Args:
        config: The workload; `placement` gives the number of devices.
        progress: Called with a line for every simulated plan.
        trainer: Settings of the run that affect the trainer's memory.
    """

    def __init__(
        self, config: SimulationConfig, progress: Callable[[str], None], trainer: TrainerSettings | None
    ) -> None:
        self.config = config
        self._trainer = trainer
        self.model, self.device = load_model_sizes(config.model), load_device(config.device)
        self.total = config.placement.num_devices
        self.candidates: list[Candidate] = []
        self.too_slow = ""
        """Reason why the split with the lowest prediction among the remaining splits was not simulated."""
        self.too_large: list[str] = []
        """Plans that do not fit into the devices' memory, with the reasons."""
        self._progress = progress

    # ---- candidates

    def search_synchronous_plans(self) -> list[Candidate]:
        """Simulate a synchronous plan for each engine size, and return the candidates; empty if no plan fits.

        In a synchronous plan, all devices first generate and then train.
        """
        found: list[Candidate] = []
        for width in (*TP_SIZES, *LARGE_TP_SIZES):
            if width in LARGE_TP_SIZES and found:
                break
            if self.total % width == 0:
                split = Split(width, self.total, 0)
                candidate = self._try_plan(f"synchronous, TP {width}", split, SYNC_STEPS, 0, {"async_ratio": 0.0})
                found += [candidate] if candidate is not None else []
        return found

    def search_asynchronous_plans(self, synchronous: Sequence[Candidate]) -> list[Candidate]:
        """Simulate splits of the devices between generation and training, and return the candidates.

        With the largest async ratio, splits are simulated in ascending order of their predicted step times, until no
        prediction is lower than the fastest plan. The fastest splits are then simulated with smaller ratios.
        Predictions are scaled by the ratio of simulated to predicted time of splits with engines of the same size:
        the ratio differs between sizes.
        """
        largest = ASYNC_RATIOS[-1]
        splits = self._list_splits()
        found: list[Candidate] = []
        factors: dict[int, float] = {}
        """The lowest ratio by engine width, multiplied by `PREDICTION_FACTOR`."""
        while splits and len(found) < MAX_SPLITS:
            known = [*synchronous, *found]
            predicted = {split: self._predict_step_s(split, largest, known) for split in splits}
            scaled = {split: factors.get(split.width, 1.0) * predicted[split] for split in splits}
            split = min(splits, key=lambda each: (scaled[each], abs(each.training - each.generation)))
            fastest = min((candidate.step_s for candidate in known), default=math.inf)
            if scaled[split] >= fastest:
                self._record_too_slow(known[0], split, predicted[split], fastest)
                break
            splits.remove(split)
            candidate = self._try_split(split, largest)
            if candidate is not None:
                found.append(candidate)
                if predicted[split]:
                    factor = PREDICTION_FACTOR * candidate.step_s / predicted[split]
                    factors[split.width] = min(factor, factors.get(split.width, math.inf))
        return [*found, *self._lower_async_ratio(found)]

    def search_shared_plans(
        self, synchronous: Sequence[Candidate], asynchronous: Sequence[Candidate]
    ) -> list[Candidate]:
        """Simulate plans in which all devices generate and the trainer shares some of them; return the candidates.

        The rules are `stream_training` in synchronous plans, and `elastic_overlap` with the async ratio of the fastest
        asynchronous plan. The engines have the sizes of the fastest plans.
        """
        if self.config.failures:
            return []  # these are not simulated with shared devices
        fastest = [sort_by_preference(plans)[0].config for plans in (synchronous, asynchronous) if plans]
        widths = sorted({config.engine.width for config in fastest})
        found: list[Candidate | None] = []
        if synchronous and self._can_stream:
            for split in self._list_shared_splits(widths, "stream_training"):
                name = f"stream_training, {split.training} of {self.total} train, TP {split.width}"
                found.append(self._try_plan(name, split, SYNC_STEPS, 0, {"async_ratio": 0.0}))
        if asynchronous:
            ratio = fastest[-1].rollout.scheduling.async_ratio
            for split in self._list_shared_splits(
                [fastest[-1].engine.width], "elastic_overlap", fastest[-1].placement.training
            ):
                found.append(self._try_split(split, ratio))
        return [candidate for candidate in found if candidate is not None]

    @property
    def _can_stream(self) -> bool:
        """True if the trainer can compute gradients of finished groups while other groups are generated."""
        training = self.config.training
        is_supported = self._trainer is None or self._trainer.can_stream
        return is_supported and training.num_updates == 1 and training.duration is None

    def _list_shared_splits(self, widths: Sequence[int], rule: SharingRule, *sizes: int) -> list[Split]:
        splits: list[Split] = []
        for width in widths:
            if self.total % width:
                continue
            unit = width * self._get_max_divisor()
            unit = unit if 4 * unit <= self.total else width
            whole = {size // unit * unit for size in (*sizes, self.total // 2, self.total * 3 // 4)}
            splits += [Split(width, self.total, number, rule) for number in sorted(whole) if 0 < number < self.total]
        return splits

    def _lower_async_ratio(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Simulate the fastest of the given plans with smaller async ratios, while these are nearly as fast."""
        fastest = sorted(found, key=lambda candidate: candidate.step_s)[:NUM_FULL_SIZE_PLANS]
        lower: list[Candidate] = []
        for ratio in reversed(ASYNC_RATIOS[:-1]):
            candidates = [self._try_split(Split.from_config(each.config), ratio) for each in fastest]
            simulated = [candidate for candidate in candidates if candidate is not None]
            lower += simulated
            if not simulated or min(each.step_s for each in simulated) > MAX_SLOWDOWN * fastest[0].step_s:
                break
        return lower

    def _list_splits(self) -> list[Split]:
        """Return the compared splits.

        In large plans, the numbers of engines and training devices can be divided by `DIVISORS`.
        """
        splits: list[Split] = []
        for width in (*TP_SIZES, *LARGE_TP_SIZES):
            smallest = width * self._get_max_divisor()
            unit = max(1, self.total // MAX_UNITS // smallest) * smallest
            splits += [Split(width, number, self.total - number) for number in range(unit, self.total, unit)]
        return splits

    def _get_max_divisor(self) -> int:
        rollouts = self.config.rollouts_per_step
        return next(d for d in DIVISORS if d == 1 or (self.total // d >= MIN_DEVICES and rollouts // d >= MIN_ROLLOUTS))

    def _predict_step_s(self, split: Split, ratio: float, known: Sequence[Candidate]) -> float:
        return predict_step_s(split, ratio, known[0], self.model, self.device) if known else 0.0

    def _record_too_slow(self, reference: Candidate, split: Split, predicted_s: float, best_s: float) -> None:
        """Record why a split is not simulated: training alone takes longer than the best step, or generation does."""
        train_s = predict_train_s(split.training, reference)
        if MIN_TIME_FRACTION * train_s >= best_s:
            self.too_slow = (
                f"on {split.training} of {self.total} devices training alone would take {train_s:.4g} s, but a whole "
                f"step of the best plan takes {best_s:.4g} s"
            )
        else:
            self.too_slow = (
                f"a step of the best split is predicted to take at least {predicted_s:.4g} s, because fewer devices "
                "would generate"
            )

    def _try_split(self, split: Split, ratio: float) -> Candidate | None:
        devices = f"{split.generation} + {split.training}"
        if split.sharing is not None:
            devices = f"{split.sharing}, {split.training} of {split.generation} train"
        changes = {"async_ratio": ratio, "type": "queue", "prompt_redundancy": None, "choose": None}
        warmup = math.ceil(ratio) + ASYNC_WARMUP
        steps = max(ASYNC_STEPS, math.ceil(ratio) + 1)  # all rollouts in flight finish within these steps
        return self._try_plan(f"async {ratio:g}, {devices}, TP {split.width}", split, warmup + steps, warmup, changes)

    def _try_plan(
        self, name: str, split: Split, steps: int, warmup: int, scheduling: Mapping[str, object]
    ) -> Candidate | None:
        changes = {f"rollout.scheduling.{key}": value for key, value in scheduling.items()}
        sizes = {"num_steps": steps, "warmup_steps": warmup, "num_seeds": 1}
        config = self.config.with_changes({**split.build_changes(), **sizes, **changes}, name)
        if self.model.num_experts:
            config = config.with_changes({"training.expert_parallel": self.compare_expert_sizes(config)[0].size}, name)
        why = find_memory_problem(config, self.model, self.device, self._trainer)
        if why:
            self.too_large.append(f"{name}: {why}")
            return None
        if split.sharing is not None or not split.training:
            switch_s = compute_switch_s(config, self.model, self.device, self._trainer)
            config = config.with_changes({"placement.switch_s": switch_s}, name)
        candidate = self._simulate_candidate(name, config, self._choose_divisor(config))
        self.candidates.append(candidate)
        return candidate

    def _choose_divisor(self, config: SimulationConfig) -> int:
        """Return the divisor by which devices and prompts are scaled down when plans are compared; 1 for full size."""
        placement, prompts = config.placement, config.rollout.prompts_per_step
        whole = (placement.generation // config.engine.width, placement.training, prompts)
        largest = self._get_max_divisor()
        return next(d for d in DIVISORS if d <= largest and not any(number % d for number in whole))

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
