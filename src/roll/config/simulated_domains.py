"""Domains of simulated prompts, and the classes of the devices that generate their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roll.config.base import Section, option
from roll.config.device_classes import (
    DeviceClass,
    choose_class,
    find_class_problem,
    find_engine_classes,
)
from roll.config.distributions import DistributionConfig
from roll.config.simulated_placement import SimulatedPlacement
from roll.config.simulated_roles import EnvironmentLatencyConfig

__all__ = ["SimulatedDomain", "choose_domain_classes", "find_simulated_classes"]


class SimulatedDomain(Section):
    """A domain: a part of the prompts, with its own lengths, environment and device class."""

    weight: float = option(1.0, "Weight of the domain; prompts are drawn in proportion to the weights.", gt=0)
    prompt_tokens: DistributionConfig | None = option(None, "Length of prompts; by default that of the workload.")
    answer_tokens: DistributionConfig | None = option(
        None, "Length of answers, or of turns; by default that of the workload."
    )
    environment: EnvironmentLatencyConfig | None = option(
        None, "Environment, for rollouts of several turns; by default that of the workload."
    )
    device_class: str | None = option(
        None,
        "Class in `device_classes` whose engines generate the answers of this domain, or `prefill_heavy`, "
        "`decode_heavy` or `measured`, as in a data source of a run. By default, all engines are used equally.",
    )


def find_simulated_classes(
    classes: Mapping[str, DeviceClass], placement: SimulatedPlacement, width: int
) -> tuple[list[str], str]:
    """Return the class of every engine, and the class of the trainer.

    Engines use the devices from 0; the trainer uses the last devices.

    Raises:
        ValueError: Classes overlap, a device belongs to no class or does not exist, or the devices of an engine or of
            the trainer belong to several classes.
    """
    if problem := find_class_problem(classes):
        raise ValueError(problem)
    total = placement.num_devices
    by_device = {device: name for name, each in classes.items() for device in each.devices}
    for device in sorted(by_device):
        if device >= total:
            raise ValueError(
                f"device_classes.{by_device[device]}.devices contains device {device}, but placement has only {total} "
                f"devices, 0 to {total - 1}: correct the numbers"
            )
    for device in range(total):
        if device not in by_device:
            raise ValueError(
                f"device {device} of {total} belongs to no class in device_classes: add it to the `devices` of a class"
            )
    names = list(dict.fromkeys(by_device[d] for d in range(total - placement.num_training_devices, total)))
    if len(names) > 1:
        raise ValueError(
            f"the trainer's devices {total - placement.num_training_devices}-{total - 1} belong to the classes "
            f"{' and '.join(names)}, but training is simulated on devices of one class: set placement.training to the "
            "number of devices of one class, and give this class the last devices"
        )
    numbers: dict[str, Sequence[int]] = {name: each.devices for name, each in classes.items()}
    engines = find_engine_classes(
        range(placement.generation),
        width,
        numbers,
        devices_key="placement.generation",
        classes_key="device_classes",
        width_key="engine.tensor_parallel",
    )
    return engines, names[0]


def choose_domain_classes(
    domains: Mapping[str, SimulatedDomain], classes: Mapping[str, DeviceClass], engine_classes: Sequence[str]
) -> dict[str, str]:
    """Return the preferred class of each domain that prefers one, or `measured`.

    Raises:
        ValueError: The preference is not a class, or the class has no engine.
    """
    generating = {
        name: (each.device or name, each.price_per_hour) for name, each in classes.items() if name in engine_classes
    }
    return {
        name: choose_class(domain.device_class, generating, f"domains.{name}.device_class", "device_classes")
        for name, domain in domains.items()
        if domain.device_class is not None
    }
