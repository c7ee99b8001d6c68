"""Real runs on two cores that are two devices: `elastic_overlap` against a fixed split of one engine and one trainer.

Both variants train the same prompts for the same number of steps with an async ratio of 1 and answers of equal lengths.
With the split, core 0 generates and core 1 trains. With `elastic_overlap`, core 1 also runs an engine, which pauses
while the trainer works. Each process is pinned to its core. On a CPU, vLLM can only pause, so a switch moves no memory.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
from pathlib import Path
from typing import Any

import psutil
from _report import measure_matmul_rate

import roll
from roll.config.simulation import load_simulation
from roll.simulation.calibrate import calibrate
from roll.simulation.run import simulate

__all__ = ["WORKLOADS", "measure_sharing"]

WORKLOADS: dict[str, dict[str, Any]] = {
    # Few requests at a time: an engine's step reads all weights for a handful of tokens.
    "generation is the bottleneck": {"max_num_seqs": 4, "max_new_tokens": 96, "examples": 0},
    # Long few-shot prompts: the trainer computes every prompt token, while vLLM computes them once per prompt.
    "training is the bottleneck": {"max_num_seqs": 32, "max_new_tokens": 8, "examples": 72},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "split": {"device_mapping": {"actor_train": "1", "actor_infer": "0"}, "sharing": "disaggregated"},
    "elastic_overlap": {"device_mapping": {"actor_train": "1", "actor_infer": "0-1"}, "sharing": "elastic_overlap"},
}
NUM_STEPS = 6
NUM_WARM_UP_STEPS = 2
PIN_INTERVAL_S = 1.0
TRAINER_PROCESS = "ray::TrainerActor"


def measure_sharing(directory: Path, model: str) -> dict[str, Any]:
    """Run both variants on both workloads, and simulate them with costs that are fitted to the split's run.

    Args:
        directory: Directory for the runs.
        model: Name, path or Hub ID of the model.

    Returns:
        For each workload: seconds per step and tokens trained per step of each variant, the speed-up of
        `elastic_overlap`, the speed-up that the simulator predicts, and the rate of this machine before each run.
    """
    figures: dict[str, Any] = {}
    for workload, settings in WORKLOADS.items():
        rows = {name: _run(directory, model, settings, name, cluster) for name, cluster in VARIANTS.items()}
        speed_up = rows["split"]["step_s"] / rows["elastic_overlap"]["step_s"]
        switch_s = rows["elastic_overlap"]["offload_s"]
        predicted = _predict_speed_up(directory / _get_run_name("split", settings), switch_s)
        figures[workload] = rows | {"speed_up": speed_up, "predicted_speed_up": predicted}
        print(workload, figures[workload], flush=True)
    return figures


def _predict_speed_up(run: Path, switch_s: float) -> float:
    """Return the simulated speed-up of `elastic_overlap` over the split, with costs fitted to the split's run.

    Args:
        run: Directory of the split's run.
        switch_s: Duration of a switch in the run with `elastic_overlap`; the split has none.
    """
    calibrate(run)
    placement = {"generation": 2, "training": 1, "sharing": "elastic_overlap", "switch_s": max(switch_s, 1e-3)}
    shared = [f"placement.{key}={value}" for key, value in placement.items()]
    split_s, shared_s = (
        simulate(load_simulation(run / "calibration" / "workload.yaml", ["num_steps=12", *changes])).step_s
        for changes in ([], shared)
    )
    return split_s / shared_s


def _get_run_name(variant: str, settings: dict[str, Any]) -> str:
    return f"{variant}-{settings['max_new_tokens']}"


def _run(directory: Path, model: str, settings: dict[str, Any], name: str, cluster: dict[str, Any]) -> dict[str, Any]:
    """Return the medians over the steps after warm-up of one run."""
    shots = "".join(f"{n} + {n + 3} = {2 * n + 3}. " for n in range(settings["examples"]))
    run, rate = _get_run_name(name, settings), measure_matmul_rate()
    config = {
        "pipeline": "rlvr",
        "name": run,
        "model": model,
        "output_dir": str(directory),
        "data": [
            {
                "source": "arithmetic",
                "reward": [{"type": "regex", "pattern": "[a-m]{4}", "require_finished": False}],
                "prompt_template": shots + "Write a very long story about the numbers in {prompt}",
            }
        ],
        "algorithm": {"filters": {"skip_zero_variance": False}},
        "rollout": {
            "prompts_per_step": 8,
            "group_size": 4,
            "max_new_tokens": settings["max_new_tokens"],
            "scheduling": {"async_ratio": 1},
        },
        "inference": {"engine": "vllm", "max_num_seqs": settings["max_num_seqs"]},
        "training": {"num_steps": NUM_STEPS, "learning_rate": 1e-9, "num_threads": 1},
        "evaluation": {"every_num_steps": 0, "num_prompts": 1, "before_training": False},
        "checkpoint": {"every_num_steps": 0, "at_end": False},
        "tracking": {"console": "quiet", "tensorboard": False},
        "cluster": {"type": "ray", "devices_per_node": 2, **cluster},
    }
    done = threading.Event()
    pinning = threading.Thread(target=_pin_processes, args=(done,), daemon=True)
    pinning.start()
    try:
        roll.train(config)
    finally:
        done.set()
        pinning.join()
    lines = (directory / run / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row["kind"] == "train"][NUM_WARM_UP_STEPS:]
    return {
        "machine_gflop_per_s": rate,
        "step_s": statistics.median(row["time/step_s"] for row in steps),
        "trained_tokens": statistics.mean(
            row["throughput/trained_tokens_per_s"] * row["time/train_s"] for row in steps
        ),
        "offload_s": statistics.median(row.get("time/offload_s") or 0.0 for row in steps),
    }


def _pin_processes(done: threading.Event) -> None:
    """Pin the engine of device 0 to core 0, and the engine of device 1 and the trainer to core 1, as they appear."""
    pinned: set[int] = set()
    while not done.wait(PIN_INTERVAL_S):
        for process in psutil.Process().children(recursive=True):
            try:
                core = _choose_core(process)
                if core is not None and process.pid not in pinned:
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, {core})
                    pinned.add(process.pid)
            except (psutil.NoSuchProcess, psutil.ZombieProcess, ProcessLookupError):
                continue


def _choose_core(process: psutil.Process) -> int | None:
    """Return the core of an engine or of the trainer; `None` for other processes."""
    name = " ".join(process.cmdline()[:1])
    if name.startswith("VLLM::EngineCore"):
        return int(Path(process.environ()["ROLL_ENGINE_LOG"]).stem.rpartition("-")[2])
    return 1 if name.startswith(TRAINER_PROCESS) else None
