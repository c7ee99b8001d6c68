"""Mathematics: correct and incorrect answers of published cases, and answers per second; remote rewards; adaptive
limits.

    make bench NAME=rewards [ARGS="--seconds 5"]

`published` counts the verdicts on the cases of Math-Verify's, NeMo-Skills' and MATH's own tests, as they were published
and with those that are argued with (each in the table `disagreements`) left out.
`mixed` are answers as they come from sets like MATH and GSM8K: numbers, formulas, sets, intervals, matrices, equations,
units, half of them right and half those of another question of the same kind. Figures are of CPU time
(`…_per_cpu_s`), so that other work on the machine does not count, and of wall time through the reward as a run uses it.
`remote` is the same reward behind an HTTP service with injected faults (`_remote_rewards`). `adaptive_limits` replays
recorded times of programs (`_adaptive_times`).
"""

import argparse
import asyncio
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _adaptive_times import replay
from _remote_rewards import measure_remote
from _report import report

from roll.cluster.pool import LocalWorkerPool
from roll.config.rewards import MathReward
from roll.rewards import build_reward
from roll.rewards.math import prepare_worker, score_math
from roll.types import Prompt, Rollout

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k" / "test.jsonl"
PUBLISHED = Path(__file__).parents[1] / "tests" / "unit" / "rewards" / "published_math.jsonl"
"""Cases of other verifiers' tests: see `test_published_math.py`."""
KINDS = {
    "numbers": [("The answer is 18.", "18"), ("so $1,234$ in all", "1234"), (r"\boxed{\frac{3}{4}}", "0.75")],
    "roots": [(r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}"), (r"\boxed{3\sqrt{5}}", r"\sqrt{45}")],
    "formulas": [
        (r"\boxed{(x+1)^2}", "x^2+2x+1"),
        (r"\boxed{2\pi r(r+h)}", r"2\pi r^2+2\pi rh"),
        (r"$x^2-1$", "(x-1)(x+1)"),
    ],
    "sets": [
        (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}"),
        (r"x = 1 \text{ or } x = 4", "1,4"),
        (r"\boxed{1\pm\sqrt{2}}", r"1-\sqrt2, 1+\sqrt2"),
    ],
    "intervals": [(r"\boxed{(-\infty,2]\cup(3,\infty)}", r"(-\infty,2]\cup(3,\infty)"), (r"\boxed{[0,1)}", "[0,1)")],
    "points": [(r"\boxed{(1,-2)}", "(1,-2)"), (r"\boxed{\left(\frac{1}{2},3\right)}", "(0.5,3)")],
    "matrices": [
        (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\boxed{\begin{pmatrix}1&2\\3&\sqrt{25}\end{pmatrix}}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    ],
    "equations": [(r"\boxed{y=2x+3}", "y=3+2x"), (r"\boxed{y=x-1}", "y=x-1")],
    "units": [(r"\boxed{500\text{ m}}", r"0.5\text{ km}"), (r"\boxed{12\text{ cm}^2}", r"12\text{ cm}^2")],
    "words": [(r"\boxed{\text{Tuesday}}", "Tuesday"), (r"\boxed{\text{(B)}}", "B")],
}


def mixed() -> list[tuple[str, str]]:
    """Answers with a reference: half their own, half that of another of the same kind."""
    pairs: list[tuple[str, str]] = []
    for entries in KINDS.values():
        for index, (answer, reference) in enumerate(entries):
            pairs += [(answer, reference), (answer, entries[(index + 1) % len(entries)][1])]
    return pairs


def solutions() -> list[tuple[str, str]]:
    """GSM8K's own solutions with their answers."""
    rows = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    return [(row.replace("####", "The answer is"), row.rpartition("#### ")[2]) for row in rows]


def published() -> dict[str, object]:
    """Accepted shares of what others publish as right and as wrong; each disagreement with its argument."""
    rows = [json.loads(line) for line in PUBLISHED.read_text().splitlines()]
    given = [score_math(row["answer"], row["gold"], "auto", 20.0)[0] for row in rows]
    found: dict[str, object] = {"num_cases": len(rows)}
    for name, argued in (("as_published", True), ("without_argued", False)):
        kept = [(r, right) for r, right in zip(rows, given, strict=True) if argued or "argument" not in r]
        for verdict, word in ((True, "right"), (False, "wrong")):
            of_these = [right for row, right in kept if row["right"] is verdict]
            found[f"{name}_accepted_{word}_share"] = sum(of_these) / len(of_these)
    keys = ("gold", "answer", "right", "source", "argument")
    found["disagreements"] = [
        {key: row.get(key, "") for key in keys} for row, right in zip(rows, given, strict=True) if right != row["right"]
    ]
    return found


def per_cpu_second(score: Callable[[str, str], object], pairs: list[tuple[str, str]], seconds: float) -> float:
    """Answers scored in a second of this process's CPU time."""
    for pair in pairs:
        score(*pair)
    started = time.process_time()
    for count, pair in enumerate(itertools.cycle(pairs)):
        if count % 16 == 0 and (spent := time.process_time() - started) > seconds:
            return count / spent
        score(*pair)
    raise AssertionError("a cycle does not end")


def math_verify_alone(answer: str, reference: str) -> bool:
    """What math-verify says of whole answers, with its own extraction and without a time limit."""
    from math_verify import parse, verify

    right, given = (
        parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=0)
        for text in (reference, answer)
    )
    return bool(verify(right, given, timeout_seconds=0))


def rollout(answer: str, reference: str) -> Rollout:
    """An answer as the scheduler hands it to a reward."""
    nothing = np.zeros(0, np.int32)
    return Rollout(
        draw_id=0,
        index=0,
        prompt=Prompt(uid="bench/0", domain="bench", messages=(), answer=reference),
        prompt_token_ids=nothing,
        token_ids=nothing,
        logprobs=np.zeros(0, np.float32),
        policy_versions=nothing,
        finish_reason="stop",
        text=answer,
    )


async def as_a_reward(pairs: list[tuple[str, str]], seconds: float) -> float:
    """Answers scored in a second of wall time by the reward `math`, many at once as in a step of training."""
    pool = LocalWorkerPool(1)
    reward = build_reward([MathReward(type="math")], pool)
    rollouts = [rollout(*pair) for pair in pairs]
    try:
        await asyncio.gather(*map(reward, rollouts))  # imports
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            await asyncio.gather(*map(reward, rollouts))
            count += len(pairs)
        return count / (time.perf_counter() - started)
    finally:
        await reward.close()
        await pool.close()


def main() -> None:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each figure")
    seconds = parser.parse_args().seconds
    prepare_worker()
    pairs = mixed()
    figures: dict[str, Any] = {
        "published": published(),
        "mixed_per_cpu_s": per_cpu_second(lambda a, r: score_math(a, r, "auto"), pairs, seconds),
        "math_verify_alone_per_cpu_s": per_cpu_second(math_verify_alone, pairs, seconds),
        "mixed_as_a_reward_per_s": asyncio.run(as_a_reward(pairs * 10, seconds)),
    }
    if GSM8K.is_file():
        figures["gsm8k_per_cpu_s"] = per_cpu_second(lambda a, r: score_math(a, r, "auto"), solutions(), seconds)
    figures["remote"] = measure_remote(pairs, rollout)
    figures["adaptive_limits"] = replay()
    figures["load_average"] = os.getloadavg()[0]
    report("rewards", figures)


if __name__ == "__main__":
    main()
