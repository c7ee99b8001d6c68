"""Every scheduling policy on real vLLM: its measured speed-up beside the simulated one.

    make bench NAME=policies                         about 15 minutes on 2 cores
    make bench NAME=policies ARGS="--report"         the table of what was measured before

Two engines of SmolLM2-135M (bf16, a core each), natural ends of answers, a reward that takes about a second elsewhere,
the production scheduler. Every policy gets the same prompts and seeds, and enough steps to end more than 256 rollouts
by themselves. The simulated engine is fitted to the baseline's run and gets each run's lengths and verdicts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from dataclasses import dataclass, replace

from _generation import Case, Draws, Played, load, measure, predict, settings_of
from _report import ROOT, commit, report

from roll.simulation.fit import EngineFit, fit_engine

RUNS = ROOT / "runs" / "bench" / "policies"
PAGE = ROOT / "docs" / "benchmarks" / "policies.md"
PLOT = ROOT / "docs" / "benchmarks" / "policies.png"
GOAL = 0.10
NATURAL_GOAL = 256
NUM_ENGINES = 2
TRAIN_S = 5.0

_BASE = Case(name="batch", num_steps=5, max_new_tokens=192, max_num_seqs=24, reward_s=1.0)
BATCH = replace(_BASE, scheduling={"type": "batch"})
FILTERED = replace(BATCH, name="batch, filtered", filters=True, num_steps=4)
TRAINED = replace(BATCH, name="batch, trained", train_s=TRAIN_S)
_FIRST = {"choose": "first_finished"}
ROWS: tuple[tuple[Case, Case, str], ...] = (
    (BATCH, BATCH, "the baseline: prompts dealt out to engines, scored when all is generated"),
    (
        replace(_BASE, name="queue, a prompt on one engine", scheduling={"replicate_prompts": False}),
        BATCH,
        "least loaded engine, scored at once",
    ),
    (replace(_BASE, name="queue"), BATCH, "the same, and a prompt's rollouts on any engine (prompt replication)"),
    (
        replace(_BASE, name="redundant prompts", scheduling={"prompt_redundancy": 1.5, **_FIRST}),
        BATCH,
        "12 prompts for 8, the first finished",
    ),
    (
        replace(_BASE, name="redundant rollouts", scheduling={"rollout_redundancy": 1.5, **_FIRST}),
        BATCH,
        "12 rollouts for 8, the first finished",
    ),
    (replace(_BASE, name="tail batching", scheduling={"type": "tail_batching"}), BATCH, "short rounds, long rounds"),
    (FILTERED, FILTERED, "the baseline with filters: refilled in rounds"),
    (
        replace(_BASE, name="dynamic sampling", filters=True, num_steps=4),
        FILTERED,
        "a filtered group is replaced at once",
    ),
    (
        replace(_BASE, name="early stop", filters=True, num_steps=4, scheduling={"reward_range": (0.0, 1.0)}),
        FILTERED,
        "the same, and groups that cannot pass are stopped",
    ),
    (TRAINED, TRAINED, f"the baseline with updates of {TRAIN_S:g} s on other devices, and weight syncs"),
    (
        replace(_BASE, name="asynchronous", train_s=TRAIN_S, scheduling={"async_ratio": 1.0}),
        TRAINED,
        "async ratio 1: generation during training",
    ),
)
"""Each policy, what it is compared with, and what it does."""
HEAD = f"""# Scheduling policies on real engines

Measured on two vLLM engines (SmolLM2-135M, bf16, a CPU core each, at most 24 requests at once), five steps (with
filters four) of 8 prompts x 8 rollouts, answers of at most 192 tokens that end by themselves, rewards with a median
latency of one second (lognormal) that use no CPU. Steps marked as trained pause for {TRAIN_S:g} s instead of an
update, as if other devices trained, and sync real weights. The simulated speed-up comes from the same
scheduler in virtual time; its engine is fitted to the baseline's run, with the prompts, lengths and verdicts of each
run. A speed-up is the ratio of the time of all steps to that of the baseline in the row.
Made by `make bench NAME=policies`.

Limits: with free rewards and one engine, `queue` and `batch` are equal. The gains depend on the tail of the lengths,
which 192 tokens truncate here; see [published and simulated speed-ups](simulation.md) for long answers.
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One policy."""

    name: str
    over: str
    about: str
    measured: Played
    simulated: Played
    speed_up: float
    simulated_speed_up: float

    @property
    def error(self) -> float:
        """Of the simulated speed-up, relative."""
        return self.simulated_speed_up / self.speed_up - 1


def rows(fit: EngineFit, sync_s: float) -> list[Row]:
    """Every policy that was measured."""
    draws, settings = Draws(), settings_of(fit, sync_s)
    measured, simulated = {}, {}
    for case, _, _ in ROWS:
        path = RUNS / f"{case.name}.json"
        if path.exists():
            measured[case.name] = load(path)
            simulated[case.name] = predict(case, settings, NUM_ENGINES, draws, measured[case.name])
    return [
        Row(
            name=case.name,
            over=over.name,
            about=about,
            measured=measured[case.name],
            simulated=simulated[case.name],
            speed_up=measured[over.name].total_s / measured[case.name].total_s,
            simulated_speed_up=simulated[over.name].total_s / simulated[case.name].total_s,
        )
        for case, over, about in ROWS
        if case.name in measured and over.name in measured
    ]


def wasted(played: Played) -> float:
    """Share of the answers that were generated to their end, and not trained."""
    return 1 - played.trained / max(1, len(played.lengths))


def page(found: list[Row], fit: EngineFit, sync_s: float) -> str:
    """The documentation page."""
    errors = [abs(row.error) for row in found if row.name != row.over]
    natural = min(row.measured.natural for row in found)
    lines = [
        HEAD,
        f"Simulated speed-ups are within {max(errors):.1%} of the measured ones (goal {GOAL:.0%}; median "
        f"{statistics.median(errors):.1%}); every run ended at least {natural} rollouts by themselves. Commit "
        f"{commit()}.",
        "",
        "| policy | over | all steps, s | simulated, s | speed-up | simulated | error | ended by themselves "
        "| not trained | trained length |",
        "|" + "---|" * 10,
    ]
    for row in found:
        length = row.measured.trained_tokens / max(1, row.measured.trained)
        lines.append(
            f"| {row.name} | {row.over} | {row.measured.total_s:.1f} | {row.simulated.total_s:.1f} | "
            f"{row.speed_up:.2f} | {row.simulated_speed_up:.2f} | {row.error:+.1%} | {row.measured.natural} | "
            f"{wasted(row.measured):.0%} | {length:.0f} |"
        )
    lines += ["", "What each does:", ""]
    lines += [f"- **{row.name}**: {row.about}." for row in found]
    slower = [f"{row.name} ({row.speed_up:.2f})" for row in found if row.speed_up < 0.995]
    lines += [
        "",
        f"Losses: {', '.join(slower) or 'no policy was slower than its baseline'}. *Not trained* is the share of "
        "answers that were generated to their end and thrown away; a shorter *trained length* than the baseline's "
        "shows what favours short answers.",
        "",
        f"The fit is off by {fit.error_of_steps:.1%} for a stretch of steps. A weight sync takes {sync_s:.2f} s in the "
        "simulation, the median of the baseline's.",
        "",
        "![Measured and simulated speed-ups](policies.png)",
    ]
    return "\n".join(lines) + "\n"


def plot(found: list[Row]) -> None:
    """Speed-ups, measured and simulated."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in found if row.name != row.over]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    places = range(len(shown))
    axes.barh([p + 0.2 for p in places], [row.speed_up for row in shown], height=0.38, label="measured")
    axes.barh([p - 0.2 for p in places], [row.simulated_speed_up for row in shown], height=0.38, label="simulated")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(yticks=list(places), yticklabels=[row.name for row in shown], xlabel="speed-up over the baseline")
    axes.invert_yaxis()
    axes.legend()
    FigureCanvasAgg(figure).print_png(PLOT)


def main() -> int:
    """Measure, fit, predict; write page and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="measure these runs alone; others keep what was measured before")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    wanted = [case for case, _, _ in ROWS if not arguments.only or case.name in arguments.only]
    if not arguments.report:
        asyncio.run(measure(wanted, NUM_ENGINES, RUNS))
    trained = RUNS / f"{TRAINED.name}.json"
    sync_s = statistics.median(load(trained).sync_s) if trained.exists() else 0.0
    fit = fit_engine(load(RUNS / f"{BATCH.name}.json").stretches)
    found = rows(fit, sync_s)
    PAGE.write_text(page(found, fit, sync_s))
    plot(found)
    print(PAGE.read_text())
    figures = {
        row.name: {
            "over": row.over,
            "measured": row.speed_up,
            "simulated": row.simulated_speed_up,
            "natural": row.measured.natural,
        }
        for row in found
    }
    report("policies", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
