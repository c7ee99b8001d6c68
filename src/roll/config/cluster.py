"""Where roles run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from roll.config.base import Section, option

__all__ = ["ClusterConfig", "DeviceMapping", "parse_devices"]


def parse_devices(value: Any) -> list[int]:
    """`"0-3,6"`, `2` or `[0, 1]` as a sorted list of device numbers."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, str):
        devices: list[int] = []
        for part in value.replace(" ", "").split(","):
            first, dash, last = part.partition("-")
            if not first.isdigit() or (dash and not last.isdigit()):
                raise ValueError(f"'{value}' is not a list of devices: write '0-3', '0,2' or [0, 1]")
            devices += range(int(first), int(last or first) + 1)
        value = devices
    if not isinstance(value, list) or not value or any(not isinstance(d, int) or d < 0 for d in value):
        raise ValueError(f"{value!r} is not a list of devices: write '0-3', '0,2' or [0, 1]")
    if len(set(value)) != len(value):
        raise ValueError(f"{value} names a device twice")
    return sorted(value)


class DeviceMapping(Section):
    """Devices of each role over the whole cluster. Shared devices: colocated; separate ones: disaggregated.

    A device is one accelerator, or one CPU worker slot where there is none. The number of trainer ranks and
    of engines follows from it.
    """

    actor_train: list[int] = option([0], "Devices of the trainer: one rank each.")
    actor_infer: list[int] = option([0], "Devices of the engines: `inference.tensor_parallel` each.")
    critic: list[int] | None = option(
        None, "Devices of every critic: one rank each; by default those of `actor_train`."
    )
    reference: list[int] | None = option(
        None, "Devices of the reference: one rank each; by default those of `actor_train`."
    )
    judge: list[int] | None = option(
        None,
        "Devices of the run's own judge: `judge.tensor_parallel` for each engine; by default the first of "
        "`actor_infer`.",
    )

    @field_validator("actor_train", "actor_infer", mode="before", json_schema_input_type=list[int] | int | str)
    @classmethod
    def _devices(cls, value: Any) -> Any:
        return parse_devices(value)

    @field_validator("critic", "reference", "judge", mode="before", json_schema_input_type=list[int] | int | str | None)
    @classmethod
    def _optional_devices(cls, value: Any) -> Any:
        return None if value is None else parse_devices(value)

    def devices(self, role: str) -> list[int]:
        """Of a role: `actor_train`, `actor_infer`, `critic`, `reference`; of a judge: `RLVRConfig.judge_devices`."""
        named = getattr(self, role)
        return self.actor_train if named is None else named


class ClusterConfig(Section):
    """`local` runs in this process; `ray` runs one actor per rank and engine, on one machine or many."""

    type: Literal["local", "ray"] = option("local", "Where work runs.")
    address: str | None = option(None, "Ray cluster to join; by default a private one on this machine.")
    num_nodes: int = option(1, "Machines.", ge=1)
    devices_per_node: int | None = option(
        None, "Devices of each machine; by default what is found (CPU: one per core).", ge=1
    )
    device_mapping: DeviceMapping = option(DeviceMapping(), "Devices of each role.")

    @model_validator(mode="after")
    def _local_runs_one_rank(self) -> ClusterConfig:
        for role in ("critic", "reference", "judge"):
            devices = getattr(self.device_mapping, role)
            if self.type == "local" and devices not in (None, [0]):
                raise ValueError(
                    f"device_mapping.{role} names devices {devices}, but type local runs it on device 0 alone: "
                    "set type: ray, or leave it out"
                )
        return self
