"""Placement of roles on devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import model_validator

from roll.config.base import LABEL_PATTERN, Section, option, path_option
from roll.config.device_classes import ClassName, DeviceClass, find_class_problem
from roll.config.device_numbers import Devices
from roll.config.sharing import SharingRule

__all__ = ["ClusterConfig", "DeviceMapping", "Devices", "ElasticConfig", "RoleDevices"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleDevices:
    """The devices of one role, numbered over the whole cluster, and whether trainer ranks or engines use them."""

    kind: Literal["trainer", "engine"]
    """`trainer`: one rank on each device. `engine`: one engine on every `tensor_parallel` devices."""
    devices: Sequence[int]
    tensor_parallel: int = 1
    wider: tuple[int, ...] = ()
    """Larger values of `tensor_parallel` that other engines of the role have, which use the same devices in turns."""
    section: str = ""
    """Name of the configuration section that has the role's `tensor_parallel`."""
    log_name: str = ""
    """Prefix of an engine's logs, if they have one."""

    @property
    def count(self) -> int:
        """Number of ranks or engines that run at once, at the start."""
        return len(self.devices) // self.tensor_parallel

    @property
    def widths(self) -> tuple[int, ...]:
        """All values of `tensor_parallel`."""
        return (self.tensor_parallel, *self.wider)

    def list_parts(self) -> list[Sequence[int]]:
        """List the devices of every rank or engine: those of the first width, then those of each larger one."""
        return [
            self.devices[first : first + width] for width in self.widths for first in range(0, len(self.devices), width)
        ]


class DeviceMapping(Section):
    """Devices of each role, numbered over the whole cluster. Roles that share devices are colocated; other roles are
    disaggregated.

    A device is one accelerator, or one CPU worker slot on a machine without accelerators. The numbers of trainer ranks
    and of engines follow from this mapping. A pipeline with more roles adds their keys in a subclass.
    """

    actor_train: Devices = option([0], "Devices of the trainer. Each device runs one rank.")
    actor_infer: Devices = option([0], "Devices of the engines. Each engine gets `inference.tensor_parallel` of them.")
    critic: Devices | None = option(
        None, "Devices of every critic. Each device runs one rank. By default, the devices of `actor_train`."
    )
    reference: Devices | None = option(
        None, "Devices of the reference model. Each device runs one rank. By default, the devices of `actor_train`."
    )
    judge: Devices | None = option(
        None,
        "Devices of the run's judge. Each engine gets `judge.tensor_parallel` of them. By default, the first "
        "devices of `actor_infer`.",
    )


class ElasticConfig(Section):
    """Additional engines on Ray nodes that join and leave during a run, such as spot machines.

    These numbers do not include the engines of `cluster.device_mapping.actor_infer`. Trainers and all other roles run
    only on the nodes that the run reserved at its start.
    """

    min_engines: int = option(
        0,
        "Number of elastic engines for which the run waits before its first step. With fewer engines during the run, "
        "it logs a warning and continues.",
        ge=0,
    )
    max_engines: int = option(..., "Maximum number of elastic engines; further nodes are ignored.", ge=1, examples=[4])
    min_engines_timeout_s: float = option(
        600.0,
        "How long the run waits for `min_engines` before its first step; then it starts with the engines it has.",
        unit="s",
        ge=0,
    )
    node_label: str | None = option(
        None,
        "Ray label, as `key=value`, of the nodes that get elastic engines; no other role runs on these nodes. By "
        "default, every node that the run did not reserve gets engines, and the run reserves no node with the label "
        "`ray.io/market-type=spot`.",
        pattern=LABEL_PATTERN,
        examples=["market=spot"],
    )


class ClusterConfig(Section):
    """Processes and devices of the roles: one process (`local`), or a Ray actor per rank and engine (`ray`)."""

    type: Literal["local", "ray"] = option(
        "local", "`local`: roles run in this process. `ray`: each rank and each engine is a Ray actor."
    )
    address: str | None = option(
        None, "Address of the Ray cluster to connect to; by default a private cluster on this machine."
    )
    num_nodes: int = option(1, "Number of machines.", ge=1)
    devices_per_node: int | None = option(
        None, "Number of devices of each machine; by default all detected devices (on a CPU, one per core).", ge=1
    )
    device_mapping: DeviceMapping = option(DeviceMapping(), "Devices of each role.")
    device_classes: dict[ClassName, DeviceClass] = option(
        {},
        "Classes of devices by name, for a cluster with different devices. A data source can prefer a class "
        "(`device_class`). Every device of `device_mapping.actor_infer` must belong to one class.",
        examples=[
            {"h800": {"devices": "0-15", "price_per_hour": 5.0}, "h20": {"devices": "16-31", "price_per_hour": 1.8}}
        ],
    )
    sharing: Literal["auto"] | SharingRule = option(
        "auto",
        "When engines release the devices that they share with trainers. The engines then sleep, and their requests "
        "continue on other engines or wait; while they generate, the trainers' states are in host memory. "
        "`disaggregated`: never. `colocated`: all engines, when a batch is complete. `partial_overlap`: only the "
        "engines that share devices, when a batch is complete. `elastic_overlap`: as `partial_overlap`, but as soon as "
        "the trainer can begin, and only if that saves more time than a switch takes. `stream_training`: in "
        "synchronous runs, only the engines that share devices, when 20 to 95 % of a round have finished and the other "
        "requests fit into the KV cache of the remaining engines; the trainer then computes the gradients of finished "
        "groups. `auto`: on accelerators, the fastest rule in a short simulation if `calibration` is set, otherwise "
        "`colocated` in synchronous runs, and `elastic_overlap` in asynchronous runs in which some engines share no "
        "devices; without accelerators, and if no rule applies, `disaggregated`.",
    )
    calibration: str | None = path_option(
        None,
        "Workload with measured costs, which `roll simulate --calibrate` wrote for a run of this model on the same "
        "devices. `sharing: auto` then takes the rule with the shortest simulated step.",
        examples=["runs/x/calibration/workload.yaml"],
    )
    elastic: ElasticConfig | None = option(
        None,
        "Additional engines on Ray nodes that join and leave during the run; needs `type: ray` and an `address`.",
        examples=[{"max_engines": 4}],
    )

    def find_elastic_problem(self) -> str | None:
        """Return the reason why `elastic` conflicts with another key, and a remedy; `None` without a conflict."""
        if (elastic := self.elastic) is None:
            return None
        if elastic.min_engines > elastic.max_engines:
            return (
                f"cluster.elastic.min_engines must be <= cluster.elastic.max_engines, got {elastic.min_engines} and "
                f"{elastic.max_engines}: lower min_engines, or raise max_engines"
            )
        needs = "cluster.elastic requires a Ray cluster that nodes can join, but"
        if self.type != "ray":
            return (
                f"{needs} cluster.type is {self.type}: set cluster.type to ray and cluster.address to the address of a "
                "cluster, or remove cluster.elastic"
            )
        if not self.address or self.address == "local":
            shown = "null" if self.address is None else self.address or "empty"
            return (
                f"{needs} cluster.address is {shown}, which starts a private cluster: start one with "
                "`ray start --head` and set cluster.address to its address (`auto` on its nodes), or remove "
                "cluster.elastic"
            )
        if self.address.startswith("ray://"):
            return (
                f"cluster.elastic is not supported with Ray Client (cluster.address {self.address}): run `roll train` "
                "on a node of the cluster (or with `ray job submit`), and set cluster.address to auto"
            )
        return None

    @model_validator(mode="after")
    def _check_calibration(self) -> Self:
        if self.calibration is not None and self.sharing != "auto":
            raise ValueError(
                f"calibration {self.calibration} is used only with sharing auto, but sharing is {self.sharing}: remove "
                "one of the two"
            )
        return self

    @model_validator(mode="after")
    def _check_device_classes(self) -> Self:
        if problem := find_class_problem(self.device_classes):
            raise ValueError(problem)
        return self
