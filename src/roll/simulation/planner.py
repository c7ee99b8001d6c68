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

from collections.abc import Callable
from dataclasses import dataclass

from roll.config.estimate import RoleMemory
from roll.config.simulation import SimulationConfig
from roll.errors import ConfigError
from roll.simulation.candidate import Candidate
from roll.simulation.experts import ExpertParallel
from roll.simulation.memory import TrainerSettings, estimate_memory
from roll.simulation.plan_search import NUM_FULL_SIZE_PLANS, PlanSearch, sort_by_preference

__all__ = ["Plan", "make_plan"]

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
    search = PlanSearch(config, progress, trainer)
    colocated = search.search_synchronous_plans()
    splits = search.search_asynchronous_plans(colocated)
    shared = search.search_shared_plans(colocated, splits)
    is_synchronous = [not candidate.config.rollout.scheduling.async_ratio for candidate in shared]
    on_policy = [*colocated, *(each for each, first in zip(shared, is_synchronous, strict=True) if first)]
    ahead = [*splits, *(each for each, first in zip(shared, is_synchronous, strict=True) if not first)]
    fastest = min(on_policy, key=lambda c: c.step_s, default=None)
    simplest = min(colocated, key=lambda c: c.step_s, default=None)
    if fastest is not None and simplest is not None and simplest.step_s < MIN_GAIN * fastest.step_s:
        fastest = simplest  # a small gain does not justify a split
    synchronous = search.simulate_full_size(fastest) if fastest is not None else None
    ahead = [search.simulate_full_size(each) for each in sort_by_preference(ahead)[:NUM_FULL_SIZE_PLANS]]
    asynchronous = sort_by_preference(ahead)[0] if ahead else None
    reference = synchronous or asynchronous
    if reference is None:
        raise ConfigError(_describe_no_feasible_plan(search))
    helps = asynchronous is not None and asynchronous.step_s * MIN_GAIN < reference.step_s
    best = asynchronous if asynchronous is not None and (helps or synchronous is None) else reference
    return Plan(
        config=config,
        best=best,
        synchronous=reference,
        candidates=tuple(search.candidates),
        memory=tuple(estimate_memory(best.config, search.model, search.device, trainer)),
        split=search.simulate_split(min(colocated, key=lambda c: c.step_s), best)
        if colocated and best is not reference
        else None,
        experts=search.compare_expert_sizes(best.config),
        gain_bound=_compute_gain_bound(reference),
        no_gain_reason="" if helps else _describe_missing_gain(search, reference, asynchronous),
    )


def _compute_terms(reference: Candidate) -> tuple[float, float, float]:
    """Return device-seconds of a synchronous step for the bound P2 (see the module's docstring).

    The terms are the device-seconds of generation without the longest answer (N g), of all devices during the longest
    answer (K L), and of training (N t).
    """
    devices = reference.config.placement.num_devices
    long = reference.tail_share * reference.step_s
    generation = reference.busy_share * reference.step_s * devices
    return max(generation - long, 1e-9), devices * long, devices * reference.train_s


def _compute_gain_bound(reference: Candidate) -> float:
    """Return the upper bound of the speed-up of asynchronous plans over a synchronous plan, for any async ratio."""
    generation, tail, training = _compute_terms(reference)
    return 1 + tail / (generation + training)


def _describe_missing_gain(search: PlanSearch, reference: Candidate, asynchronous: Candidate | None) -> str:
    """Return the reason why no asynchronous plan is sufficiently faster than `reference`."""
    if asynchronous is None and search.too_slow:
        return search.too_slow
    if asynchronous is None:
        what = search.too_large[-1] if search.too_large else f"{search.total} devices cannot be split"
        return f"no split of the devices fits ({what})"
    if reference.train_s + reference.sync_s < 0.05 * reference.step_s and reference.tail_share < 0.3:
        if reference.bottleneck in ("rewards", "environments"):
            limit = reference.bottleneck
            return f"{limit} take nearly all of a step: more or faster {limit} would help"
        return "generation takes nearly all of a step, and keeps its engines busy: there is nothing to overlap with"
    if _compute_gain_bound(reference) < 1.1:
        return "the longest answers hardly delay a step"
    return (
        f"the best split ({asynchronous.name}) is {'only ' if asynchronous.step_s < reference.step_s else ''}"
        f"{reference.step_s / asynchronous.step_s:.2f} times as fast: the overlap does not make up for fewer "
        "devices per role"
    )


def _describe_no_feasible_plan(search: PlanSearch) -> str:
    """Return the error message for a search in which no plan fits into the devices' memory."""
    lines = "; ".join(dict.fromkeys(search.too_large)) or "there are too few devices"
    return (
        f"no plan for {search.model.name} fits {search.total} x {search.device.name} ({lines}): use more or larger "
        "devices, or lower rollout.max_new_tokens."
    )
