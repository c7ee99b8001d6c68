"""The page that `make bench NAME=simulate-paper` generates: tables of the results, with notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _figure11 import errors
from _published_sharing import render_published

HEAD = """# Published and simulated speed-ups

This page reports how well ROLL's [simulator](../simulation.md) reproduces published results. Some papers report how
much faster training is with their schedules. The page compares these speed-ups with simulated speed-ups. A workload
is a file in `examples/simulation/`. It describes a run of a paper, with the published results and with assumptions
for the constants that the paper does not give. The variants of a workload, such as `batch` and `best`, are different
schedules for the same run. `make bench NAME=simulate-paper` simulates all workloads and generates this page.

| workload | paper | what is compared |
|---|---|---|
| queue-scheduling | ROLL Flash, arXiv 2510.11345 | batches with and without redundant prompts |
| async-rlvr | ROLL Flash, arXiv 2510.11345 | asynchronous and synchronous training |
| environment-latency | ROLL Flash, arXiv 2510.11345 | environments that run independently or in lockstep |
| environment-ladder | RollArt, arXiv 2512.22560 | independent or lockstep environments, by variance of the turn time |
| tail-batching-7b, -14b, -32b | RollPacker, arXiv 2509.21009 | batches with and without tail batching |

## Asynchronous and synchronous training with the same staleness

`best` is asynchronous training with an async ratio of 4, so its samples are up to four policy versions old. A
synchronous run has the same staleness if it generates five batches at once and trains them in five updates
(`training.num_updates`). The baseline `split batch` is such a run. In both runs, an update trains the same number of
samples, in whole groups, and no sample is dropped. The difference in time therefore comes only from asynchrony. All
values are means over the updates. The ratio is the time of `split batch` divided by the time of `best`. `--parts
staleness` repeats this part.
"""

PUBLISHED_HEAD = """
## Published figures

The following tables have these columns:

- **compared variants**: the baseline, and the variant whose speed-up over the baseline is reported
- **published**: the published speed-up, or – if no paper reports it
- **simulated**: the mean of the simulated speed-up over the seeds, with its 95 % interval
- **within 15 %**: whether the simulated speed-up differs from the published speed-up by less than 15 %
- **range for ±30 %**: the smallest and the largest simulated speed-up when one constant at a time (the device's
  rates, lengths, latencies, solve rates, number of turns) is multiplied by 0.7 or by 1.3, or – if the constants were
  not changed. The simulations use one seed (queue-scheduling: five)
- **same order**: whether the same variant is faster after every one of these changes
- **tokens**: trained tokens of a step, relative to the baseline. If a variant trains fewer tokens, a part of its
  speed-up comes from less work
- **staleness**: the largest staleness of the baseline and of the other variant

In three workloads, one constant was fitted so that the baseline takes the published time: the length limit of answers
in queue-scheduling, and the number of turns in environment-latency and environment-ladder. These workloads are
therefore not an independent test. The published values of ROLL Flash (arXiv 2510.11345) come from notes about the
paper. The values of RollPacker and RollArt come from the papers.
"""

OURS_HEAD = """
## Policies of ROLL, compared with synchronous baselines

No paper describes these policies. They were selected with seeds that the table does not use. `best` has five times as
many rollouts in flight as its baseline, which causes most of its gain. The first section of this page therefore
compares it with a run of the same staleness. `whole_prompts` is tail batching that defers whole prompts and drops no
rollout of a prompt. It is on-policy, and a run trains every prompt with all its rollouts. `continuous` (for
environments, `each_alone` and `alone_*`) is a stronger baseline than `batch`. It uses continuous batching with
least-loaded routing and immediate rewards.
"""

FASTEST_HEAD = """
## The gain of shorter answers

`fastest` (α = 2, `rollout_redundancy: 1.25`, `choose: first_finished`) drops the slowest fifth of each prompt's
rollouts. It trains fewer tokens and different samples than its baseline, so these ratios are not speed-ups for the
same work. [Scheduling](../scheduling.md#selection-bias) describes the effect of this choice on rewards.
"""

FIGURE11_HEAD = """
## RollPacker's Figure 11: time of the rollout stage

Figure 11 of RollPacker (arXiv 2509.21009, section 6.3) shows the time of the rollout stage for several redundancies.
The bar `base` has no redundancy. `R 1.25` launches 1.25 times as many rollouts of each prompt and uses the first that
finish. `P 1.25` launches 1.25 times as many prompts and defers the prompts that do not finish to a long round. `both
1.25` combines the two. Each value is the mean over a period of short rounds and one long round.

The paper does not give the distribution of lengths. A search over {num_laws} distributions, for both models together
and only with the longest answers of each round (see below), found this one: {at_limit:.1%} of the answers reach the
limit, and the lengths of answers to one prompt have a correlation of {correlation:g}. Two more constants of each model
are fitted to six of the bars: a fixed duration of every round, and a factor on the simulated generation time. The
fixed duration is an assumption, because the paper gives no times for parts of the rollout stage. The two bars with a
redundancy of 1.125 were used neither in the search nor in the fit, so they test the prediction. The simulation uses
{num_seeds} seeds (`--parts figure11`). If only rollouts are redundant, the hardest prompt determines the time of a
round, so the mean over 24 to 30 rounds has a standard error of 6 to 9 %.
"""

FIGURE11_END = """\
The simulation does not match the bars of 14B: R is too fast and P is too slow. A part of the
difference may be noise. Another part is a limit of the search, which models the time of a round as a fixed time plus
a time per token of the longest answer. In the simulator, long answers also slow each other down. R stops most long
answers early, so it gains more than the search assumes. A higher correlation of lengths would reduce both errors, but
with a correlation of 0.6, an earlier fit (one seed) had an error of 24 % in the other direction. Values in between
were not simulated. We therefore do not know any constants for which all bars of 14B are within 15 %.

For 32B, distributions were searched but not simulated. Its bars require two types of prompts. For hard prompts, at
least three of ten answers must reach the limit, because R 1.25 saves no time. But five of twelve answers must almost
never reach the limit, because R 1.5 saves time. For all other prompts, no answer may reach the limit, because P saves
time. No correlation produces such lengths, and the simulator does not support hard prompts of this type. For each
model, the table shows the best distribution that the search (`benchmarks/_figure11_search.py`) found with one type
and with two types of prompts, and its largest error over the fitted and the predicted bars:
"""

_TAIL = (
    "The simulated gain is larger than the published gain. In the paper, short rounds are 2.1 to 3.6 "
    "times as fast as the baseline's rounds, although their longest answer is up to 8.9 times "
    "shorter. In the simulation, the time decreases by the same factor as the length of the longest "
    "answer. A part of the time in the paper therefore does not depend on the longest answer. This "
    "part is probably the time of rewards, which the workload omits. When the paper measured tail "
    "batching alone, rewards were not yet asynchronous. The later gain of asynchronous rewards shows "
    "the fraction of rewards in the baseline's step: 27 % (7B), 17 % (14B), 5 % (32B). With rewards of "
    "this duration, short rounds of 7B are 2.3 times as fast as the rounds of the baseline, which "
    "agrees with the paper. The table shows the effect of other assumptions:"
)
_TAIL_END = (
    "The remaining difference disappears if answers to one prompt are correlated, and if an engine "
    "needs 0.3 to 0.5 ms of host time per request and step. This time slows down short rounds, in "
    "which an engine has 100 requests, but not the end of a round with few requests. All three ratios "
    "are then within 15 % of the published ratios (7B: 1.42 to 1.46, published 1.30; 14B: 1.58 to "
    "1.64, published 1.48; 32B: 2.15 to 2.19, published 2.21). This agreement does not test the "
    "simulator, because the fit has as many constants as published values. A heavier tail alone does "
    "not explain the difference: if 5 % of the answers reach the limit, the ratio of 32B is close "
    "(2.41), but the ratio of 7B is still 2.11, and the longest answer of short rounds decreases less "
    "than in the paper. Figure 11 (above) needs other constants (a correlation of 0.2 instead of "
    "0.5), so no single set of constants explains both results."
)
NOTES: Mapping[str, Sequence[str]] = {
    "queue-scheduling": (
        (
            "The baseline takes the published time (125 s), because the length limit of its answers was "
            "fitted to this time. With redundant prompts, a simulated step is faster than the published step "
            "(37 s). The result depends on the fraction of prompts without a learning signal. This share is "
            "unknown, and the workload assumes one half. The table shows the effect of other values:"
        ),
        (
            "If 62 % of the prompts have no signal and the limit is 6,144 tokens, the baseline takes 122 s, "
            "and a step with redundant prompts takes 33 s (with 10 other seeds, 130 s and 40 s, a ratio of "
            "3.25). But two constants are then fitted to two published times, so this agreement does not test "
            "the simulator. Fewer engines also reduce the ratio, because the additional prompts slow each "
            "other down, but this effect is smaller."
        ),
    ),
    "async-rlvr": (
        (
            "α = 2 is not the best value here. A sample that starts under version v must be ready for the "
            "update from v + α, so a step takes at least (L + d) / (α + 1), where L is the time of the "
            "longest answer (388 s if it is alone on an engine) and d is the time of an update. For "
            "`async_2`, this bound is 189 s with any number of engines "
            "(`tests/unit/simulation/test_bounds.py`)."
        ),
    ),
    "environment-latency": (
        (
            "`best` runs five times as many environments as the baseline. One of its devices trains, and the "
            "engines on the other devices are fast enough for all environments."
        ),
    ),
    "tail-batching-7b": (_TAIL, _TAIL_END),
    "tail-batching-14b": ("See the notes on tail-batching-7b.",),
    "tail-batching-32b": ("See the notes on tail-batching-7b.",),
}
"""By workload: why the simulation does not reach a published value, before and after the table of assumptions."""


def page(all_figures: Mapping[str, Mapping[str, Any]], order: Sequence[str]) -> str:
    """The documentation page.

    Args:
        all_figures: by workload, what `measure` gives.
        order: of the workloads.
    """
    known = [name for name in order if "compared" in all_figures.get(name, {})]
    lines = [
        HEAD,
        *staleness_table(all_figures, order),
        *tables(all_figures, known),
        *render_published(all_figures.get("sharing", {}).get("rows", [])),
        *figure11_lines(all_figures, order),
    ]
    for name in known:
        lines += part(name, all_figures[name])
    return "\n".join(lines) + "\n"


def staleness_table(all_figures: Mapping[str, Mapping[str, Any]], order: Sequence[str]) -> list[str]:
    """`best` beside one large batch in several updates."""
    head = (
        "workload",
        "time with `split batch`",
        "time with `best`",
        "ratio",
        "ratios by seed",
        "samples (`split batch` / `best`)",
        "tokens (`split batch` / `best`)",
        "staleness (`split batch` / `best`)",
        "seeds",
    )
    found = {
        name: all_figures[name]["equal_staleness"] for name in order if "equal_staleness" in all_figures.get(name, {})
    }
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, figures in found.items():
        split, best = figures["split"], figures["best"]
        pair = [f"{split[key]:,.0f} / {best[key]:,.0f}" for key in ("samples", "tokens", "staleness")]
        times = (f"{split['step_s']:.3g} s", f"{best['step_s']:.3g} s", f"{figures['ratio']:.2f}")
        by_seed = figures.get("ratios", ())
        span = f"{min(by_seed):.2f} … {max(by_seed):.2f}" if len(by_seed) > 1 else "not recorded"
        lines.append(f"| {' | '.join((name, *times, span, *pair, str(figures['num_seeds'])))} |")
    return lines if found else []


def tables(all_figures: Mapping[str, Mapping[str, Any]], known: Sequence[str]) -> list[str]:
    """Comparisons by kind: published, ours on the same samples, ours on shorter ones."""
    head = (
        "workload",
        "compared variants",
        "published",
        "simulated",
        "within 15 %",
        "range for ±30 %",
        "same order",
        "tokens",
        "staleness",
    )
    lines: list[str] = []
    for text, kind in ((PUBLISHED_HEAD, "published"), (OURS_HEAD, "ours"), (FASTEST_HEAD, "fastest")):
        lines += [text, f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for name in known:
            moves, ages = all_figures[name].get("moved", []), {row[0]: row[-1] for row in all_figures[name]["rows"]}
            for figure in all_figures[name]["compared"]:
                own = "fastest" if figure["of"] == "fastest" else "ours"
                if ("published" if figure["published"] else own) == kind:
                    lines.append(summary(name, figure, moves, ages))
    return lines


def figure11_lines(all_figures: Mapping[str, Mapping[str, Any]], order: Sequence[str]) -> list[str]:
    """Return the tables of Figure 11: its bars with errors, and the best length distribution for each model."""
    found = {name: all_figures[name]["figure11"] for name in order if "figure11" in all_figures.get(name, {})}
    if not found:
        return []
    bars_of = {name: figures for name, figures in found.items() if figures["bars"]}
    first = next(iter(bars_of.values()))
    head = FIGURE11_HEAD.format(**first["constants"], num_seeds=first["num_seeds"], num_laws=first["searched"]["laws"])
    lines = [head, "| workload | bar | published | simulated | error | fitted or predicted? |", "|" + "---|" * 6]
    for name, figures in bars_of.items():
        for bar in figures["bars"]:
            off = f"{bar['simulated'] / bar['published'] - 1:+.0%}"
            kind = "fitted" if bar["fitted"] else "predicted"
            cells = (name, bar["what"], f"{bar['published']} s", f"{bar['simulated']:.0f} s", off, kind)
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| workload | fixed time of a round | factor on the generation time | largest error of the fitted bars "
        "| largest error of the predicted bars |",
        "|" + "---|" * 5,
    ]
    for name, figures in bars_of.items():
        constants, worst = figures["constants"], errors(figures["bars"])
        times = (f"{constants['round_s']:.0f} s", f"{constants['pace']:.2f}")
        lines.append(f"| {' | '.join((name, *times, *(f'{value:.0%}' for value in worst.values())))} |")
    return [*lines, "", FIGURE11_END, *laws_table(found)]


_FAMILIES = {"alike": "one type", "two kinds": "two types"}


def laws_table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table with the best distribution of each family for each model."""
    head = ("workload", "prompts", "constants", "largest error, fitted bars", "largest error, predicted bars")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    said = {
        "alike": "{:.1%} at the limit, correlation {:g}",
        "two kinds": "{:.0%} hard prompts, {:.0%} of their answers",
    }
    for name, figures in found.items():
        for family, text in said.items():
            law = figures["searched"][family]
            errors_of = (f"{law['fitted']:.0%}", f"{law['predicted']:.0%}")
            cells = (name, _FAMILIES[family], text.format(*law["constants"]), *errors_of)
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def summary(name: str, figure: Mapping[str, Any], moves: Sequence[Mapping[str, Any]], ages: Mapping[str, str]) -> str:
    """A comparison's line."""
    move = next((m for m in moves if (m["of"], m["over"]) == (figure["of"], figure["over"])), None)
    published = figure["published"]
    cells = (
        name,
        f"{figure['over']} / {figure['of']}",
        f"{published['ratio']:g}" if published else "–",
        figure["simulated"],
        ("yes" if figure["within"] else "no, see below") if published else "–",
        f"{move['lowest'][1]:.2f} … {move['highest'][1]:.2f}" if move else "–",
        ("yes" if move["holds"] else f"no: {move['lowest'][0]}") if move else "–",
        f"{figure['tokens']:.0%}",
        f"{ages[figure['over']]} / {ages[figure['of']]}",
    )
    return f"| {' | '.join(cells)} |"


def part(name: str, figures: Mapping[str, Any]) -> list[str]:
    """A workload's section."""
    columns = ("variant", "step time", "speed-up", "wait for rollouts, s", "training, s")
    columns += ("engine utilization", "generated tokens/s", "trained tokens per step")
    columns += ("dropped prompts per step", "largest staleness")
    first = "The speed-ups are relative to the first variant. The table contains means over"
    lines = ["", f"## {name}", "", f"{first} {figures['seeds']} seeds, simulated at commit {figures['commit']}.", ""]
    lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(row)} |" for row in figures["rows"]]
    papers = {f["published"]["source"]: f["published"] for f in figures["compared"] if f["published"]}
    for source, published in papers.items():
        known = (
            "The paper does not specify"
            if published["read"]
            else "The values are from notes about the paper, which do not specify"
        )
        lines += ["", f"The workload is from {source}. {known}: {published['missing']}."]
    before, *after = NOTES.get(name, ("",))
    lines += ["", before] if before else []
    lines += ["", *figures["explained"]] if figures.get("explained") else []
    for text in after:
        lines += ["", text]
    moves = [
        f"`{move['over']}` / `{move['of']}`: lowest with {move['lowest'][0]}, highest with {move['highest'][0]}."
        for move in figures.get("moved", [])
    ]
    when = (
        "These changes of one constant by 30 % give the lowest and the highest speed-up "
        f"(commit {figures.get('moved_commit', 'unknown')}):"
    )
    lines += ["", when, "", *(f"- {text}" for text in moves)] if moves else []
    return [*lines, "", f"![{name}](simulation-{name}.png)"]
