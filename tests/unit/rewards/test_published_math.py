"""Cases that other verifiers' tests have published: gold, answer, verdict, source (`published_math.jsonl`).

Rows are facts from the tests of Math-Verify (github.com/huggingface/Math-Verify), NeMo-Skills
(github.com/NVIDIA/NeMo-Skills) and MATH (github.com/hendrycks/math); of long answers, the end. Where ROLL disagrees,
the row has an `argument`. Golds that came as whole solutions are given by their final answers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.rewards.math import prepare_worker, score_math

ROWS = [json.loads(line) for line in (Path(__file__).parent / "published_math.jsonl").read_text().splitlines()]


@pytest.mark.integration
def test_math_verifier_published_verdicts_are_followed_or_argued_with() -> None:
    prepare_worker()
    assert len(ROWS) == 325
    given = [score_math(row["answer"], row["gold"], "auto", 20.0)[0] for row in ROWS]
    differing = [row for row, right in zip(ROWS, given, strict=True) if right != row["right"]]
    assert [row for row in differing if "argument" not in row] == []
    assert [row for row in ROWS if "argument" in row and row not in differing] == []


def test_math_verifier_disagreements_are_few() -> None:
    """At least 97 % of what is published as right, and no wrong one but those whose verdict is about their form."""
    argued = [row for row in ROWS if "argument" in row]
    assert sum(row["right"] for row in argued) <= 0.03 * sum(row["right"] for row in ROWS)
    assert len(argued) <= 10
