"""The findings of `roll doctor`, and their text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "Finding",
    "Verdict",
    "find_worst_verdict",
    "format_gib",
    "render",
    "report_ok",
    "report_problem",
    "report_warning",
]

Verdict: TypeAlias = Literal["ok", "warning", "problem"]
_VERDICTS_BY_SEVERITY: tuple[Verdict, ...] = ("ok", "warning", "problem")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of a check of this machine: the detected value, a verdict, and advice."""

    name: str
    verdict: Verdict
    """`problem`: runs fail or cannot start. `warning`: some runs fail, or runs are slower than necessary."""
    found: str
    advice: str = ""
    """Remedy for the user; may be empty only if the verdict is `ok`."""
    section: str = ""


def report_ok(name: str, value: str, advice: str = "") -> Finding:
    """Return a finding with the verdict `ok`; `advice` is optional."""
    return Finding(name=name, verdict="ok", found=value, advice=advice)


def report_warning(name: str, value: str, advice: str) -> Finding:
    """Return a finding with the verdict `warning`."""
    return Finding(name=name, verdict="warning", found=value, advice=advice)


def report_problem(name: str, value: str, advice: str) -> Finding:
    """Return a finding with the verdict `problem`."""
    return Finding(name=name, verdict="problem", found=value, advice=advice)


def find_worst_verdict(findings: Iterable[Finding]) -> Verdict:
    """Return the most severe verdict of the findings; `ok` if there are none."""
    return max((each.verdict for each in findings), key=_VERDICTS_BY_SEVERITY.index, default="ok")


def format_gib(num_bytes: int | float) -> str:
    """Format bytes in GiB, or in MiB below one GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def render(findings: Sequence[Finding]) -> str:
    """Format each finding as a line under its section's title, with its advice below, and a summary at the end."""
    return "\n".join(_format_lines(findings))


def _format_lines(findings: Sequence[Finding]) -> Iterator[str]:
    width = max((len(each.name) for each in findings), default=0)
    section = ""
    for each in findings:
        if each.section != section:
            yield from ([""] if section else []) + [each.section]
            section = each.section
        yield f"  {each.verdict.upper() if each.verdict != 'ok' else 'ok':<8} {each.name:<{width}}  {each.found}"
        if each.advice:
            yield f"  {'':<8} {'':<{width}}  -> {each.advice}"
    problems, warnings = (sum(each.verdict == kind for each in findings) for kind in ("problem", "warning"))
    yield ""
    yield f"{_format_count(problems, 'problem')}, {_format_count(warnings, 'warning')}."


def _format_count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
