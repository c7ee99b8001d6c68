"""Published speed-ups against simulated ones, on the workloads of `examples/simulation/`.

    make bench NAME=simulate-paper                      every workload, 20 seeds
    make bench NAME=simulate-paper ARGS="--only queue-scheduling --seeds 5"
    make bench NAME=simulate-paper ARGS="--only async-rlvr --parts moves"
    make bench NAME=simulate-paper ARGS="--parts staleness"      the comparisons that lead the page: minutes
    make bench NAME=simulate-paper ARGS="--parts figure11"   RollPacker's rollout times, with the search for constants
    make bench NAME=simulate-paper ARGS="--parts sharing"    ratios of systems that share devices

For each workload: every variant under every seed (mean step time with a 95 % interval), the published ratio beside the
simulated one, the best combination of policies against the same baseline and against continuous batching, and whether
the sign of each conclusion holds when each constant moves by 30 % up and down. Writes
`docs/benchmarks/simulation.md`, a plot for each workload, and `benchmarks/results/simulate_paper.json`; what was not
asked for stays as it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from _equal_staleness import equal_staleness
from _figure11 import PUBLISHED, figure11
from _figure11_search import SHARED, searched
from _missing_constants import explained
from _published_sharing import measure_published
from _report import RESULTS, ROOT, commit, report
from _simulation_page import page

from roll.config.simulation import SimulationConfig, load_simulation
from roll.simulation.hardware import Device, load_device
from roll.simulation.report import SimulationResults, plot_results, simulate_variants

EXAMPLES = ROOT / "examples" / "simulation"
PAGE = ROOT / "docs" / "benchmarks" / "simulation.md"
WORKLOADS = (
    "queue-scheduling",
    "async-rlvr",
    "environment-latency",
    "environment-ladder",
    "tail-batching-7b",
    "tail-batching-14b",
    "tail-batching-32b",
)
_OURS = (("batch", "best"), ("continuous", "best"), ("batch", "fastest"), ("continuous", "fastest"))
_ON_POLICY = (("batch", "whole_prompts"), ("continuous", "whole_prompts"))
COMPARED: dict[str, tuple[tuple[str, str], ...]] = {
    "queue-scheduling": _OURS,
    "async-rlvr": _OURS,
    "environment-latency": (("together", "best"), ("each_alone", "best"), ("together", "fastest")),
    "environment-ladder": (
        ("together_1", "best_1"),
        ("alone_1", "best_1"),
        ("together_10", "best_10"),
        ("alone_10", "best_10"),
    ),
    "tail-batching-7b": _ON_POLICY + _OURS,
    "tail-batching-14b": _ON_POLICY + _OURS,
    "tail-batching-32b": _ON_POLICY + _OURS,
}
"""Beside what was published: a baseline, and what is to beat it. `continuous` and `each_alone_*` are the stronger ones:
continuous batching with least-loaded routing."""
PARTS = ("staleness", "figure11", "results", "moves", "missing")
"""Parts that are measured for each workload."""
SHARING = "sharing"
"""The part that has its own workloads."""
FACTORS = (0.7, 1.3)
STALENESS_SEEDS = 3
SENSITIVITY_STEPS = 5
SENSITIVITY_SEEDS = {"queue-scheduling": 5}
"""Where a step has few rollouts, one seed says little."""
DEVICE_CONSTANTS = ("flops", "memory_bandwidth", "step_overhead_s", "link_bandwidth", "training_efficiency")


def moved(config: SimulationConfig, directory: Path) -> Iterator[tuple[str, SimulationConfig]]:
    """The configuration with one constant moved by 30 %, for each constant and direction."""
    base = load_device(config.device)
    for constant in DEVICE_CONSTANTS:
        for factor in FACTORS:
            yield f"{constant} x {factor}", with_device(config, base, constant, factor, directory)
    tree = config.model_dump(mode="json")
    for path in numbers(tree):
        for factor in FACTORS:
            yield f"{'.'.join(map(str, path))} x {factor}", scaled(tree, path, factor)


def with_device(
    config: SimulationConfig, base: Device, constant: str, factor: float, directory: Path
) -> SimulationConfig:
    """On a device of which one quantity differs."""
    values = base.model_dump(mode="json", exclude={"name"}) | {constant: getattr(base, constant) * factor}
    path = directory / f"{base.name}-{constant}-{factor}.yaml"
    path.write_text(yaml.safe_dump(values))
    return config.model_copy(update={"device": str(path)})


def numbers(tree: dict[str, Any]) -> Iterator[tuple[str | int, ...]]:
    """Paths of the constants that a workload chose: lengths, latencies, rates, turns."""
    for section in ("prompt_tokens", "answer_tokens"):
        yield from leaves(tree[section], (section,))
    if tree["reward"]["latency"].get("value") != 0:
        yield from leaves(tree["reward"]["latency"], ("reward", "latency"))
    if tree["environment"]:
        yield ("environment", "num_turns")
        yield from leaves(tree["environment"]["latency"], ("environment", "latency"))
    if tree["training"]["efficiency"]:
        yield ("training", "efficiency")
    if tree["reward"]["filter_groups"]:
        yield ("reward", "solve_rate", "values")


def leaves(law: dict[str, Any], path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Of a distribution: its scale and its spread, or its quantiles; limits stay."""
    for key in ("value", "mean", "std", "median", "sigma"):
        if law.get(key):
            yield (*path, key)
    for index in range(len(law.get("points", []))):
        yield (*path, "points", index, 1)


def scaled(tree: dict[str, Any], path: tuple[str | int, ...], factor: float) -> SimulationConfig:
    """The configuration with one number multiplied; quantiles beyond it do not fall below it, and rates end at 1."""
    copy = json.loads(json.dumps(tree))
    place = copy
    for part in path[:-1]:
        place = place[part]
    if path[-1] == "values":
        place["values"] = [min(1.0, rate * factor) for rate in place["values"]]
        return SimulationConfig.model_validate(copy)
    value = place[path[-1]] * factor
    place[path[-1]] = round(value) if isinstance(place[path[-1]], int) else value
    if "points" in path:
        points = copy[path[0]]["points"]
        for before, after in itertools.pairwise(points):
            after[1] = max(after[1], before[1])
    return SimulationConfig.model_validate(copy)


def pairs(name: str, config: SimulationConfig) -> list[tuple[str, str]]:
    """What is compared: slower and faster variant."""
    return [(figure.baseline, figure.variant) for figure in config.paper] + list(COMPARED[name])


def sensitivity(name: str, config: SimulationConfig) -> list[dict[str, Any]]:
    """For each comparison: ratios with every constant moved; `fastest` changes what is learned, and is left out."""
    compared = [(over, of) for over, of in pairs(name, config) if of != "fastest"]
    ratios: dict[tuple[str, str], dict[str, float]] = {pair: {} for pair in compared}
    with tempfile.TemporaryDirectory() as directory:
        short = config.model_copy(
            update={
                "num_steps": min(config.num_steps, config.warmup_steps + SENSITIVITY_STEPS),
                "num_seeds": SENSITIVITY_SEEDS.get(name, 1),
                "variants": {key: fewer_steps(changes) for key, changes in config.variants.items()},
            }
        )
        for what, changed in moved(short, Path(directory)):
            results = simulate_variants(changed, variant_names=tuple(dict.fromkeys(itertools.chain(*compared))))
            for over, of in compared:
                ratios[over, of][what] = results.compute_ratio(over, of).mean
            print(f"  {what}: {', '.join(f'{ratios[pair][what]:.2f}' for pair in compared)}", flush=True)
    found = []
    for (over, of), by_move in ratios.items():
        lowest, highest = min(by_move, key=by_move.__getitem__), max(by_move, key=by_move.__getitem__)
        found.append(
            {
                "of": of,
                "over": over,
                "holds": all(ratio > 1 for ratio in by_move.values()),
                "lowest": [lowest, by_move[lowest]],
                "highest": [highest, by_move[highest]],
            }
        )
    return found


def fewer_steps(changes: dict[str, Any]) -> dict[str, Any]:
    """A variant that has a number of steps of its own, with as few as the others."""
    if "num_steps" not in changes:
        return changes
    return changes | {"num_steps": min(changes["num_steps"], changes.get("warmup_steps", 0) + SENSITIVITY_STEPS)}


def measure(name: str, config: SimulationConfig) -> dict[str, Any]:
    """One workload: its plot is written, its figures come back."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        results = simulate_variants(config, processes=processes)
    plot_results(results, PAGE.parent / f"simulation-{name}.png")
    published = {(figure.baseline, figure.variant): figure for figure in config.paper}
    compared = []
    for over, of in pairs(name, config):
        ratio, figure = results.compute_ratio(over, of), published.get((over, of))
        print(f"  {over} / {of}: {ratio}, published {figure.ratio if figure else '-'}", flush=True)
        compared.append(
            {
                "over": over,
                "of": of,
                "simulated": str(ratio),
                "mean": ratio.mean,
                "tokens": results.compute_mean(of, "num_tokens") / results.compute_mean(over, "num_tokens"),
                "published": figure.model_dump() if figure else None,
                "within": results.reproduces(figure) if figure else None,
            }
        )
    return {"rows": rows(results), "compared": compared, "seeds": config.num_seeds, "commit": commit()}


def rows(results: SimulationResults) -> list[list[str]]:
    """A table's cells."""
    names = ("wait_s", "train_s", "busy_share", "tokens_per_s", "num_tokens")
    return [
        [
            variant,
            f"{results.compute_step_s(variant)} s",
            str(results.compute_ratio(results.baseline, variant)),
            *(f"{results.compute_mean(variant, name):,.2f}" for name in names[:3]),
            *(f"{results.compute_mean(variant, name):,.0f}" for name in names[3:]),
            f"{results.compute_mean(variant, 'num_expired'):.1f}",
            str(max(step.max_staleness for run in runs for step in run.steps)),
        ]
        for variant, runs in results.runs.items()
    ]


def main() -> int:
    """Simulate, and write page, plots and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=list(WORKLOADS), help="these workloads")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--parts", nargs="*", choices=[*PARTS, SHARING], default=[*PARTS, SHARING], help="these")
    parser.add_argument("--page", action="store_true", help="only write the page again, from the stored figures")
    arguments = parser.parse_args()
    if SHARING in arguments.parts and not arguments.page:
        store(SHARING, {"rows": measure_published(), "commit": commit()})
    for name in () if arguments.page else arguments.only:
        config = load_simulation(EXAMPLES / f"{name}.yaml", [f"num_seeds={arguments.seeds}"])
        for kind in (part for part in arguments.parts if part != SHARING):
            print(f"{name}, {kind}:", flush=True)
            if kind == "staleness":
                seeds = min(arguments.seeds, STALENESS_SEEDS)
                store(name, {"equal_staleness": equal_staleness(name, config, seeds) | {"commit": commit()}})
            elif kind == "figure11":
                if name in PUBLISHED:
                    bars = figure11(name, config) if name in SHARED else {"bars": []}
                    found = bars | {"searched": searched(name), "commit": commit()}
                    store(name, {"figure11": found})
            elif kind == "results":
                store(name, measure(name, config))
            elif kind == "moves":
                store(name, {"moved": sensitivity(name, config), "moved_commit": commit()})
            else:
                store(name, {"explained": explained(name, config)})
    PAGE.write_text(written())
    return 0


def written() -> str:
    """The page, from the stored figures."""
    return page(describe_content(stored()), WORKLOADS)


def describe_content(figures: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Figures with what the workloads say of their sources now: that is no measurement."""
    for name, of in figures.items():
        if name == SHARING:
            continue
        said = {(paper.baseline, paper.variant): paper for paper in load_simulation(EXAMPLES / f"{name}.yaml").paper}
        for compared in of.get("compared", ()):
            if compared["published"]:
                compared["published"] = said[compared["over"], compared["of"]].model_dump()
    return figures


def stored() -> dict[str, dict[str, Any]]:
    """Figures of earlier runs, by workload."""
    path = RESULTS / "simulate_paper.json"
    return json.loads(path.read_text())["figures"] if path.exists() else {}


def store(name: str, found: dict[str, Any]) -> None:
    """Put figures beside those that are already known of a workload."""
    figures = stored()
    report("simulate_paper", figures | {name: figures.get(name, {}) | found})


if __name__ == "__main__":
    sys.exit(main())
