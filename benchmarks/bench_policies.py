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
    (BATCH, BATCH, "prompts go to the engines in turn, and answers are scored after all generation (the baseline)"),
    (
        replace(_BASE, name="queue, a prompt on one engine", scheduling={"replicate_prompts": False}),
        BATCH,
        "a prompt goes to the least loaded engine, and each answer is scored immediately",
    ),
    (
        replace(_BASE, name="queue"),
        BATCH,
        "each rollout goes to the least loaded engine (prompt replication), and each answer is scored immediately",
    ),
    (
        replace(_BASE, name="redundant prompts", scheduling={"prompt_redundancy": 1.5, **_FIRST}),
        BATCH,
        "12 prompts are launched, and the first 8 that finish are used",
    ),
    (
        replace(_BASE, name="redundant rollouts", scheduling={"rollout_redundancy": 1.5, **_FIRST}),
        BATCH,
        "12 rollouts of a prompt are launched, and the first 8 that finish are used",
    ),
    (
        replace(_BASE, name="tail batching", scheduling={"type": "tail_batching"}),
        BATCH,
        "short rounds launch redundant prompts and rollouts, and defer unfinished prompts to long rounds",
    ),
    (FILTERED, FILTERED, "the baseline with filters; after a round, new prompts replace the filtered groups"),
    (
        replace(_BASE, name="dynamic sampling", filters=True, num_steps=4),
        FILTERED,
        "a new prompt immediately replaces a filtered group",
    ),
    (
        replace(_BASE, name="early stop", filters=True, num_steps=4, scheduling={"reward_range": (0.0, 1.0)}),
        FILTERED,
        "dynamic sampling that also stops a group as soon as it is certain to be filtered",
    ),
    (TRAINED, TRAINED, f"the baseline with updates of {TRAIN_S:g} s and weight syncs"),
    (
        replace(_BASE, name="asynchronous", train_s=TRAIN_S, scheduling={"async_ratio": 1.0}),
        TRAINED,
        "generation continues during training, with an async ratio of 1",
    ),
)
"""Each policy, what it is compared with, and what it does."""
HEAD = f"""# Scheduling policies on real engines

This page reports how much time each [scheduling policy](../scheduling.md) saves on real engines, and how accurately the
[simulator](../simulation.md) predicts these savings. `make bench NAME=policies` measures the policies on real vLLM
engines and compares their speed-ups with simulated ones. A speed-up is the baseline's time for all steps divided by the
policy's time.

- **Measurement.** Two vLLM engines serve SmolLM2-135M in bfloat16, on one CPU core each, with at most 24 concurrent
  requests. They generate five steps (four in runs with filters) of 8 prompts x 8 rollouts. An answer ends with the
  model's end token, or is truncated at 192 tokens. The duration of a reward has a lognormal distribution with a
  median of one second, and uses no CPU time. In `batch, trained` and `asynchronous`, each step waits for
  {TRAIN_S:g} s to simulate training on other devices, and then syncs real weights.
- **Simulation.** The same scheduler runs in virtual time, with the prompts, lengths and verdicts of the measured run.
  The simulated engine is fitted to the measurements of the baseline.

The speed-ups depend on the length of the longest answers. Here, answers are truncated at 192 tokens. For long answers,
see [published and simulated speed-ups](simulation.md). With a single engine and rewards that take no time, `queue`
would be no faster than `batch`.
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
    """Fraction of the answers that were generated to their end, and not trained."""
    return 1 - played.trained / max(1, len(played.lengths))


def page(found: list[Row], fit: EngineFit, sync_s: float) -> str:
    """The documentation page."""
    errors = [abs(row.error) for row in found if row.name != row.over]
    natural = min(row.measured.natural for row in found)
    lines = [
        HEAD,
        f"The largest error of a simulated speed-up is {max(errors):.1%} (goal: at most {GOAL:.0%}), and the median "
        f"error is {statistics.median(errors):.1%}. In every run, at least {natural} rollouts ended before the length "
        f"limit. The results were measured at commit {commit()}.",
        "",
        "| policy | baseline | measured time of all steps, s | simulated time, s | measured speed-up "
        "| simulated speed-up | error of the simulated speed-up | answers that ended before the limit "
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
    lines += ["", "The table contains these policies:", ""]
    lines += [f"- **{row.name}**: {row.about}." for row in found]
    slower = [f"{row.name} ({row.speed_up:.2f})" for row in found if row.speed_up < 0.995]
    lines += [
        "",
        f"The following policies are slower than their baseline: {', '.join(slower) or 'none'}. *Not trained* is the "
        "share of complete answers on which the step did not train. *Trained length* is the mean number of tokens in "
        "the answers that were trained on. If this length is smaller than that of the baseline, the policy prefers "
        "short answers.",
        "",
        f"The simulated duration of a sequence of engine steps differs from the measured duration by "
        f"{fit.step_error:.1%}. A simulated weight sync takes {sync_s:.2f} s, which is the median of the baseline's "
        "weight syncs.",
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
