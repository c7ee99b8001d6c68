"""Classes of devices, such as `h800` and `h20`, and the class that a data source prefers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator

from roll.config.base import NAME_PATTERN, PATTERN_DESCRIPTIONS, Section, option, path_option
from roll.config.device_numbers import Devices
from roll.config.devices import DEVICES_FILE, Device, load_device, read_shipped_entries
from roll.errors import ConfigError
from roll.registry import did_you_mean

__all__ = [
    "DECODE_HEAVY",
    "MEASURED",
    "PREFERENCES",
    "PREFILL_HEAVY",
    "ClassName",
    "DeviceClass",
    "choose_class",
    "find_class_problem",
    "find_engine_classes",
]

PREFILL_HEAVY, DECODE_HEAVY, MEASURED = "prefill_heavy", "decode_heavy", "measured"
PREFERENCES = (PREFILL_HEAVY, DECODE_HEAVY, MEASURED)
"""Preferences that do not name a class."""


def _check_class_name(name: object) -> object:
    if name in PREFERENCES:
        raise ValueError(f"'{name}' is a preference of a data source and cannot name a class: choose another name")
    if isinstance(name, str) and not re.match(NAME_PATTERN, name):
        raise ValueError(f"'{name}' must be a name {PATTERN_DESCRIPTIONS[NAME_PATTERN]}")
    return name


ClassName: TypeAlias = Annotated[str, BeforeValidator(_check_class_name)]


class DeviceClass(Section):
    """A class of equal devices."""

    devices: Devices = option(..., "Devices of the class, numbered over the whole cluster.", examples=["0-15"])
    price_per_hour: float | None = option(
        None, "Price of one device per hour, in any currency; either all classes have a price or none.", gt=0
    )
    device: str | None = path_option(
        None,
        "Name of the device or a YAML file that describes it, as in a workload of `roll simulate`; by default the name "
        "of the class. `prefill_heavy` and `decode_heavy` need to know the device.",
        examples=["h800"],
    )
    accelerator_type: str | None = option(
        None,
        "Ray's accelerator type of the machines of the class, such as `H800`, for a cluster with different machines. "
        "By default, Ray decides which machines provide which device numbers.",
        examples=["H800"],
    )


def find_class_problem(classes: Mapping[str, DeviceClass]) -> str:
    """Return an error message if classes share a device or only some have a price, otherwise an empty string."""
    by_device: dict[int, str] = {}
    for name, device_class in classes.items():
        for device in device_class.devices:
            if (other := by_device.setdefault(device, name)) != name:
                return f"device {device} is in the device_classes {other} and {name}: list each device in one class"
    priced = [name for name, each in classes.items() if each.price_per_hour is not None]
    missing = [name for name in classes if name not in priced]
    if not priced or not missing:
        return ""
    return (
        f"device_classes.{missing[0]} has no price_per_hour, but device_classes.{priced[0]} has one: set the prices of "
        "all classes, or of none"
    )


def choose_class(preference: str, classes: Mapping[str, tuple[str, float | None]], key: str, classes_key: str) -> str:
    """Return the class that a data source prefers: the name of a class, or `measured`.

    Args:
        preference: `prefill_heavy`, `decode_heavy`, `measured`, or the name of a class.
        classes: Device name and price of each class.
        key: Key of the preference, for messages.
        classes_key: Key of the classes, for messages.

    Raises:
        ValueError: There are no classes, the class does not exist, or the device of a class is not known.
    """
    if not classes:
        raise ValueError(
            f"{key} is {preference}, but the run has no device classes: define them in {classes_key}, or remove the key"
        )
    if preference == MEASURED or preference in classes:
        return preference
    if preference not in PREFERENCES:
        hint = did_you_mean(preference, [*classes, *PREFERENCES])
        known = ", ".join([*classes, *PREFERENCES])
        raise ValueError(f"{key} '{preference}' is not a class in {classes_key}.{hint} Choose one of: {known}")
    rates: dict[str, float] = {}
    for name, (device_name, price) in classes.items():
        device = _load_class_device(device_name, preference, f"{classes_key}.{name}.device", key)
        compute = device.flops * device.compute_efficiency
        bandwidth = device.memory_bandwidth * device.bandwidth_efficiency
        rates[name] = (compute if preference == PREFILL_HEAVY else bandwidth) / (price or 1.0)
    return max(rates, key=rates.__getitem__)


def _load_class_device(name: str, preference: str, device_key: str, key: str) -> Device:
    known = read_shipped_entries(DEVICES_FILE)
    if name not in known and Path(name).suffix not in {".yaml", ".yml"}:
        raise ValueError(
            f"{key} {preference} needs the rates of every device class, but {device_key} '{name}' is not known: set it "
            f"to one of {', '.join(known)}, or to a YAML file that describes the device, or prefer a class by its name"
        )
    try:
        return load_device(name)
    except ConfigError as error:
        raise ValueError(f"{device_key}: {str(error).rstrip('.')}") from None


def find_engine_classes(
    devices: Sequence[int],
    width: int,
    classes: Mapping[str, Sequence[int]],
    *,
    devices_key: str = "cluster.device_mapping.actor_infer",
    classes_key: str = "cluster.device_classes",
    width_key: str = "inference.tensor_parallel",
) -> list[str]:
    """Return the class of every engine.

    Args:
        devices: Devices of all engines, in order.
        width: Number of devices of an engine.
        classes: Devices of each class.
        devices_key: Key of the devices, for messages.
        classes_key: Key of the classes, for messages.
        width_key: Key of the width, for messages.

    Raises:
        ValueError: A device belongs to no class, or an engine has devices of several classes.
    """
    by_device = {device: name for name, numbers in classes.items() for device in numbers}
    found: list[str] = []
    for first in range(0, len(devices), width):
        own = devices[first : first + width]
        for device in own:
            if device not in by_device:
                raise ValueError(
                    f"{devices_key} names device {device}, which belongs to no class in {classes_key}: add it to the "
                    "`devices` of a class"
                )
        names = list(dict.fromkeys(by_device[device] for device in own))
        if len(names) > 1:
            raise ValueError(
                f"engine {first // width} has the devices {', '.join(map(str, own))} of the classes "
                f"{' and '.join(names)}, but an engine needs devices of one class: align {devices_key} and "
                f"{classes_key} with {width_key} {width}"
            )
        found.append(names[0])
    return found
