"""What `roll check` says of learning from preferences."""

from __future__ import annotations

from roll.config.pipelines.preference import PreferenceConfig
from roll.pipelines.supervised.check import inspect as look
from roll.preflight import Report

__all__ = ["inspect"]


def inspect(config: PreferenceConfig) -> Report:
    """Find out all that can be known before a run; the reference is gone before training begins."""
    section = config.preference
    pairs = section.method.compares_pairs
    report = look(
        config,
        kind="pair" if pairs else "labelled",
        method=section.type,
        loss=f"roll.pipelines.preference.objective:{'LIKE_PAIRS' if pairs else 'LIKE_ANSWERS'}",
    )
    if section.method.uses_reference:
        once = "once for each answer, before the first step" if section.reference == "kept" else "in every step"
        report.notes.append(f"the reference is asked {once}: as long as an evaluation of as many examples.")
    return report
