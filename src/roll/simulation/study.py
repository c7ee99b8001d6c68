"""`roll simulate`: every variant of a file, under every seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from roll.config.simulation import SimulationConfig
from roll.simulation.report import Results
from roll.simulation.run import SimulatedRun, simulate

__all__ = ["study"]


def study(
    config: SimulationConfig,
    *,
    only: Sequence[str] = (),
    trace: bool = False,
    progress: Callable[[str], None] = lambda line: None,
    processes: Executor | None = None,
) -> Results:
    """Simulate every variant with every seed.

    Args:
        config: the file.
        only: variants to simulate; none means all.
        trace: keep the events of each variant's first seed.
        progress: told of every run that ends.
        processes: simulate there, as many runs at a time as it has workers; none means one by one, here.

    Raises:
        UserError: a variant is unknown, or cannot be simulated.
    """
    names = list(only) or list(config.variants) or ["as written"]
    variants = {name: config.variant(name) if config.variants or only else config for name in names}
    jobs = [
        (name, partial(simulate, variant, seed=config.seed + number, trace=trace and number == 0))
        for number in range(config.num_seeds)
        for name, variant in variants.items()
    ]
    if processes is None:
        ended = (job() for _, job in jobs)
    else:
        ended = (future.result() for future in [processes.submit(job) for _, job in jobs])
    runs: dict[str, list[SimulatedRun]] = {name: [] for name in names}
    for (name, _), run in zip(jobs, ended, strict=True):
        runs[name].append(run)
        progress(f"{name}, seed {run.seed}: {run.step_s:.4g} s a step ({run.wall_s:.1f} s to simulate)")
    return Results(config=config, runs=runs)
