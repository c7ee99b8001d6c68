"""`roll simulate --calibrate RUN`: derive a device and a workload from the files of a real run.

    RUN/trace.json      engines' spans of steps     ──► fit ──► curve, prefill, context
    RUN/metrics.jsonl   times of updates and syncs                                     ─► RUN/calibration/device.yaml
    RUN/config.yaml     model, engines, policies
    RUN/rollouts/       lengths of prompts and answers, latencies, verdicts            ─► RUN/calibration/workload.yaml

`workload.yaml` is an input of `roll simulate` that describes the run, and can be edited. The trainer's times exclude
the first step, which includes one-time costs.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from roll.config.algorithm import AlgorithmConfig
from roll.config.document import dump
from roll.config.inference import InferenceConfig
from roll.config.load import load_run_config
from roll.config.rollout import RolloutConfig
from roll.config.run import RunConfig
from roll.errors import DataError
from roll.inference import get_engine_capabilities
from roll.models import describe_model
from roll.records import read_record
from roll.simulation.costs import compute_train_s
from roll.simulation.fit import EngineFit, fit_engine
from roll.simulation.hardware import Device, MeasuredEngine, Model, load_device
from roll.tracking import RunDirectory, read_untrusted_metrics
from roll.tracking.reading.files import SafeDirectory
from roll.tracking.reading.rollout_files import cast_to_schema, get_arrow_compute, open_rollout_file, parse_file_name
from roll.tracking.rollout_trace import ENGINE_STEPS
from roll.types import EngineStepSpan

__all__ = ["Calibration", "build_measured_device", "calibrate", "read_step_spans", "render_calibration"]

NUM_FORWARD_PASSES = 4.0
"""Compute of an update, in units of a forward pass, as in `SimulatedTrainingConfig.passes`."""
_MODEL_SIZE_FIELDS = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The fitted parameters of a run."""

    fit: EngineFit
    device: Device
    num_updates: int
    train_s: float
    """Median duration of an update, including all other work of a step except generation and sync."""
    train_error: float
    """Mean absolute relative error of the predicted update times."""
    sync_s: float
    reward_s: float
    """Median latency of a reward."""
    paths: tuple[Path, ...]
    """Files that were written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """Durations of one training step of the run, and the lengths of its rollouts."""

    train_s: float
    sync_s: float
    num_tokens: int
    mean_length: float


class _Event(NamedTuple):
    """A trace event, with only the fields needed for calibration."""

    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: Mapping[str, Any] = MappingProxyType({})


class _Rollout(NamedTuple):
    """A rollout, with the number of its tokens instead of the tokens."""

    num_prompt: int
    num_answer: int
    step: int = -1
    draw_id: int = -1
    reward: float = 0.0
    reward_duration_s: float = 0.0
    status: str = ""


def build_measured_device(base: Device, model: Model, tensor_parallel: int, fit: EngineFit) -> Device:
    """Return a copy of the device `base` with the fitted step times of an engine that serves `model`."""
    measured = MeasuredEngine(
        model=model.name,
        tensor_parallel=tensor_parallel,
        curve=fit.curve,
        prefill_token_s=fit.prefill_token_s,
        context_token_s=fit.context_token_s,
    )
    return base.model_copy(update={"measured": measured})


def calibrate(run_path: str | Path, *, base: str = "cpu") -> Calibration:
    """Fit the performance models of engine, trainer and weight sync to a run, and write them to `RUN/calibration/`.

    Args:
        run_path: Directory of the run.
        base: Name of the device that provides memory size, network bandwidth and other quantities that the run does not
            record.

    Raises:
        UserError: The run does not exist, or its trace has too few engine steps.
    """
    with RunDirectory.open(run_path) as run:
        config = load_run_config(run.path)
        spans = read_step_spans(run.trace_path)
        if not spans:
            raise DataError(
                f"'{run.trace_path}' contains no engine steps: calibrate on a run with `inference.engine: vllm` and "
                "`cluster.type: local`, recorded by this version of ROLL."
            )
        rollouts = _read_rollouts(run)
        steps = _build_steps(read_untrusted_metrics(run.metrics_path), rollouts)
        target = run.path / "calibration"
    model = _build_model(config)
    fit = fit_engine(spans)
    found = build_measured_device(load_device(base), model, config.get_section("inference", InferenceConfig).width, fit)
    found, error = _fit_trainer(found, model, steps)
    target.mkdir(exist_ok=True)
    paths = _write_files(target, config, model, found, rollouts, steps)
    latencies = [rollout.reward_duration_s for rollout in rollouts]
    return Calibration(
        fit=fit,
        device=found,
        num_updates=len(steps),
        train_s=statistics.median(step.train_s for step in steps) if steps else 0.0,
        train_error=error,
        sync_s=statistics.median(step.sync_s for step in steps) if steps else 0.0,
        reward_s=statistics.median(latencies) if latencies else 0.0,
        paths=paths,
    )


# ---- reading


def read_step_spans(path: Path) -> list[EngineStepSpan]:
    """Return the spans of engine steps of all engines in a trace.

    Raises:
        DataError: The trace cannot be read.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"trace '{path}' cannot be read: {error}.") from None
    found = (read_record(_Event, event) for event in events)
    return [
        read_record(EngineStepSpan, {**event.args, "began_s": event.ts / 1e6, "duration_s": event.dur / 1e6})
        for event in found
        if event.cat == ENGINE_STEPS
    ]


def _read_rollouts(run: RunDirectory) -> list[_Rollout]:
    """Return the completed rollouts of all training steps.

    Raises:
        DataError: The run has no completed rollouts.
    """
    found: list[_Rollout] = []
    numbers = ("step", "draw_id", "reward", "reward_duration_s", "status")
    lists = {"prompt_token_ids": "num_prompt", "token_ids": "num_answer"}
    inside = SafeDirectory(run.path)
    for name in sorted(inside.list_stamps(run.rollouts_dir.name)):
        if (parse_file_name(name) or (0, ""))[1] != "train":
            continue
        with open_rollout_file(inside, name) as file:
            for portion in file.iter_batches((*numbers, *lists)):
                rows = cast_to_schema(portion.select(numbers)).to_pylist()
                lengths = [
                    get_arrow_compute().list_value_length(portion.column(column)).to_pylist() for column in lists
                ]
                for row, *of_row in zip(rows, *lengths, strict=True):
                    rollout = read_record(_Rollout, row | dict(zip(lists.values(), of_row, strict=True)))
                    if rollout.status == "completed":
                        found.append(rollout)
    if not found:
        raise DataError(
            f"'{run.rollouts_dir}' contains no rollouts: calibrate on a run with `tracking.rollouts` enabled."
        )
    return found


def _build_steps(metrics: Sequence[dict[str, Any]], rollouts: Sequence[_Rollout]) -> list[_Step]:
    """Return the training steps that have rollouts; the first, slower step is omitted if there are other steps."""
    lengths: dict[int, list[int]] = defaultdict(list)
    for rollout in rollouts:
        lengths[rollout.step].append(rollout.num_prompt + rollout.num_answer)
    found = []
    for row in metrics:
        of_step = lengths.get(row["step"], [])
        if row["kind"] != "train" or not of_step:
            continue
        parts = ("train", "old_logprobs", "reference", "values", "snapshots", "train_critic")
        found.append(
            _Step(
                train_s=sum(row.get(f"time/{part}_s") or 0.0 for part in parts),
                sync_s=row.get("time/sync_s") or 0.0,
                num_tokens=sum(of_step),
                mean_length=sum(n * n for n in of_step) / sum(of_step),
            )
        )
    return found[1:] or found


# ---- models


def _build_model(config: RunConfig) -> Model:
    """Return the sizes of the run's model; its name is the name of the model directory."""
    found = describe_model(config.model.path)
    return Model(
        name=Path(config.model.path).name,
        parameters=float(found.num_parameters),
        active_parameters=float(found.num_parameters),
        **{name: getattr(found, name) for name in _MODEL_SIZE_FIELDS},
        element_bytes=2 if config.model.dtype == "bfloat16" else 4,
    )


def _fit_trainer(device: Device, model: Model, steps: Sequence[_Step]) -> tuple[Device, float]:
    """Fit training efficiency and sync overhead to the steps.

    Returns:
        The device with the fitted values, and the mean relative error of predicted update times. Without measured
        updates, the device is unchanged.
    """
    if not steps or not any(step.train_s for step in steps):
        return device, 0.0
    full = device.model_copy(update={"training_efficiency": 1.0})
    ideal = [
        compute_train_s(model, full, 1, step.num_tokens, step.mean_length, passes=NUM_FORWARD_PASSES) for step in steps
    ]
    inverse = sum(i * s.train_s for i, s in zip(ideal, steps, strict=True)) / sum(i * i for i in ideal)
    errors = [abs(i * inverse / s.train_s - 1) for i, s in zip(ideal, steps, strict=True) if s.train_s]
    moved = model.weight_bytes / device.link_bandwidth
    sync = max(0.0, statistics.median(step.sync_s for step in steps) - moved)
    update = {"training_efficiency": 1 / inverse, "sync_overhead_s": sync}
    return device.model_copy(update=update), statistics.fmean(errors)


# ---- writing


def _write_files(
    target: Path,
    config: RunConfig,
    model: Model,
    device: Device,
    rollouts: Sequence[_Rollout],
    steps: Sequence[_Step],
) -> tuple[Path, ...]:
    lines = {
        "prompt-tokens.txt": [rollout.num_prompt for rollout in rollouts],
        "answer-tokens.txt": [rollout.num_answer for rollout in rollouts],
        "reward-seconds.txt": [f"{rollout.reward_duration_s:.6f}" for rollout in rollouts],
    }
    for name, values in lines.items():
        (target / name).write_text("\n".join(map(str, values)) + "\n", encoding="utf-8")
    device_file, model_file, workload_file = (target / f"{name}.yaml" for name in ("device", model.name, "workload"))
    model_file.write_text(dump(model.model_dump(mode="json", exclude={"name"})), encoding="utf-8")
    device_file.write_text(dump(device.model_dump(mode="json", exclude={"name"})), encoding="utf-8")
    workload = _build_workload(config, device_file, model_file, rollouts, len(steps))
    workload_file.write_text(dump(workload), encoding="utf-8")
    return (device_file, model_file, workload_file, *(target / name for name in lines))


def _build_workload(
    config: RunConfig, device: Path, model: Path, rollouts: Sequence[_Rollout], num_steps: int
) -> dict[str, Any]:
    """Return a workload for `roll simulate` that describes the run, with recorded lengths and latencies."""

    def build_recorded(name: str) -> dict[str, str]:
        return {"type": "empirical", "file": str(device.parent / name)}

    solved: dict[int, list[float]] = defaultdict(list)
    for each in rollouts:
        solved[each.draw_id].append(float(each.reward > 0))
    rollout, inference = config.get_section("rollout", RolloutConfig), config.get_section("inference", InferenceConfig)
    overlaps = rollout.scheduling.async_ratio > 0
    width = inference.width
    capacity = inference.kv_cache_bytes
    engine = {
        "tensor_parallel": width,
        "max_num_seqs": inference.max_num_seqs,
        "prefix_block": inference.options.get("block_size", get_engine_capabilities(inference.engine).kv_block_tokens),
        "max_batched_tokens": max(4096, inference.max_num_seqs + 1),
    }
    if capacity is not None:
        num_bytes = 2 if config.model.dtype == "bfloat16" else 4
        per_token = describe_model(config.model.path).compute_kv_bytes_per_token(num_bytes)
        engine |= {"kv_capacity": max(1, capacity // per_token)}
    return {
        "name": f"{config.name}-calibrated",
        "model": str(model),
        "device": str(device),
        "num_steps": max(1, num_steps),
        "placement": {"generation": config.roles["actor_infer"].count * width, "training": 1 if overlaps else 0},
        "engine": engine,
        "rollout": rollout.model_dump(mode="json", exclude={"loop"}, exclude_none=True),
        "prompt_tokens": build_recorded("prompt-tokens.txt"),
        "answer_tokens": build_recorded("answer-tokens.txt"),
        "reward": {
            "latency": build_recorded("reward-seconds.txt"),
            "num_workers": rollout.reward_workers,
            "solve_rate": {"type": "empirical", "values": [statistics.fmean(values) for values in solved.values()]},
            "filter_groups": config.get_section("algorithm", AlgorithmConfig).filters.refill,
        },
        "training": {"passes": NUM_FORWARD_PASSES, "overhead_s": 0.0},
    }


# ---- rendering


def render_calibration(calibration: Calibration) -> str:
    """Format the calibration and its errors relative to the run."""
    fit = calibration.fit
    lines = [
        f"{fit.num_steps} engine steps in {fit.measured_s:.1f} s; the model predicts {fit.fitted_s:.1f} s "
        f"({fit.fitted_s / fit.measured_s - 1:+.1%}), with a mean error of {fit.step_error:.1%} for a span of steps.",
        f"{fit.num_dropped} spans took more than twice as long as predicted, and were dropped.",
        "",
        "requests in a step    steps   measured, s   model",
    ]
    low = 0
    for high, steps, measured, error in fit.by_requests:
        lines.append(f"{f'{low + 1}-{high}':>18} {steps:8} {measured:13.2f} {error:+7.1%}")
        low = high
    curve = ", ".join(f"{requests:g}: {seconds * 1e3:.3g}" for requests, seconds in fit.curve)
    lines += [
        "",
        f"step, ms, by requests: {curve}",
        f"prefill: {fit.prefill_token_s * 1e3:.3g} ms a token; context: {fit.context_token_s * 1e6:.3g} us a token",
        f"update: {calibration.train_s:.3g} s (mean error of the model {calibration.train_error:.1%} over "
        f"{calibration.num_updates}); sync: {calibration.sync_s:.3g} s; reward: {calibration.reward_s:.3g} s",
    ]
    return "\n".join(lines)
