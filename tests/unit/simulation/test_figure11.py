"""Figures of the page on published speed-ups: written from the stored results, which a simulation gives again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from roll.config.simulation import load_simulation

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SEVEN, FOURTEEN, THIRTY_TWO = (f"tail-batching-{size}" for size in ("7b", "14b", "32b"))


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def figures(name: str) -> dict[str, Any]:
    stored = json.loads((BENCHMARKS / "results" / "simulate_paper.json").read_text())["figures"]
    return stored[name]["figure11"]


def test_simulation_figure11_the_page_is_what_the_stored_figures_say() -> None:
    import simulate_paper

    assert simulate_paper.written() == simulate_paper.PAGE.read_text()


def test_simulation_figure11_two_times_are_found_again() -> None:
    from _figure11 import times

    waited = [10.0, 8.0, 5.0, 2.0]
    round_s, pace = times(waited, [4 + 1.6 * seconds for seconds in waited])  # 20 s, 16.8, 12, 7.2
    assert (round(round_s, 6), round(pace, 6)) == (4.0, 1.6)


def test_simulation_figure11_one_law_meets_7b_and_the_bars_that_were_left_out_and_misses_14b() -> None:
    from _figure11 import PUBLISHED, errors

    for name in (SEVEN, FOURTEEN):
        bars = figures(name)["bars"]
        assert [bar["what"] for bar in bars if not bar["fitted"]] == ["R 1.125", "P 1.125"]
        assert tuple(bar["published"] for bar in bars) == PUBLISHED[name]
        assert errors(bars)["predicted"] < 0.15
    assert errors(figures(SEVEN)["bars"])["fitted"] < 0.15 < errors(figures(FOURTEEN)["bars"])["fitted"]
    laws = figures(THIRTY_TWO)["searched"]
    assert laws["two kinds"]["fitted"] < 0.15 < laws["alike"]["fitted"]


def test_simulation_figure11_the_constants_are_those_that_the_search_found() -> None:
    from _figure11 import AT_LIMIT, CORRELATION

    for name in (SEVEN, FOURTEEN, THIRTY_TWO):
        assert figures(name)["searched"]["shared"]["constants"] == [AT_LIMIT, CORRELATION]
    for name in (SEVEN, FOURTEEN):
        constants = figures(name)["constants"]
        assert (constants["at_limit"], constants["correlation"]) == (AT_LIMIT, CORRELATION)


def test_simulation_figure11_a_round_waits_for_the_longest_answer_that_counts() -> None:
    """Every answer has the same length: redundancy saves nothing, and a period is as long as the baseline."""
    import numpy as np
    from _figure11_search import longest

    assert longest(lambda prompts, count, rng: np.full((len(prompts), count), 0.5)) == [0.5] * 8


@pytest.mark.slow
@pytest.mark.parametrize("what", ["base", "R 1.5", "both 1.25"])
def test_simulation_figure11_the_simulation_gives_the_stored_figures_again(what: str) -> None:
    from _figure11 import SEEDS, waited_s

    config = load_simulation(BENCHMARKS.parent / "examples" / "simulation" / f"{SEVEN}.yaml")
    (bar,) = (bar for bar in figures(SEVEN)["bars"] if bar["what"] == what)
    constants = figures(SEVEN)["constants"]
    waited = waited_s(config, what, SEEDS)
    assert waited == pytest.approx(bar["waited_s"], rel=1e-6)
    assert constants["round_s"] + constants["pace"] * waited == pytest.approx(bar["simulated"], rel=1e-6)
