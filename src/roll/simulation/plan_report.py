"""Render a plan as text."""

from __future__ import annotations

from collections.abc import Sequence

from roll.preflight.report import align_rows
from roll.simulation.candidate import Candidate
from roll.simulation.experts import ExpertParallel
from roll.simulation.plan_sources import Constant
from roll.simulation.planner import Plan

__all__ = ["render_constants", "render_experts", "render_plan"]


def render_plan(plan: Plan, constants: Sequence[Constant] = ()) -> str:
    """Render a plan as text: recommendation, memory by role, all candidates, and the constants of the plan."""
    best, config = plan.best, plan.best.config
    place = config.placement
    lines = [
        f"{plan.config.name}: {config.model} on {place.num_devices} x {config.device}, "
        f"{config.rollout.prompts_per_step} prompts x {config.rollout.group_size}, up to "
        f"{config.rollout.max_new_tokens:,} tokens",
        "",
        f"Plan: {best.name}",
        f"  a step takes {best.step_s:.4g} s: {best.wait_s:.4g} s waiting for rollouts, {best.train_s:.4g} s training, "
        f"{best.sync_s:.4g} s weight sync",
        f"  engines are busy {best.busy_share:.0%} of the time; the step is limited by {best.bottleneck}",
        *_format_asynchrony(plan),
        "",
        "Memory of one device",
        *_format_memory(plan),
        "",
        "Settings for the run's configuration file",
        *_format_settings(plan),
        *render_experts(plan.experts),
        "",
        "Tried",
        *_format_table(plan.candidates),
    ]
    if constants:
        lines += ["", *render_constants(constants)]
    return "\n".join(lines)


def render_experts(experts: Sequence[ExpertParallel], max_rows: int = 6) -> list[str]:
    """Return lines that compare the sizes of `training.parallel.ep`; empty for a dense model."""
    if not experts:
        return []
    rows = [("ep", "communication per update", "memory per rank", "")]
    for choice in experts[:max_rows]:
        size = f"{choice.memory_bytes / 1e9:.1f} GB"
        rows.append((str(choice.size), f"{choice.traffic_s:.3g} s", size, "" if choice.fits else "does not fit"))
    return ["", "Expert-parallel sizes, best first", *(f"  {line}" for line in align_rows(rows))]


def render_constants(constants: Sequence[Constant]) -> list[str]:
    """Return lines that list the constants on which a plan depends, with their origins."""
    rows = [("name", "value", "origin"), *((c.name, c.value, c.origin) for c in constants)]
    counted = {kind: sum(c.origin.startswith(kind) for c in constants) for kind in ("measured", "published", "assumed")}
    summary = ", ".join(f"{count} {kind}" for kind, count in counted.items())
    return [f"Constants ({summary})", *(f"  {line}" for line in align_rows(rows))]


def _format_asynchrony(plan: Plan) -> list[str]:
    bound = f"with the costs of the synchronous plan, the theoretical bound is {plan.gain_bound:.2f} times as fast"
    if plan.no_gain_reason:
        return [f"  asynchrony does not help ({bound}): {plan.no_gain_reason}"]
    gain = plan.synchronous.step_s / plan.best.step_s
    lines = [
        f"  asynchrony helps: {gain:.2f} times as fast as the best synchronous plan "
        f"({plan.synchronous.name}, {plan.synchronous.step_s:.4g} s); {bound}"
    ]
    if plan.split is not None:
        equal, updates = plan.split.step_s / plan.best.step_s, plan.split.config.training.num_updates
        lines.append(
            f"  at equal staleness, it is {equal:.2f} times as fast: the synchronous plan with {updates} updates "
            f"per batch takes {plan.split.step_s:.4g} s per update"
        )
    cheaper = 1 - plan.best.generation_device_s / plan.synchronous.generation_device_s
    if gain > plan.gain_bound and cheaper > 0:
        lines.append(
            f"  the plan exceeds this bound because its engines spend {cheaper:.0%} less time on the same "
            "answers: they are never idle, and decode more answers at once"
        )
    return lines


def _format_memory(plan: Plan) -> list[str]:
    lines = []
    for role in plan.memory:
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in role.parts.items() if size)
        lines.append(f"  {role.role:<11}  {role.count:>4} x {role.bytes_each / 1e9:6.1f} GB  ({parts})")
    place = plan.best.config.placement
    if place.is_colocated:
        lines.append("  trainer and engines share the devices: the engines sleep while the trainer works")
    elif place.overlaps:
        lines.append(
            f"  trainer and engines share {place.training} devices: these engines sleep while the trainer works"
        )
    return lines


def _format_settings(plan: Plan) -> list[str]:
    config = plan.best.config
    generation = config.placement.generation
    place = config.placement
    first = place.num_devices - place.num_training_devices
    train = f"{first}-{place.num_devices - 1}"
    ep = config.training.expert_parallel
    mapping = f'{{actor_infer: "0-{generation - 1}", actor_train: "{train}"}}'
    cluster = ["  cluster:", "    type: ray", f"    device_mapping: {mapping}"]
    cluster += [f"    sharing: {place.sharing}"] if place.sharing is not None else []
    return [
        "  inference:",
        f"    tensor_parallel: {config.engine.width}",
        *(["  training:", f"    parallel: {{ep: {ep}}}"] if plan.experts else []),
        "  rollout:",
        f"    scheduling: {{async_ratio: {config.rollout.scheduling.async_ratio:g}}}",
        *([] if config.placement.num_devices == 1 else cluster),
    ]


def _format_table(candidates: tuple[Candidate, ...]) -> list[str]:
    rows = [("plan", "step", "wait", "train", "sync", "busy", "preempted", "limited by")]
    for candidate in sorted(candidates, key=lambda c: c.step_s):
        rows.append(
            (
                candidate.name,
                f"{'about ' if candidate.divisor > 1 else ''}{candidate.step_s:.4g} s",
                f"{candidate.wait_s:.4g} s",
                f"{candidate.train_s:.4g} s",
                f"{candidate.sync_s:.2g} s",
                f"{candidate.busy_share:.0%}",
                f"{candidate.num_preempted:.0f}",
                candidate.bottleneck,
            )
        )
    return [f"  {line}" for line in align_rows(rows)]
