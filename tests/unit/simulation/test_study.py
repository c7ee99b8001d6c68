"""Every variant under every seed: one by one, or in other processes."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from roll.config.simulation import SimulationConfig
from roll.simulation.report import render_results, simulate_variants

CONFIG = SimulationConfig.model_validate(
    {
        "name": "study",
        "num_steps": 2,
        "num_seeds": 2,
        "model": "qwen3-8b",
        "device": "h800",
        "placement": {"generation": 2},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 64},
        "prompt_tokens": {"type": "fixed", "value": 16},
        "answer_tokens": {"type": "lognormal", "median": 20, "sigma": 0.8, "max": 64},
        "variants": {"batch": {"rollout.scheduling.type": "batch"}, "queue": {"rollout.scheduling.type": "queue"}},
    }
)


def test_simulation_study_other_processes_find_the_same_in_the_same_order_and_bring_the_trace() -> None:
    told: list[str] = []
    here = simulate_variants(CONFIG, trace=True, progress=told.append)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        there = simulate_variants(CONFIG, trace=True, processes=processes)
    assert [line.split(":")[0] for line in told] == ["batch, seed 0", "queue, seed 0", "batch, seed 1", "queue, seed 1"]
    assert list(here.runs) == list(there.runs) == ["batch", "queue"]
    for variant, runs in here.runs.items():
        for ours, theirs in zip(runs, there.runs[variant], strict=True):
            assert (ours.seed, ours.digest, ours.steps) == (theirs.seed, theirs.digest, theirs.steps)
            assert ours.recorder.timeline == theirs.recorder.timeline
        assert [bool(run.recorder.timeline) for run in there.runs[variant]] == [True, False]
    assert here.runs["batch"][0].digest != here.runs["batch"][1].digest


def test_simulation_study_speed_ups_of_unequal_work_are_marked() -> None:
    variants = {
        "base": {"rollout.scheduling.type": "queue"},
        "same": {"rollout.scheduling.type": "queue", "engine.max_num_seqs": 64},
        "less": {"rollout.prompts_per_step": 1},
        "wide": {"placement.generation": 4},
    }
    results = simulate_variants(CONFIG.model_copy(update={"variants": variants, "num_seeds": 1}))
    shown = render_results(results).splitlines()
    rows = {line.split()[0]: line.split() for line in shown if line.split()[:1] and line.split()[0] in variants}
    assert [name for name, row in rows.items() if any("*" in cell for cell in row)] == ["less", "wide"]
    assert {name: row[1] for name, row in rows.items()} == {"base": "2", "same": "2", "less": "2", "wide": "4"}
    (less,) = (line for line in shown if line.startswith("  * less:"))
    assert "fewer tokens trained per step" in less
    assert "  * wide: 4 devices instead of 2" in shown
