"""Rules for shared devices and tail batching against the fastest baseline with equal devices, tokens and staleness.

    make bench NAME=elastic-simulated                                 everything: about half an hour on two cores
    make bench NAME=elastic-simulated ARGS="--parts stream tail"      these parts
    make bench NAME=elastic-simulated ARGS="--parts files --only alfworld swe"

`stream`: streamed gradients in synchronous runs. `missized`: `sharing: auto` in an asynchronous run, and a fixed split
with half of the right number of devices for one role. `files`: `auto` on the workload of every file in
`examples/simulation`, in asynchronous runs. `tail`: tail batching in asynchronous runs.

The baseline of a comparison is the fastest of several variants (`_sharing_variants.py`) with the first seed. The
variant that is compared with it is chosen with another seed. Results are stored in
`benchmarks/results/elastic_simulated.json`; parts that were not measured stay as they were.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any, TypeAlias

from _report import RESULTS, ROOT, commit, report
from _sharing_variants import (
    NUM_SPLITS,
    SWITCH_S,
    Figures,
    build_baselines,
    build_neighbors,
    build_shared,
    build_splits,
    compare,
    find_fastest,
    list_sizes,
    measure,
    prepare,
)

from roll.config.simulation import SimulationConfig, load_simulation

Row: TypeAlias = tuple[str, dict[str, Any]]
"""Name and results of a comparison."""
EXAMPLES = ROOT / "examples" / "simulation"
SEEDS = (0, 1, 2)
CHOICE_SEED = 100
"""Seed with which the variant is chosen that is compared with the baseline."""
NUM_SHARED_SPLITS = 4
"""The trainer of a compared variant uses one, two or three quarters of the devices."""
SMALL = 10
"""Number of devices up to which the trainer of a compared variant uses any number of eighths of the devices."""
LONG_ANSWERS: dict[str, Any] = {
    "answer_tokens.points": [[0.5, 4000], [0.75, 8000], [0.999, 32768]],
    "answer_tokens.max": 32768,
    "rollout.max_new_tokens": 32768,
}
"""Answers of a reasoning model: the median is seven times as long as in the file."""
ALIASES = {"stream-training": "sharing", "tail-batching-14b": "sharing", "tail-batching-async": "sharing"}
"""Files with the same model, devices, lengths and training as another file."""
LEFT_OUT = {"device-classes"}
"""Files with different devices, of which only some can train."""
NUM_STEPS, WARMUP_STEPS = 10, 2
FILE_STEPS: dict[str, tuple[int, int]] = {
    "growing-answers": (24, 2),
    "async-rlvr": (6, 2),
    "verl-sharing": (8, 2),
    **dict.fromkeys(("alfworld", "swe", "environment-latency", "environment-ladder"), (6, 2)),
}
"""Numbers of steps and of warm-up steps of other files than `NUM_STEPS` and `WARMUP_STEPS`."""
TAIL_STEPS = (18, 6)


def load(name: str, async_ratio: float) -> SimulationConfig:
    """Return the workload of a file without its schedule."""
    steps, warmup = FILE_STEPS.get(name, (NUM_STEPS, WARMUP_STEPS))
    config = load_simulation(EXAMPLES / f"{name}.yaml")
    return prepare(config, async_ratio=async_ratio, num_steps=steps, warmup_steps=warmup)


def list_trainer_sizes(config: SimulationConfig) -> list[int]:
    """Return the numbers of training devices of the compared variants."""
    return list_sizes(config, NUM_SPLITS if config.placement.num_devices <= SMALL else NUM_SHARED_SPLITS)


def contest(
    config: SimulationConfig,
    candidates: Mapping[str, Mapping[str, Any]],
    processes: Executor,
    before: Mapping[str, Figures] | None = None,
) -> dict[str, Any]:
    """Compare the candidate that is fastest on another seed with the fastest baseline.

    Args:
        config: The workload.
        candidates: Variants of which one is chosen.
        processes: Worker pool.
        before: The measured baselines; by default, all of `build_baselines` are measured.
    """
    tried = measure(config, candidates, [CHOICE_SEED], processes)
    chosen = find_fastest(tried)
    before = measure_baselines(config, processes) if before is None else before
    after = measure(config, {chosen: candidates[chosen]}, SEEDS, processes)[chosen]
    baseline = max(before, key=lambda name: (len(before[name].by_seed), -before[name].step_s))
    return {
        "chosen": chosen,
        "step_s": after.step_s,
        "baseline": baseline,
        "baseline_s": before[baseline].step_s,
        **compare(before[baseline], after),
        "staleness": [before[baseline].max_staleness, after.max_staleness],
        "devices": config.placement.num_devices,
        "baselines": {name: describe(figures) for name, figures in before.items()},
        "candidates": {name: round(figures.step_s, 2) for name, figures in tried.items()},
    }


def measure_baselines(config: SimulationConfig, processes: Executor) -> dict[str, Figures]:
    """Measure all baselines with the first seed, and the fastest one with all seeds."""
    variants = build_baselines(config)
    found = measure(config, variants, SEEDS[:1], processes)
    splits = {name: figures for name, figures in found.items() if name not in ("colocated", "split_batch")}
    further = {name: each for name, each in build_neighbors(config, find_fastest(splits)).items() if name not in found}
    found |= measure(config, further, SEEDS[:1], processes)
    fastest = find_fastest(found)
    return found | measure(config, {fastest: (variants | further)[fastest]}, SEEDS, processes)


def describe(figures: Figures) -> dict[str, float]:
    """Return the step time and the trained tokens of a variant."""
    return {"step_s": round(figures.step_s, 2), "tokens": round(figures.num_tokens)}


def measure_stream(only: Sequence[str], processes: Executor) -> Iterator[Row]:
    """Streamed gradients in synchronous runs, on separate and on shared devices."""
    workloads = {"tail-batching-14b": {}, "long answers": LONG_ANSWERS}
    for name, changes in workloads.items():
        config = load("sharing", 0.0).with_changes(changes)
        sizes = list_trainer_sizes(config)
        before = measure_baselines(config, processes)
        candidates = {
            "separate devices": build_splits(config, sizes, streams=True),
            "shared devices": build_shared(config, "stream_training", sizes),
        }
        for where, variants in candidates.items():
            yield f"{name}, {where}", contest(config, variants, processes, before)


def measure_missized(only: Sequence[str], processes: Executor) -> Iterator[Row]:
    """`auto` against a split in which one role has half of the devices that it has in the fastest split.

    The trainer of `auto` has the same number of devices as the split, or the number that is fastest with another seed.
    """
    config = load("sharing", 1.0)
    total, width = config.placement.num_devices, config.engine.width
    tried = measure(config, build_splits(config, list_sizes(config)), SEEDS[:1], processes)
    best = int(find_fastest(tried).removeprefix("split_"))
    half_generation = total - max(width, (total - best) // 2 // width * width)
    for what, size in {"training": max(1, best // 2), "generation": half_generation}.items():
        name = f"half of the {what} devices: {total - size} + {size} instead of {total - best} + {best}"
        before = measure(config, build_splits(config, [size]), SEEDS, processes)
        yield f"{name}, same trainer", contest(config, build_shared(config, "auto", [size]), processes, before)
        anywhere = build_shared(config, "auto", list_trainer_sizes(config))
        yield f"{name}, trainer as planned", contest(config, anywhere, processes, before)


def measure_files(only: Sequence[str], processes: Executor) -> Iterator[Row]:
    """`auto` with an async ratio of 1, on every file."""
    for path in sorted(EXAMPLES.glob("*.yaml")):
        name = path.stem
        if name in ALIASES or name in LEFT_OUT or (only and name not in only):
            continue
        config = load(name, 1.0)
        yield name, contest(config, build_shared(config, "auto", list_trainer_sizes(config)), processes)


def measure_tail(only: Sequence[str], processes: Executor) -> Iterator[Row]:
    """Tail batching with an async ratio of 1 and 2, on the file's split and on the fastest split of each schedule."""
    tail = {"rollout.scheduling.type": "tail_batching", "rollout.scheduling.rollout_redundancy": 1.0}
    for ratio in (1.0, 2.0):
        config = prepare(
            load_simulation(EXAMPLES / "tail-batching-async.yaml"),
            async_ratio=ratio,
            num_steps=TAIL_STEPS[0],
            warmup_steps=TAIL_STEPS[1],
        )
        splits = build_splits(config, list_trainer_sizes(config))
        deferred = {f"tail_{name}": changes | tail for name, changes in splits.items()}
        before = measure(config, splits, SEEDS, processes)
        same = {"split_24": before["split_24"]}
        yield (
            f"async_ratio {ratio:g}, 8 + 24 devices",
            contest(config, {"tail_split_24": deferred["tail_split_24"]}, processes, same),
        )
        yield f"async_ratio {ratio:g}, fastest split of each", contest(config, deferred, processes, before)


PARTS: dict[str, Callable[[Sequence[str], Executor], Iterator[Row]]] = {
    "stream": measure_stream,
    "missized": measure_missized,
    "tail": measure_tail,
    "files": measure_files,
}


def show(name: str, row: Mapping[str, Any]) -> None:
    """Print a comparison."""
    print(
        f"  {name}: {row['chosen']} {row['step_s']:.1f} s, {row['baseline']} {row['baseline_s']:.1f} s, "
        f"{row['ratio']:.3f} ({row['lowest']:.3f} to {row['highest']:.3f}), tokens {row['tokens'] - 1:+.2%}, "
        f"staleness {row['staleness'][0]} and {row['staleness'][1]}",
        flush=True,
    )


def stored() -> dict[str, Any]:
    """Return the figures of earlier runs."""
    path = RESULTS / "elastic_simulated.json"
    return json.loads(path.read_text())["figures"] if path.exists() else {}


def store(figures: Mapping[str, Any]) -> None:
    """Write all figures, without printing them."""
    with contextlib.redirect_stdout(io.StringIO()):
        report("elastic_simulated", figures)


def main() -> int:
    """Measure, and store the figures after each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--only", nargs="*", default=[], help="these files, of the part `files`")
    parser.add_argument("--processes", type=int, default=None)
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("spawn")) as processes:
        for part in arguments.parts:
            print(f"{part}:", flush=True)
            for name, row in PARTS[part](arguments.only, processes):
                show(name, row)
                rows = stored().get(part, {}) | {name: row | {"commit": commit()}}
                store(stored() | {part: rows, "num_seeds": len(SEEDS), "switch_s": SWITCH_S})
    return 0


if __name__ == "__main__":
    sys.exit(main())
