"""The output of `roll reward test`: a row for each answer, then a summary."""

from __future__ import annotations

import io
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.cli.answer_files import AnswerLine
from roll.tracking.intervals import format_accuracy
from roll.types import RewardResult

__all__ = ["ScoredLine", "format_json_lines", "render"]

MAX_TABLE_WIDTH = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredLine:
    """A line of an answer file, with its score or the reason for a missing score."""

    line: AnswerLine
    result: RewardResult | None
    duration_s: float
    problem: str = ""
    """Reason why the line has no result."""

    @property
    def is_unexpected(self) -> bool:
        """True if the result differs from the `expected` value in the file."""
        expected, result = self.line.expected, self.result
        if expected is None:
            return False
        if result is None:
            return True
        if isinstance(expected, bool):
            right = result.correct if result.correct is not None else result.value > 0
            return right is not expected
        return abs(result.value - expected) > 1e-6


def format_json_lines(scored_lines: Sequence[ScoredLine]) -> str:
    """Return the results as JSON Lines: one object for each scored line."""
    return "\n".join(json.dumps(_to_json_dict(scored), ensure_ascii=False) for scored in scored_lines)


def _to_json_dict(scored: ScoredLine) -> dict[str, Any]:
    """Return the result of a line, or its problem, as data that JSON can represent."""
    result = scored.result
    outcome: dict[str, Any] = {"line": scored.line.number}
    if scored.line.domain:
        outcome["domain"] = scored.line.domain
    if result is None:
        return outcome | {"problem": scored.problem}
    outcome |= {"value": result.value, "verdict": result.verdict, "correct": result.correct}
    outcome |= {"components": dict(result.components), "duration_s": round(scored.duration_s, 6)}
    if scored.line.expected is not None:
        outcome |= {"expected": scored.line.expected, "as_expected": not scored.is_unexpected}
    return json.loads(json.dumps(outcome))


def render(scored_lines: Sequence[ScoredLine], wall_s: float, note: str = "") -> str:
    """Format results as plain text: a table with one row per answer, and a summary.

    Args:
        scored_lines: results in the order of their lines.
        wall_s: duration of scoring, including the start of workers.
        note: printed at the end.
    """
    screen = Console(file=io.StringIO(), width=MAX_TABLE_WIDTH, force_terminal=False, color_system=None)
    screen.print(_format_table(scored_lines))
    for line in _format_summary(scored_lines, wall_s, note):
        screen.print(Text(line), soft_wrap=True)
    assert isinstance(screen.file, io.StringIO)
    return "\n".join(line.rstrip() for line in screen.file.getvalue().splitlines())


def _list_components(scored_lines: Sequence[ScoredLine]) -> list[str]:
    """Return the names of the reward components of all answers, except parts of components (`a/b`)."""
    names = dict.fromkeys(name for scored in scored_lines if scored.result for name in scored.result.components)
    return [name for name in names if "/" not in name]


def _format_table(scored_lines: Sequence[ScoredLine]) -> Table:
    components = _list_components(scored_lines)
    with_domain = any(scored.line.domain for scored in scored_lines)
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("line", *(["domain"] if with_domain else []), "value", *components[:6], "time", "verdict", "answer"):
        right = name not in ("domain", "verdict", "answer")
        table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for scored in scored_lines:
        result = scored.result
        values = ["-" if result is None else f"{result.value:.3g}"]
        for name in components[:6]:
            value = None if result is None else result.components.get(name)
            values.append("-" if value is None else f"{value:.3g}")
        verdict = f"not scored: {scored.problem}" if result is None else result.verdict
        if scored.is_unexpected:
            verdict += f" (expected: {json.dumps(scored.line.expected)})"
        answer = " ".join(scored.line.rollout.text.split())
        table.add_row(
            str(scored.line.number),
            *([scored.line.domain] if with_domain else []),
            *values,
            _format_time(scored.duration_s),
            Text(verdict[:100]),
            Text(answer if len(answer) <= 40 else f"…{answer[-39:]}"),
        )
    return table


def _format_summary(scored_lines: Sequence[ScoredLine], wall_s: float, note: str) -> list[str]:
    results = [scored.result for scored in scored_lines if scored.result is not None]
    lines = [
        "",
        f"{len(scored_lines)} answers, {len(results)} scored in {wall_s:.2f} s ({len(scored_lines) / wall_s:.0f} per "
        "second)",
    ]
    if results:
        lines.append(f"value      mean {statistics.fmean(result.value for result in results):.4g}")
        decided = [result.correct for result in results if result.correct is not None]
        if decided:
            lines.append(f"accuracy   {format_accuracy(sum(decided) / len(decided), len(decided), '.1%')}")
        for name in dict.fromkeys(name for result in results for name in result.components):
            values = [result.components[name] for result in results if name in result.components]
            lines.append(f"component  {name}: mean {statistics.fmean(values):.4g} of {len(values)}")
        times = sorted(scored.duration_s for scored in scored_lines if scored.result is not None)
        median, slowest = _format_time(statistics.median(times)), _format_time(times[-1])
        lines.append(f"time       median {median}, longest {slowest}")
    counts = ", ".join(f"{verdict} {count}" for verdict, count in _count_verdicts(scored_lines).most_common(8))
    lines.append(f"verdicts   {counts}")
    reasons: dict[str, list[str]] = {}
    for scored in scored_lines:
        if scored.result is None:
            number = str(scored.line.number)
            reasons.setdefault(scored.problem.removesuffix(f" (prompt 'line {number}')"), []).append(number)
    for reason, numbers in list(reasons.items())[:5]:
        lines.append(f"not scored lines {', '.join(numbers[:20])}: {reason}")
    expecting = sum(scored.line.expected is not None for scored in scored_lines)
    if expecting:
        surprising = [str(scored.line.number) for scored in scored_lines if scored.is_unexpected]
        words = f"; other results in lines {', '.join(surprising[:20])}" if surprising else ""
        lines.append(f"expected   {expecting - len(surprising)} of {expecting} results are as expected{words}")
    if note:
        lines.append(f"note       {note}")
    return lines


def _count_verdicts(scored_lines: Sequence[ScoredLine]) -> Counter[str]:
    """Return the number of answers with each verdict."""
    return Counter(scored.result.verdict if scored.result else "not scored" for scored in scored_lines)


def _format_time(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
