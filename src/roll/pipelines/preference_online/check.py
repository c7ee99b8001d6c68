"""Checks of online preference training before it starts."""

from __future__ import annotations

from roll.config.pipelines.preference_online import PreferenceOnlineConfig
from roll.pipelines.online.check.estimate import ExtraMemory, RunSizes, estimate_frozen_memory
from roll.pipelines.online.check.inspection import inspect_run
from roll.preflight.report import Report

__all__ = ["inspect"]


def inspect(config: PreferenceOnlineConfig) -> Report:
    """Check an online preference run before it starts, and return the report."""
    size = config.rollout.group_size
    pairs = 1 if config.pairing.type == "best_worst" else size * (size - 1) // 2
    name = f"online {config.preference.type}"
    return inspect_run(config, name, extra_memory=_estimate_extra_memory, trained_per_group=(pairs, 2 * pairs))


def _estimate_extra_memory(report: Report, config: PreferenceOnlineConfig, batch: RunSizes) -> ExtraMemory:
    assert report.model is not None, "the model was described"
    if not config.has_reference_role:
        return ExtraMemory(roles=[])
    on_accelerator = report.machine.has_accelerators
    return ExtraMemory(
        roles=[estimate_frozen_memory(config, "reference", report.model, batch, on_accelerator=on_accelerator)]
    )
