"""The parts of a step, each measured alone, beside the target it is meant to reach.

    make bench NAME=parts

    trainer   model-FLOPs utilisation of forward and backward, against matmuls timed in the same minutes
    memory    peak memory of the vocabulary's log-probs, against logits that are materialised
    sync      verified weight sync to a vLLM engine and to an embedded one; CPU time of an engine without work
    commands  how long `roll --help`, `roll check` and the refusal of a misspelt key take

Each part runs in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _trainer_parts import (
    MEMORY_TOKENS,
    QUICKSTART,
    ROOT,
    SQUARE,
    measure_memory_of,
    measure_trainer,
    quickstart_config,
    random_batch,
)

NUM_PUSHES = 7
IDLE_WINDOW_S, IDLE_WINDOWS = 5.0, 3
COMMAND_REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a figure is meant to reach."""

    label: str
    path: tuple[str, ...]
    """Where the figure is in the record."""
    bound: float
    at_least: bool = False

    def line(self, figures: Mapping[str, Any]) -> str:
        """The figure, its target, and whether it is met."""
        value: Any = figures
        for key in self.path:
            value = value[key]
        met = value >= self.bound if self.at_least else value <= self.bound
        sign = ">=" if self.at_least else "<="
        return f"{self.label:<58} {value:>9.3f}   target {sign} {self.bound:<5g} {'met' if met else 'MISSED'}"


TARGETS = (
    Target(
        label="utilisation, quickstart batch, of the model's own products",
        path=("trainer", "quickstart", "utilisation_of_own_shapes"),
        bound=0.6,
        at_least=True,
    ),
    Target(
        label=f"utilisation, quickstart batch, of a {SQUARE} square",
        path=("trainer", "quickstart", "utilisation_of_square"),
        bound=0.6,
        at_least=True,
    ),
    Target(
        label="utilisation, long batch, of the model's own products",
        path=("trainer", "long", "utilisation_of_own_shapes"),
        bound=0.6,
        at_least=True,
    ),
    Target(
        label=f"utilisation, long batch, of a {SQUARE} square",
        path=("trainer", "long", "utilisation_of_square"),
        bound=0.6,
        at_least=True,
    ),
    Target(label="log-probs, peak memory at 32k tokens over that at 8k", path=("memory", "growth_ratio"), bound=1.5),
    Target(label="weight sync to vLLM, verified, s", path=("sync", "vllm", "verified_s"), bound=0.3),
    Target(label="weight sync to the embedded engine, verified, s", path=("sync", "hf", "verified_s"), bound=0.3),
    Target(label="vLLM engine without work, % of a core", path=("sync", "vllm", "idle_cpu_percent"), bound=2.0),
    Target(label="roll --help, s", path=("commands", "help_s"), bound=0.5),
    Target(label="roll check, s", path=("commands", "check_s"), bound=5.0),
    Target(label="a misspelt key refused, s", path=("commands", "misspelt_s"), bound=1.0),
)


def measure_memory() -> dict[str, Any]:
    """Both sides; how ROLL's grows with tokens, and how much less it is for the fewest."""
    roll, materialised = (in_process(f"memory-{side}")["growth_bytes"] for side in ("roll", "materialised"))
    fewest, most = str(MEMORY_TOKENS[0]), str(MEMORY_TOKENS[-1])
    return {
        "growth_bytes": {"roll": roll, "materialised": materialised},
        "growth_ratio": roll[most] / roll[fewest],
        "materialised_over_roll": materialised[fewest] / roll[fewest],
    }


def tree_cpu_seconds() -> float:
    """CPU time of this process and of all that it started."""
    import psutil

    tree = psutil.Process()
    times = [process.cpu_times() for process in (tree, *tree.children(recursive=True))]
    return sum(t.user + t.system for t in times)


async def idle_cpu_percent() -> list[float]:
    """Of one core, in each of some windows without work: the engine's processes and the one that drives it."""
    await asyncio.sleep(2.0)
    found = []
    for _ in range(IDLE_WINDOWS):
        begin, used = time.monotonic(), tree_cpu_seconds()
        await asyncio.sleep(IDLE_WINDOW_S)
        found.append(100.0 * (tree_cpu_seconds() - used) / (time.monotonic() - begin))
    return found


async def measure_sync(kind: str) -> dict[str, Any]:
    """Push the default model's weights to one engine, after a real update each time."""
    from roll.algorithms.losses import PolicyLoss
    from roll.cluster.local import LocalCluster
    from roll.config.operations import WeightSyncConfig
    from roll.pipelines.preparation import build_engine_specs, prepare, select_probe_draws
    from roll.pipelines.reinforcement.trainers import build_policy_spec
    from roll.weights import WeightSync

    config = quickstart_config()
    material = prepare(config)
    (spec,) = build_engine_specs(config, material, None)
    cluster = LocalCluster()
    batch = random_batch(1, 2, (4, 4), 1000)
    with tempfile.TemporaryDirectory() as directory:
        spec = replace(spec, kind=kind, log_path=Path(directory) / "engine.log")
        trainer = await cluster.start_trainer(build_policy_spec(config, material.model_path), "actor_train")
        try:
            engines = await cluster.start_engines([spec], "actor_infer")
            try:
                transport = cluster.choose_transport(kind)
                probe = [draw.token_ids for draw in select_probe_draws(material.data)]
                sync = WeightSync(trainer, engines, WeightSyncConfig(), probe=probe, transport=transport)
                reports = []
                for version in range(NUM_PUSHES + 1):
                    await trainer.train_step(batch, PolicyLoss())
                    reports.append(await sync.push(version))
                    if reports[-1].dead_engines or reports[-1].engines != (spec.engine_id,):
                        raise SystemExit(f"push {version} did not reach the engine: {reports[-1]}")
                idle = await idle_cpu_percent() if kind == "vllm" else []
            finally:
                await engines.close()
        finally:
            await trainer.close()
    counted = reports[1:]
    figures = {
        "transport": transport,
        "num_bytes": counted[0].num_bytes,
        "verified_s": statistics.median(r.seconds + r.readback_s for r in counted),
        "verified_all_s": [r.seconds + r.readback_s for r in counted],
        "first_verified_s": reports[0].seconds + reports[0].readback_s,
        "transfer_s": statistics.median(r.seconds for r in counted),
        "readback_s": statistics.median(r.readback_s for r in counted),
        "num_tensors": counted[0].num_tensors,
        "num_read_back": counted[0].num_read_back,
        "probe_s": statistics.median(r.probe_s for r in counted),
    }
    return figures | ({"idle_cpu_percent": statistics.median(idle), "idle_cpu_percent_all": idle} if idle else {})


def command_seconds(arguments: list[str], *, refused: str = "") -> float:
    """Median time of a `roll` command, which must succeed, or be refused with the word `refused`."""
    times = []
    for _ in range(COMMAND_REPEATS):
        begin = time.perf_counter()
        done = subprocess.run(
            [str(Path(sys.executable).with_name("roll")), *arguments], cwd=ROOT, capture_output=True, text=True
        )
        times.append(time.perf_counter() - begin)
        said = done.stdout + done.stderr
        if (done.returncode != 0) != bool(refused) or refused not in said:
            raise SystemExit(f"roll {' '.join(arguments)} ended with {done.returncode}:\n{said[-3000:]}")
    return statistics.median(times)


def measure_commands() -> dict[str, Any]:
    """Latencies of a whole process, as a person meets them."""
    misspelt = ["train", QUICKSTART, "training.lerning_rate=1"]
    with tempfile.TemporaryDirectory() as directory:  # a run of this name may exist in the usual one
        return {
            "help_s": command_seconds(["--help"]),
            "check_s": command_seconds(["check", QUICKSTART, f"output_dir={directory}"]),
            "misspelt_s": command_seconds(misspelt, refused="learning_rate"),
        }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "trainer": measure_trainer,
    "memory-roll": lambda: measure_memory_of("roll"),
    "memory-materialised": lambda: measure_memory_of("materialised"),
    "sync-vllm": lambda: asyncio.run(measure_sync("vllm")),
    "sync-hf": lambda: asyncio.run(measure_sync("hf")),
}
"""What runs in a process of its own."""


def in_process(part: str) -> dict[str, Any]:
    """Run one part in a fresh process."""
    print(f"{part} ...", file=sys.stderr, flush=True)
    begin = time.monotonic()
    done = subprocess.run([sys.executable, __file__, "--part", part], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{part} failed:\n{done.stderr[-3000:]}")
    print(f"    {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure every part, print each figure beside its target, and the record last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted(PARTS))
    part = parser.parse_args().part
    if part:
        print(json.dumps(PARTS[part]()))
        return
    from _report import report

    figures = {
        "trainer": in_process("trainer"),
        "memory": measure_memory(),
        "sync": {"vllm": in_process("sync-vllm"), "hf": in_process("sync-hf")},
    }
    print("commands ...", file=sys.stderr, flush=True)
    figures["commands"] = measure_commands()
    for target in TARGETS:
        print(target.line(figures), file=sys.stderr, flush=True)
    report("parts", figures)


if __name__ == "__main__":
    main()
