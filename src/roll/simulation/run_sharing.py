"""`cluster.sharing: auto` of a run whose costs were measured: the rule with the shortest simulated step."""

from __future__ import annotations

from roll.cluster.base import count_accelerators
from roll.config.reinforcement_run import ReinforcementRunConfig
from roll.config.rollout_run import RolloutRunConfig
from roll.config.run import RunConfig
from roll.config.simulation import SimulationConfig, load_simulation
from roll.pipelines.colocation import resolve_sharing_rule
from roll.simulation.hardware import load_device, load_model_sizes
from roll.simulation.memory import TrainerSettings, compute_switch_s
from roll.simulation.sharing_choice import choose_sharing_rule

__all__ = ["build_run_simulation", "resolve_run_sharing"]


def resolve_run_sharing(config: RunConfig, *, accelerated: bool | None = None) -> tuple[RunConfig, str]:
    """Return the configuration with the rule that `cluster.sharing: auto` takes, and a line that describes the choice.

    Without `cluster.calibration`, and if the rule is `disaggregated` in any case, the configuration is returned as it
    is, with an empty line.

    Args:
        config: Configuration of a run.
        accelerated: Whether the run's devices are accelerators; by default, this machine is inspected.

    Raises:
        ConfigError: `cluster.calibration` cannot be read, or was measured for another model or engine.
    """
    cluster = config.cluster
    if not isinstance(config, RolloutRunConfig) or cluster.sharing != "auto" or cluster.calibration is None:
        return config, ""
    simulated = build_run_simulation(config, cluster.calibration)
    accelerated = count_accelerators() > 0 if accelerated is None else accelerated
    if simulated is None or resolve_sharing_rule(config, accelerated=accelerated) == "disaggregated":
        return config, ""
    can_stream = isinstance(config, ReinforcementRunConfig) and not config.find_streaming_problem()
    trainer = TrainerSettings(model=config.model, training=config.training, can_stream=can_stream)
    model, device = load_model_sizes(simulated.model), load_device(simulated.training_device)
    switch_s = compute_switch_s(simulated, model, device, trainer)
    simulated = simulated.with_changes({"placement.switch_s": switch_s}, cluster.calibration)
    choice = choose_sharing_rule(simulated, can_stream=can_stream)
    resolved = cluster.model_copy(update={"sharing": choice.rule, "calibration": None})
    line = f"cluster.sharing auto: {choice.describe()}, with the costs of {cluster.calibration}"
    return config.model_copy(update={"cluster": resolved}), line


def build_run_simulation(config: RolloutRunConfig, calibration: str) -> SimulationConfig | None:
    """Return the simulation of a run with the lengths, latencies and costs of a calibrated workload.

    `None` if the trainer also uses devices without engines, because such placements are not simulated.

    Raises:
        ConfigError: The workload cannot be read, or does not fit the run.
    """
    base = load_simulation(calibration)
    engines, trainer = config.roles["actor_infer"], config.roles["actor_train"]
    shared = set(trainer.devices) & set(engines.devices)
    if shared != set(trainer.devices):
        return None
    training = len(config.find_shared_engines()) * engines.tensor_parallel
    placement = {
        "generation": len(engines.devices),
        "training": 0 if training == len(engines.devices) else training,
        "sharing": "auto",
        "switch_s": base.placement.switch_s,
    }
    rollout = config.rollout.model_dump(mode="json", exclude={"loop", "agent", "episodes"})
    changes = {
        "placement": placement,
        "rollout": rollout,
        "engine.tensor_parallel": engines.tensor_parallel,
        "engine.max_num_seqs": config.inference.max_num_seqs,
    }
    return base.with_changes(changes, calibration)
