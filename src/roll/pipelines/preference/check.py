"""Checks of preference training before it starts, for `roll check`."""

from __future__ import annotations

from roll.config.pipelines.preference import PreferenceConfig
from roll.pipelines.supervised.check import FrozenModelCost
from roll.pipelines.supervised.check import inspect as look_at_examples
from roll.preflight import Report
from roll.preflight.inspection import describe_role, run_checks

__all__ = ["inspect"]


def inspect(config: PreferenceConfig) -> Report:
    """Check a run before it starts; the reference is unloaded before training begins."""
    section = config.preference
    pairs = section.method.compares_pairs
    kept = section.method.uses_reference and section.reference == "precomputed"
    asked_of = 1 if pairs else 2  # KTO compares with answers to other prompts as well, which the policy reads again
    adapters = section.method.uses_reference and section.reference == "adapters"
    report = look_at_examples(
        config,
        kind="pair" if pairs else "labelled",
        method=section.type,
        loss=f"roll.pipelines.preference.objective:{'LIKE_PAIRS' if pairs else 'LIKE_ANSWERS'}",
        other=FrozenModelCost(
            passes_before=asked_of if kept else 0, passes_per_step=(not pairs) + (asked_of if adapters else 0)
        ),
    )
    if section.method.uses_reference:
        when = "once for each answer, before the first step" if kept else "in every step"
        report.notes.append(f"the reference is asked {when}.")
    return run_checks(report, config, _look_at_reference)


def _look_at_reference(report: Report, config: PreferenceConfig) -> None:
    if (name := config.preference.reference_model) is not None:
        describe_role(report, name, "the reference's model", needs_sizes=False)
