"""Every method with turns on the two-turn guessing game, same seed and settings: a table and a plot.

    make bench NAME=sweep-multi-turn                     # 5 runs, one after the other; 4 to 8 minutes each on 2 cores
    make bench NAME=sweep-multi-turn ARGS="ipa rebn"     # only these

`ipa-demonstrations` is IPA with expert demonstrations in every group (`algorithm.imitation`).

Finished runs are kept in `runs/sweep-multi-turn/` and not run again. Page and plot in `docs/benchmarks/` are written
anew from all finished runs after each one.
"""

from __future__ import annotations

import argparse
from typing import Any

import sweep

EXAMPLE = "examples/guess.yaml"
RUNS = sweep.ROOT / "runs" / "sweep-multi-turn"
PAGE = sweep.ROOT / "docs" / "benchmarks" / "multi_turn.md"
PLOT = sweep.ROOT / "docs" / "benchmarks" / "multi_turn.png"
CHANGES = {name: (f"algorithm.type={name}",) for name in ("ipa", "gi_gpo", "rebn", "star_po")} | {
    "ipa-demonstrations": ("algorithm.type=ipa", "data.0.demonstrations=true")
}
COMMON = ("checkpoint.at_end=false",)
GOAL = 0.6
"""Two thirds is what a fixed first guess of 1 or 3 wins at best; beginning with 2 wins always."""


def page(found: dict[str, dict[str, Any]]) -> str:
    """The table, as Markdown."""
    lines = [
        "# Multi-turn methods",
        "",
        "This page reports how well a small model learns a game with each of the [algorithm presets](../algorithms.md)",
        f"for multi-turn rollouts. SmolLM2-135M plays a game of two turns (`{EXAMPLE}`, seed 0): it guesses a",
        "number from 1 to 3, reads `higher` or `lower`, and guesses again. The presets have their default settings,",
        "with two exceptions from the example: a truncated answer reduces the reward by 0.2, and groups with equal",
        "rewards are not filtered. The accuracy is the win rate in 96 held-out games at temperature 1.0.",
        "",
        "Before training, most answers are truncated prose. The model first learns the format of a guess, and then",
        "learns to use the hints. If it always guesses 1 or 3 first, it can win at most two of three games. If it",
        "guesses 2 first, it can win all games. In the run `ipa-demonstrations`, each group also contains an expert",
        "demonstration, which the policy learns to imitate (`demonstrations: true`).",
        "",
        "| run | accuracy before training | accuracy after training | mean reward of the last 5 steps | "
        f"steps until the mean reward of 3 steps is {GOAL} | seconds per step |",
        "|---|---|---|---|---|---|",
    ]
    for preset, figures in found.items():
        reached = str(figures["steps_to_goal"] or "not reached")
        lines.append(
            f"| `{preset}` | {figures['accuracy_before']:.3f} | {figures['accuracy_after']:.3f} | "
            f"{figures['reward_last5']:.3f} | {reached} | {figures['seconds_per_step']:.1f} |"
        )
    lines += [
        "",
        "The results show that each preset learns from multi-turn rollouts. They do not show which preset is best,",
        "because the benchmark uses one seed and one easy game.",
    ]
    repeat = "To repeat the benchmark, run `make bench NAME=sweep-multi-turn`."
    return "\n".join([*lines, "", "![Reward by step](multi_turn.png)", "", repeat, ""])


def main() -> None:
    """Run what is missing, then write page, plot and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", choices=CHANGES, default=tuple(CHANGES))
    for preset in parser.parse_args().presets:
        sweep.run(preset, EXAMPLE, RUNS, (*CHANGES[preset], *COMMON))
        finished = [p for p in CHANGES if (RUNS / p / "summary.json").is_file()]
        found = {p: sweep.record(RUNS / p, GOAL) for p in finished}
        PAGE.write_text(page(found))
        sweep.plot(found, PLOT, GOAL)
    from _report import report

    report("multi_turn", {p: {k: v for k, v in f.items() if k != "rewards"} for p, f in found.items()})


if __name__ == "__main__":
    main()
