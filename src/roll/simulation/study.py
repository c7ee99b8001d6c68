"""`roll simulate`: every variant of a file, under every seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
) -> Results:
    """Simulate.

    Args:
        config: the file.
        only: variants to simulate; none means all.
        trace: keep the events of each variant's first seed.
        progress: told of every run that ends.

    Raises:
        UserError: a variant is unknown, or cannot be simulated.
    """
    names = list(only) or list(config.variants) or ["as written"]
    variants = {name: config.variant(name) if config.variants or only else config for name in names}
    runs: dict[str, list[SimulatedRun]] = {name: [] for name in names}
    for number in range(config.num_seeds):
        for name, variant in variants.items():
            run = simulate(variant, seed=config.seed + number, trace=trace and number == 0)
            runs[name].append(run)
            progress(f"{name}, seed {run.seed}: {run.step_s:.4g} s a step ({run.wall_s:.1f} s to simulate)")
    return Results(config=config, runs=runs)
