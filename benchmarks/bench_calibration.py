"""Does the simulator predict real runs? Its engine is fitted to one run of vLLM on this CPU, and predicts others.

    make bench NAME=calibration                         about 8 minutes on 2 cores
    make bench NAME=calibration ARGS="--report"         table and plot of what was measured before

SmolLM2-135M in bf16, one engine with the quickstart's settings, natural ends of answers, the production scheduler
without a trainer. The others differ from the first run in prompts, lengths, temperature, concurrency and policy. Each
is simulated with its own lengths; all times come from the first. Measure all in one go, with one version of everything.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
from dataclasses import dataclass, replace

from _generation import Case, Draws, load, measure, predict, settings_of
from _report import ROOT, commit, report

from roll.simulation.fit import EngineFit, fit_engine

RUNS = ROOT / "runs" / "bench" / "calibration"
PAGE = ROOT / "docs" / "benchmarks" / "calibration.md"
PLOT = ROOT / "docs" / "benchmarks" / "calibration.png"
MEDIAN_GOAL, WORST_GOAL = 0.08, 0.15
ALIKE = 0.03
"""Policies whose measured times differ by less than this share have no order."""

FITTED = Case(name="fitted", max_new_tokens=512, first_prompt=100)
"""The longest answers, so that batches of every size go by, from 64 down to a few."""
_POLICY = Case(name="", num_steps=3, first_prompt=600, reward_s=1.0, max_new_tokens=160)
POLICIES = (
    replace(_POLICY, name="batch", scheduling={"type": "batch"}),
    replace(_POLICY, name="queue"),
    replace(_POLICY, name="redundant prompts", scheduling={"prompt_redundancy": 1.5, "choose": "first_finished"}),
    replace(_POLICY, name="redundant rollouts", scheduling={"rollout_redundancy": 1.5, "choose": "first_finished"}),
    replace(_POLICY, name="tail batching", scheduling={"type": "tail_batching"}),
)
OTHERS = (
    Case(name="short answers", kind="short", max_new_tokens=64, num_steps=4, first_prompt=200),
    Case(name="sentences", kind="medium", num_steps=2, first_prompt=250),
    Case(name="temperature 0.6", temperature=0.6, num_steps=2, first_prompt=300),
    Case(name="16 at once", max_num_seqs=16, first_prompt=350),
    Case(name="4 at once", max_num_seqs=4, prompts_per_step=4, group_size=4, num_steps=2, first_prompt=400),
    Case(name="groups of 16, 32 at once", group_size=16, max_num_seqs=32, first_prompt=450),
    *POLICIES,
)
HEAD = """# Predicted and measured generation

This page reports how accurately ROLL's [simulator](../simulation.md) predicts the time of generation.
`make bench NAME=calibration` fits the simulated engine to one run of vLLM on two CPU cores, as
`roll simulate --calibrate` does. The simulator then predicts the time of other runs, which differ in answer length,
temperature, number of concurrent requests, or [scheduling policy](policies.md).

All runs use SmolLM2-135M in bfloat16, one engine with the settings of the quickstart, and the production scheduler.
They have no trainer. A simulation receives the prompts, settings and answer lengths of the predicted run, but none of
its times. If a policy stopped an answer, its full length is unknown, and the simulation uses the maximum length. The
table compares the total time that the steps waited for their batches. All runs were measured one after the other, in
one process. In the names of the runs, "N at once" means that the engine runs at most N requests at the same time.
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run."""

    name: str
    measured_s: float
    simulated_s: float
    num_rollouts: int
    natural: int
    mean_length: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.simulated_s / self.measured_s - 1


def rows(fit: EngineFit) -> list[Row]:
    """Every run that was measured, beside its prediction."""
    draws, settings = Draws(), settings_of(fit)
    found = []
    for case in (FITTED, *OTHERS):
        path = RUNS / f"{case.name}.json"
        if path.exists():
            played = load(path)
            simulated = predict(case, settings, 1, draws, played)
            found.append(
                Row(
                    name=case.name,
                    measured_s=played.makespan_s,
                    simulated_s=simulated.makespan_s,
                    num_rollouts=len(played.lengths),
                    natural=min(played.natural, len(played.lengths)),
                    mean_length=statistics.fmean(played.lengths.values()),
                )
            )
    return found


def ranking(found: list[Row]) -> tuple[int, int]:
    """Pairs of policies that the simulation orders as the measurement does, of those that differ."""
    policies = [row for row in found if row.name in {case.name for case in POLICIES}]
    right = total = 0
    for one, other in itertools.combinations(policies, 2):
        if abs(one.measured_s / other.measured_s - 1) > ALIKE:
            total += 1
            right += (one.measured_s < other.measured_s) == (one.simulated_s < other.simulated_s)
    return right, total


def page(found: list[Row], fit: EngineFit) -> str:
    """The documentation page."""
    errors = [abs(row.error) for row in found if row.name != FITTED.name]
    right, total = ranking(found)
    lines = [
        HEAD,
        f"Over {len(errors)} predicted runs, the median error is {statistics.median(errors):.1%} (goal: "
        f"{MEDIAN_GOAL:.0%}), and the largest error is {max(errors):.1%} (goal: {WORST_GOAL:.0%}). The last five rows "
        f"compare scheduling policies on the same workload. For {total} pairs of these policies, the measured times "
        f"differ by more than {ALIKE:.0%}. The simulator ranks {right} of these pairs correctly. The runs were "
        f"measured at commit {commit()}.",
        "",
        "| run | measured time, s | simulated time, s | error | answers | answers that ended before the length limit "
        "| mean tokens per answer |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        name = f"{row.name} (used for the fit)" if row.name == FITTED.name else row.name
        lines.append(
            f"| {name} | {row.measured_s:.1f} | {row.simulated_s:.1f} | {row.error:+.1%} | {row.num_rollouts} | "
            f"{row.natural} | {row.mean_length:.0f} |"
        )
    lines += [
        "",
        f"The engine model is fitted to {fit.num_steps} engine steps. The table shows how the duration of a step "
        f"depends on the number of requests. Each prefilled token adds {fit.prefill_token_s * 1e3:.2f} ms, and each "
        f"token of context adds {fit.context_token_s * 1e6:.2f} us. The total fitted duration of a sequence of steps "
        f"differs by {fit.step_error:.1%} from the measured duration.",
        "",
        f"| number of requests in a step | {' | '.join(f'{requests:.0f}' for requests, _ in fit.curve)} |",
        "|" + "---|" * (len(fit.curve) + 1),
        f"| duration of the step, ms | {' | '.join(f'{seconds * 1e3:.1f}' for _, seconds in fit.curve)} |",
        "",
        "For a good calibration, use a run on an idle machine that contains steps with few requests and steps with "
        "many requests. An earlier calibration used a run without steps of fewer than 8 requests, on a machine that "
        "also ran other programs. Its median error was 3 %, but the predicted time with 4 requests at once was 25 % "
        "too long.",
        "",
        "![Predicted against measured](calibration.png)",
    ]
    return "\n".join(lines) + "\n"


def plot(found: list[Row], fit: EngineFit) -> None:
    """Predicted against measured, and the fitted curve."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    most = 1.1 * max(max(row.measured_s, row.simulated_s) for row in found)
    left.fill_between([0, most], [0, 0.85 * most], [0, 1.15 * most], alpha=0.15, label="within 15 %")
    left.plot([0, most], [0, most], linewidth=0.8, color="grey")
    for row in found:
        left.scatter(row.measured_s, row.simulated_s, s=18, label=row.name)
    left.set(xlabel="measured makespan, s", ylabel="simulated makespan, s", xlim=(0, most), ylim=(0, most))
    left.legend(fontsize=6)
    stretches = [stretch for stretch in load(RUNS / f"{FITTED.name}.json").stretches if not stretch.num_started]
    right.scatter(
        [stretch.num_decoding for stretch in stretches],
        [1e3 * stretch.duration_s / stretch.num_steps for stretch in stretches],
        s=6,
        label="measured, with context",
    )
    right.plot(
        [x for x, _ in fit.curve], [1e3 * y for _, y in fit.curve], color="black", label="fitted, without context"
    )
    right.set(xlabel="requests in a step", ylabel="a step that decodes, ms", ylim=(0, None))
    right.legend(fontsize=7)
    FigureCanvasAgg(figure).print_png(PLOT)


def main() -> int:
    """Measure, fit, predict; write page and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="measure these runs alone; others keep what was measured before")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    wanted = [case for case in (FITTED, *OTHERS) if not arguments.only or case.name in arguments.only]
    if not arguments.report:
        asyncio.run(measure(wanted, 1, RUNS))
    fit = fit_engine(load(RUNS / f"{FITTED.name}.json").stretches)
    found = rows(fit)
    PAGE.write_text(page(found, fit))
    plot(found, fit)
    print(PAGE.read_text())
    errors = [abs(row.error) for row in found if row.name != FITTED.name]
    right, total = ranking(found)
    report(
        "calibration",
        {
            "median_error": statistics.median(errors),
            "worst_error": max(errors),
            "num_runs": len(errors),
            "pairs_ranked_rightly": f"{right} of {total}",
            "runs": {row.name: [row.measured_s, row.simulated_s] for row in found},
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
