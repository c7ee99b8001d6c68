"""Checks of preference training before it starts, for `roll check`."""

from __future__ import annotations

from roll.config.pipelines.preference import PreferenceConfig
from roll.pipelines.supervised.check import FrozenModelCost
from roll.pipelines.supervised.check import inspect as inspect_examples
from roll.preflight import Report
from roll.preflight.inspection import inspect_model, run_checks

__all__ = ["inspect"]


def inspect(config: PreferenceConfig) -> Report:
    """Check a preference run before it starts, and return the report.

    Training memory is estimated without the reference, which is unloaded before training starts.
    """
    section = config.preference
    pairs = section.method.compares_pairs
    kept = section.method.uses_reference and section.reference == "precomputed"
    asked_of = 1 if pairs else 2  # KTO's KL estimate also needs answers to other prompts, which are scored as well
    adapters = section.method.uses_reference and section.reference == "adapters"
    report = inspect_examples(
        config,
        kind="pair" if pairs else "labelled",
        method=section.type,
        loss=f"roll.pipelines.preference.objective:{'PAIR_BENCHMARK_LOSS' if pairs else 'ANSWER_BENCHMARK_LOSS'}",
        other_models=FrozenModelCost(
            passes_before=asked_of if kept else 0, passes_per_step=(not pairs) + (asked_of if adapters else 0)
        ),
    )
    if section.method.uses_reference:
        when = "once for each answer, before the first step" if kept else "in every step"
        report.notes.append(f"the reference scores answers {when}.")
    return run_checks(report, config, _check_reference)


def _check_reference(report: Report, config: PreferenceConfig) -> None:
    if (name := config.preference.reference_model) is not None:
        inspect_model(report, name, "the reference's model", needs_sizes=False)
