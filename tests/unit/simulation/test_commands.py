"""`roll simulate` and `roll plan` as a user meets them; every workload that comes along is valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit.simulation.run_helpers import workload

from roll.cli.main import run
from roll.config.simulation import load_simulation
from roll.errors import ConfigError
from roll.simulation.report import compute_confidence_interval

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "simulation").glob("*.yaml"))
VARIANTS = {
    "variants": {
        "batch": {"rollout.scheduling.type": "batch"},
        "tail": {"rollout.scheduling.type": "tail_batching"},
    },
    "paper": [
        {"source": "a paper", "ratio": 1.1, "variant": "tail", "baseline": "batch", "missing": "lengths"},
        {
            "source": "another",
            "ratio": 1.2,
            "variant": "tail",
            "baseline": "batch",
            "missing": "hardware",
            "read": False,
        },
    ],
    "num_steps": 3,
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_simulation_commands_every_workload_that_comes_along_is_valid_and_names_what_it_chose(path: Path) -> None:
    config = load_simulation(path)
    assert all(figure.missing for figure in config.paper)
    if not config.paper:  # compares policies with each other only
        names = ("tail-batching-async", "stream-training", "sharing", "growing-answers", "engine-widths")
        assert path.stem in names
        return
    assert "before any policy was simulated" in path.read_text().replace("\n# ", " ")


def test_simulation_commands_a_study_prints_a_table_and_writes_results_plot_and_traces(tmp_path: Path, capsys) -> None:
    workload(tmp_path, VARIANTS | {"output_dir": str(tmp_path / "out")})
    assert run(["simulate", str(tmp_path / "workload.yaml"), "num_seeds=3"]) == 0
    shown = capsys.readouterr().out
    assert "speed-up" in shown and "published 1.1 (a paper)" in shown
    assert "missing in the paper: lengths" in shown
    assert "missing in our notes on the paper (the paper itself was not read): hardware" in shown
    out = tmp_path / "out" / "steady"
    assert {p.name for p in out.iterdir()} == {"results.json", "plot.png", "trace-batch.json", "trace-tail.json"}
    results = json.loads((out / "results.json").read_text())
    assert [len(results["variants"][name]["runs"]) for name in ("batch", "tail")] == [3, 3]
    assert results["variants"]["batch"]["speed_up"] == {"mean": 1.0, "half": 0.0}


def test_simulation_commands_only_chosen_variants_run_and_unknown_ones_are_refused(tmp_path: Path, capsys) -> None:
    workload(tmp_path, VARIANTS | {"output_dir": str(tmp_path / "out")})
    assert run(["simulate", str(tmp_path / "workload.yaml"), "-v", "tail", "--no-trace"]) == 0
    assert {p.name for p in (tmp_path / "out" / "steady").iterdir()} == {"results.json", "plot.png"}
    assert run(["simulate", str(tmp_path / "workload.yaml"), "-v", "tial"]) == 2
    assert "unknown variant 'tial'" in capsys.readouterr().err


def test_simulation_commands_plan_prints_a_recommendation(tmp_path: Path, capsys) -> None:
    workload(tmp_path, {"engine": {}, "rollout.max_new_tokens": 2048, "placement.generation": 4})
    assert run(["plan", str(tmp_path / "workload.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "Plan:" in shown and "tensor_parallel:" in shown and "asynchrony" in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.scheduling.async_ratio": 1.0}, "share devices, got "),
        ({"warmup_steps": 1}, "must be less than num_steps 1"),
        ({"engine.tensor_parallel": 3}, "must be a multiple of engine.tensor_parallel 3"),
        ({"engine.max_batched_tokens": 4}, "to leave space for prefill"),
        ({"failures": [{"at_s": 1.0, "engine": 5}]}, "failures.engine 5 must be between 0 and 1"),
        ({"variants": {"a": {"rollout.group_sise": 2}}}, "unknown key 'rollout.group_sise'"),
        ({"variants": {"a": {"rollout.group_size": 0}}}, "group_size"),
        ({"variants": {"a": 3}}, "variant a must be a mapping of dotted keys to values, got 3"),
        (
            {"paper": [{"source": "s", "ratio": 2.0, "variant": "x", "baseline": "y"}]},
            "the variant 'x' in paper is not defined",
        ),
        ({"answer_tokens": {"type": "lognormal", "median": 5}}, "exactly one of p75 and sigma"),
        ({"answer_tokens": {"type": "lognormal", "median": 5, "p75": 4}}, "p75 must be >= median, got 4 and 5"),
        ({"answer_tokens": {"type": "quantiles", "points": [[0.5, 3]]}}, "at least two points"),
        ({"answer_tokens": {"type": "quantiles", "points": [[0.5, 3], [0.4, 4]]}}, "points must be in ascending order"),
        ({"answer_tokens": {"type": "empirical"}}, "exactly one of values and file"),
    ],
)
def test_simulation_commands_a_mistake_is_one_clear_message(tmp_path: Path, changes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workload(tmp_path, changes)


def test_simulation_commands_unknown_hardware_is_refused_before_anything_runs(tmp_path: Path, capsys) -> None:
    workload(tmp_path, {"device": "h1000"})
    assert run(["simulate", str(tmp_path / "workload.yaml"), "--no-trace"]) == 2
    assert "unknown device 'h1000'. Did you mean 'h100'?" in capsys.readouterr().err


def test_simulation_commands_an_interval_by_hand() -> None:
    # mean 2, standard deviation 1, t(0.975, 2) = 4.303: half = 4.303 / sqrt(3)
    found = compute_confidence_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.half) == pytest.approx((2.0, 2.4843), rel=1e-4)
    assert compute_confidence_interval([5.0]).half == 0.0
    assert compute_confidence_interval([float(n % 2) for n in range(20)]).half == pytest.approx(
        2.093 * 0.51299 / 20**0.5, rel=1e-4
    )
