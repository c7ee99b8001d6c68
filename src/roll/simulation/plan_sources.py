"""Read the input of `roll plan`: a workload, a run's configuration, or only a model. Defaults replace missing parts.

    workload YAML ───────────────────────────────► SimulationConfig
    run YAML ─ model, rollout, training, devices ─► SimulationConfig + assumed lengths and latencies
    config.json, directory, hub id, known name ───► SimulationConfig + an assumed workload

Every number that affects a plan is listed as a `Constant` with its origin: given, measured, published or assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.config.document import read
from roll.config.load import load_config
from roll.config.reinforcement_run import ReinforcementRunConfig
from roll.config.rollout_run import RolloutRunConfig
from roll.config.run import RunConfig
from roll.config.simulation import SimulationConfig, load_simulation
from roll.config.supervised import SupervisedConfig
from roll.errors import ConfigError, ModelError
from roll.preflight.machine import inspect_machine
from roll.registry import format_search_directory
from roll.simulation.data_lengths import measure_examples, measure_prompts
from roll.simulation.experts import choose_expert_parallel
from roll.simulation.hardware import Device, Model, is_known_model, load_device, load_model_sizes
from roll.simulation.memory import TrainerSettings, find_memory_problem

__all__ = ["Constant", "PlanSource", "read_plan_source"]

DEFAULT_DEVICE = "h100"
ASSUMED_PROMPT_TOKENS = 512.0
ASSUMED_ENVIRONMENT_S = 0.1
"""Assumed latency of an environment's turn, in seconds."""
ASSUMED_EXAMPLE_TOKENS = 512
MAX_DEVICES = 4096
ASSUMED_WORKLOAD = {"prompts_per_step": 128, "group_size": 8, "max_new_tokens": 8192}
_DEVICE_FIELDS = (
    ("flops", "FLOP/s"),
    ("memory_bandwidth", "B/s"),
    ("memory_bytes", "B"),
    ("link_bandwidth", "B/s"),
    ("network_bandwidth", "B/s"),
    ("host_bandwidth", "B/s"),
    ("compute_efficiency", "of the peak"),
    ("bandwidth_efficiency", "of the peak"),
    ("training_efficiency", "of the peak"),
    ("step_overhead_s", "s"),
    ("request_overhead_s", "s"),
    ("collective_latency_s", "s"),
    ("sync_overhead_s", "s"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A number that affects a plan."""

    name: str
    value: str
    origin: str
    """`given`, `measured`, `published` or `assumed`, with its source."""


_PASSES_ORIGIN = (
    "given: an update is 3, or 4 with activation checkpointing; log-probs of the policy or the reference are 1 each"
)
_REWARD_LATENCY = Constant(name="latency of rewards", value="0 s", origin="assumed")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSource:
    """The input of a plan."""

    config: SimulationConfig
    constants: tuple[Constant, ...]
    trainer: TrainerSettings | None = None
    """Settings of the trainer, if the source is a run."""
    examples_per_step: int | None = None
    """Number of examples per step, for a run without generation."""


def read_plan_source(
    source: str, overrides: Sequence[str] = (), *, device_name: str | None = None, num_devices: int | None = None
) -> PlanSource:
    """Read a workload, a run or a model as the input of a plan.

    Args:
        source: A workload's or a run's YAML file, a known model, a config.json, a model directory, or a hub id.
        overrides: `key=value` overrides of the file, or of the assumed workload if the source is a model.
        device_name: Replaces the device of the source or of this machine.
        num_devices: Replaces the number of devices of the source; all roles share them.

    Raises:
        ConfigError: The file is neither a workload nor a run, or a device or a key is unknown.
        ModelError: The model's config.json cannot be found or read.
    """
    if num_devices is not None and not 1 <= num_devices <= MAX_DEVICES:
        raise ConfigError(f"--devices must be between 1 and {MAX_DEVICES:,}, got {num_devices}.")
    if Path(source).suffix in {".yaml", ".yml"} and not is_known_model(source):
        tree = read(source).tree
        if "device" in tree and "data" not in tree:
            return _read_workload(source, overrides, device_name, num_devices)
        if "num_layers" not in tree:
            return _read_run(load_config(source, overrides), Path(source), device_name, num_devices)
    return _read_model(source, overrides, device_name, num_devices)


def _read_workload(
    source: str, overrides: Sequence[str], device_name: str | None, num_devices: int | None
) -> PlanSource:
    changes = [*overrides]
    changes += [f"device={device_name}"] if device_name else []
    changes += [f"placement={{generation: {num_devices}, training: 0}}"] if num_devices else []
    config = load_simulation(source, changes)
    if config.device_classes:
        raise ConfigError(f"'{source}' has device_classes, which `roll plan` does not support: use `roll simulate`.")
    constants = (
        Constant(name="model", value=config.model, origin=f"given: {source}; {_describe_model_origin(config.model)}"),
        Constant(name="lengths, latencies, batch", value="as in the file", origin=f"given: {source}"),
        *_list_update_constants(config, *2 * [f"given: {source}, or the default of a workload"]),
        *_list_device_constants(load_device(config.device)),
    )
    return PlanSource(config=config, constants=constants)


def _read_run(config: RunConfig, file: Path, device_name: str | None, num_devices: int | None) -> PlanSource:
    name, constants = _find_run_model(config, file)
    device, origin = (device_name, "given: --device") if device_name else _choose_local_device()
    devices = num_devices or len({d for role in config.roles.values() for d in role.devices})
    device_origin = origin if num_devices is None else "given: --devices"
    constants += [Constant(name="device", value=f"{devices} x {device}", origin=device_origin)]
    can_stream = isinstance(config, ReinforcementRunConfig) and not config.find_streaming_problem()
    trainer = TrainerSettings(model=config.model, training=_get_training(config), can_stream=can_stream)
    base: dict[str, Any] = {"name": config.name, "model": name, "device": device, "placement": {"generation": devices}}
    if isinstance(config, RolloutRunConfig):
        workload, assumed = _build_workload(config, name)
        found = SimulationConfig.model_validate(base | workload)
        constants += [*assumed, *_list_update_constants(found, _PASSES_ORIGIN)]
        constants += _list_device_constants(load_device(device))
        return PlanSource(config=found, trainer=trainer, constants=tuple(constants))
    if not isinstance(config, SupervisedConfig):
        raise ConfigError(f"'{file}' runs the pipeline {config.pipeline}, which `roll plan` does not support.")
    lengths = measure_examples(config, name)
    assumed_length = min(config.training.max_example_tokens or ASSUMED_EXAMPLE_TOKENS, ASSUMED_EXAMPLE_TOKENS)
    tokens = {"type": "empirical", "values": lengths} if lengths else _build_fixed_value(assumed_length)
    longest = round(max(lengths, default=assumed_length))
    rollout = {"prompts_per_step": config.training.examples_per_step, "group_size": 1, "max_new_tokens": longest}
    training = {"passes": 3.0 + trainer.training.activation_checkpointing, "overhead_s": 0.1}
    workload = {"rollout": rollout, "training": training, "answer_tokens": tokens}
    workload["prompt_tokens"] = _build_fixed_value(0)
    found = SimulationConfig.model_validate(base | workload)
    value = f"mean {sum(lengths) / len(lengths):.0f}" if lengths else f"{assumed_length}"
    origin = f"measured: {len(lengths)} examples of the data" if lengths else "assumed"
    assumed = [Constant(name="tokens of an example", value=value, origin=origin)]
    return PlanSource(
        config=found,
        trainer=trainer,
        constants=(
            *constants,
            *assumed,
            *_list_update_constants(found, _PASSES_ORIGIN),
            *_list_device_constants(load_device(device)),
        ),
        examples_per_step=config.training.examples_per_step,
    )


def _read_model(source: str, overrides: Sequence[str], device_name: str | None, num_devices: int | None) -> PlanSource:
    model, device = load_model_sizes(source), load_device(device_name or DEFAULT_DEVICE)
    tree: dict[str, Any] = {
        "name": "plan",
        "model": source,
        "device": device_name or DEFAULT_DEVICE,
        "placement": {"generation": num_devices or 1},
        "rollout": ASSUMED_WORKLOAD,
        "prompt_tokens": _build_fixed_value(ASSUMED_PROMPT_TOKENS),
        "answer_tokens": _build_assumed_answers(ASSUMED_WORKLOAD["max_new_tokens"]),
    }
    config = SimulationConfig.model_validate(tree).with_overrides(overrides)
    origin = "given: --devices"
    if num_devices is None:
        config, origin = _find_smallest_placement(config, model, device), "assumed: the smallest power of two that fits"
    constants = (
        Constant(name="model", value=_format_sizes(model), origin=_describe_model_origin(source)),
        Constant(name="device", value=f"{config.placement.num_devices} x {device.name}", origin=origin),
        Constant(name="rollouts of a step", value=_format_batch(config), origin=_describe_workload_origin(overrides)),
        _build_prompt_constant([]),
        _build_answer_constant(config, "set answer_tokens, as in a workload for `roll simulate`"),
        _REWARD_LATENCY,
        *_list_update_constants(config, "assumed"),
        *_list_device_constants(device),
    )
    return PlanSource(config=config, constants=constants)


def _build_workload(config: RolloutRunConfig, model_name: str) -> tuple[dict[str, Any], list[Constant]]:
    """Convert a run with rollouts to a workload, and return it with the constants that describe it."""
    rollout, turns = config.rollout, max(entry.turns for entry in config.data)
    lengths = measure_prompts(config, model_name)
    assumed = _build_fixed_value(ASSUMED_PROMPT_TOKENS)
    tree: dict[str, Any] = {
        "rollout": rollout.model_dump(mode="json", exclude={"loop", "agent", "episodes"}),
        "engine": {"tensor_parallel": 1, "max_num_seqs": config.inference.max_num_seqs, "prefix_block": 16},
        "prompt_tokens": {"type": "empirical", "values": lengths} if lengths else assumed,
        "answer_tokens": _build_assumed_answers(rollout.max_new_tokens),
        "training": {
            "passes": _count_passes(config),
            "quantization": config.sent_quantization,
            "share_prefix": config.training.share_prefix,
        },
    }
    tree["rollout"]["scheduling"]["async_ratio"] = 0.0  # chosen by the plan
    tree["engine"]["max_batched_tokens"] = max(8192, 2 * config.inference.max_num_seqs)
    if turns > 1:
        tree["environment"] = {"num_turns": turns, "latency": _build_fixed_value(ASSUMED_ENVIRONMENT_S)}
    partial = SimulationConfig.model_validate({"name": "x", "model": "x", "device": "cpu", **tree})
    constants = [
        Constant(name="rollouts of a step", value=_format_batch(partial), origin="given: the run's rollout section"),
        _build_prompt_constant(lengths),
        _build_answer_constant(partial, "`roll simulate --calibrate RUN` measures them in a run"),
        _REWARD_LATENCY,
    ]
    if partial.environment is not None:
        value = f"{ASSUMED_ENVIRONMENT_S:g} s, {partial.environment.observation_tokens} tokens"
        constants.append(Constant(name="an environment's turn", value=value, origin="assumed"))
    if rollout.agent is not None:
        constants.append(
            Constant(name="an agent's work", value="one request, 0 s", origin="assumed: not configured or measured")
        )
    elif rollout.loop is not None:
        constants.append(Constant(name="work of rollout.loop", value="one request, 0 s", origin="assumed"))
    return tree, constants


def _count_passes(config: RolloutRunConfig) -> float:
    """Return the compute per token of a step, in forward passes of the model.

    An update is equivalent to 3 forward passes (4 with activation checkpointing), and log-probs of the policy or the
    reference to 1 each.
    """
    algorithm = getattr(config, "algorithm", None)
    updates = getattr(algorithm, "updates", None) or getattr(config, "updates", None)
    epochs, parts = (updates.num_epochs, updates.num_minibatches) if updates is not None else (1, 1)
    log_probs = (epochs * parts > 1) + ("reference" in config.roles)
    return (3.0 + config.training.activation_checkpointing) * epochs + log_probs


def _get_training(config: RunConfig) -> Any:
    if isinstance(config, RolloutRunConfig | SupervisedConfig):
        return config.training
    raise ConfigError(f"the pipeline {config.pipeline} does not train: `roll plan` supports only pipelines that train.")


def _find_run_model(config: RunConfig, file: Path) -> tuple[str, list[Constant]]:
    """Return the name or path of the model of a run, and the constant that describes it.

    If the run starts from the result of another run that does not exist yet, the other run's initial model is returned.

    Raises:
        ModelError: The model does not exist, and no configuration next to `file` produces it.
    """
    path, chain = config.model.path, [config]
    while _is_missing_run(path):
        earlier = _find_producing_run(path, file.parent)
        if earlier is None or earlier in chain:
            raise ModelError(
                f"model '{path}' does not exist{format_search_directory(path)}: train the run that writes the model "
                "first, or specify a model of the same size with model=NAME."
            )
        chain.append(earlier)
        path = earlier.model.path
    origin = _describe_model_origin(path)
    if len(chain) > 1:
        origin = f"assumed: '{config.model.path}' does not exist yet, and '{chain[-1].name}' starts from this model"
    return path, [Constant(name="model", value=_format_sizes(load_model_sizes(path)), origin=origin)]


def _is_missing_run(path: str) -> bool:
    return path.startswith("runs/") and not Path(path).exists()


def _find_producing_run(path: str, directory: Path) -> RunConfig | None:
    """Return the first configuration in `directory` with the run directory `path`; `None` if there is none."""
    for file in sorted(directory.glob("*.yaml")):
        try:
            config = load_config(file)
        except ConfigError:
            continue
        if config.run_dir == Path(path):
            return config
    return None


def _describe_workload_origin(overrides: Sequence[str]) -> str:
    given = [text.partition("=")[0] for text in overrides if text.startswith("rollout.")]
    return f"given: {', '.join(given)}" if given else "assumed: change it with overrides such as rollout.group_size=16"


def _find_smallest_placement(config: SimulationConfig, model: Model, device: Device) -> SimulationConfig:
    count, why = 1, ""
    while count <= MAX_DEVICES:
        for width in (w for w in (1, 2, 4, 8, 16, 32) if count % w == 0):
            tried = config.with_changes({"placement.generation": count, "engine.tensor_parallel": width})
            experts = choose_expert_parallel(tried, model, device)
            if experts:
                tried = tried.with_changes({"training.expert_parallel": experts[0].size})
            why = find_memory_problem(tried, model, device)
            if not why:
                return config.with_changes({"placement.generation": count})
        count *= 2
    raise ConfigError(f"{model.name} does not fit on {MAX_DEVICES:,} x {device.name}: {why}.")


def _choose_local_device() -> tuple[str, str]:
    """Return the name of the default device, and the origin of this choice."""
    if not inspect_machine().has_accelerators:
        return "cpu", "given: this machine has no accelerator; plan for others with --device h100 --devices 8"
    return DEFAULT_DEVICE, "assumed: specify the accelerator with --device"


def _list_update_constants(config: SimulationConfig, passes: str, overhead: str = "assumed") -> list[Constant]:
    """Return the constants, other than the device's, that determine how long an update takes.

    Args:
        config: The workload.
        passes: Where the number of forward passes comes from, such as `assumed` or `measured`.
        overhead: Where the overhead of an update comes from.
    """
    training = config.training
    if training.duration is not None:
        return []
    return [
        Constant(name="compute of an update", value=f"{training.passes:g} forward passes a token", origin=passes),
        Constant(name="overhead of an update", value=f"{training.overhead_s:g} s", origin=overhead),
    ]


def _list_device_constants(device: Device) -> list[Constant]:
    """Return the constants of a device, including measured step times if it was calibrated."""
    found = []
    for field, unit in [each for each in _DEVICE_FIELDS if getattr(device, each[0]) is not None]:
        value = f"{getattr(device, field):.4g} {unit}"
        origin = device.sources.get(field, f"given: the description of {device.name}")
        found.append(Constant(name=f"{device.name}.{field}", value=value, origin=origin))
    if device.measured is not None:
        origin = "measured: roll simulate --calibrate"
        found.append(
            Constant(name=f"{device.name}.measured", value=f"{len(device.measured.curve)} points", origin=origin)
        )
    return found


def _describe_model_origin(name: str) -> str:
    if is_known_model(name):
        return "published: the model's config.json"
    if Path(name).suffix in {".yaml", ".yml"}:
        return f"given: {name}"
    return "given: the model's config.json, or the headers of its weight files"


def _format_sizes(model: Model) -> str:
    total = f"{model.parameters / 1e9:.3g} B parameters"
    if not model.num_experts:
        return f"{total}, {model.num_layers} layers"
    return (
        f"{total}, {model.active_parameters / 1e9:.3g} B active, {model.num_layers} layers, "
        f"{model.experts_per_token} of {model.num_experts} experts per token"
    )


def _format_batch(config: SimulationConfig) -> str:
    rollout = config.rollout
    return f"{rollout.prompts_per_step} x {rollout.group_size}, up to {rollout.max_new_tokens:,} tokens"


def _build_prompt_constant(lengths: Sequence[float]) -> Constant:
    if not lengths:
        return Constant(name="prompt length", value=f"{ASSUMED_PROMPT_TOKENS:g} tokens", origin="assumed")
    value = f"mean {sum(lengths) / len(lengths):.0f} tokens"
    return Constant(name="prompt length", value=value, origin=f"measured: {len(lengths)} prompts of the data")


def _build_answer_constant(config: SimulationConfig, remedy: str) -> Constant:
    limit = config.rollout.max_new_tokens
    value = f"median {max(1, limit // 8):,}, 1 in 1,000 at {limit:,} tokens"
    return Constant(name="answer length", value=value, origin=f"assumed; {remedy}")


def _build_assumed_answers(limit: int) -> dict[str, Any]:
    """Return a distribution of answer lengths: the median is an eighth of `limit`, and 1 in 1,000 reaches `limit`."""
    return {"type": "quantiles", "points": [[0.5, max(1, limit / 8)], [0.999, max(1, limit)]], "max": max(1, limit)}


def _build_fixed_value(value: float) -> dict[str, Any]:
    return {"type": "fixed", "value": float(value)}
