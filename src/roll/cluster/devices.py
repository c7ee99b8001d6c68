"""The device mapping, resolved: the machine and the devices of each rank and each engine. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll.config.pipelines.rlvr import RLVRConfig
from roll.errors import PlacementError

__all__ = ["Placement", "Seat", "place"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Where one rank or engine sits."""

    node: int
    """0 … num_nodes - 1."""
    local_devices: tuple[int, ...]
    """Device numbers on that machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Seats of every role."""

    num_nodes: int
    devices_per_node: int
    trainer: tuple[Seat, ...]
    """By rank; so for the next two."""
    critic: tuple[Seat, ...]
    """Of every critic: several share devices."""
    reference: tuple[Seat, ...]
    engines: tuple[Seat, ...]
    """By engine; so for the next."""
    judge: tuple[Seat, ...] = ()

    def seats(self, role: str) -> tuple[Seat, ...]:
        """Of a role in the words of the device mapping, or of a trainer's spec (`policy`)."""
        roles = {"critic": self.critic, "reference": self.reference, "actor_infer": self.engines, "judge": self.judge}
        return roles.get(role, self.trainer)

    @property
    def workers_on_first_node(self) -> int:
        """Ranks and engines of node 0; on a CPU they share its cores."""
        return sum(seat.node == 0 for seat in (*self.trainer, *self.engines, *self.judge))


def place(config: RLVRConfig, devices_per_node: int) -> Placement:
    """Resolve the device mapping.

    Args:
        devices_per_node: what each machine has.

    Raises:
        PlacementError: a device number is beyond the cluster's, or an engine would span machines.
    """
    total = config.cluster.num_nodes * devices_per_node
    mapping = config.cluster.device_mapping
    by_role = {role: mapping.devices(role) for role in ("actor_train", "actor_infer", "critic", "reference")}
    for role, devices in (by_role | {"judge": config.judge_devices}).items():
        beyond = [device for device in devices if device >= total]
        if beyond:
            raise PlacementError(
                f"cluster.device_mapping.{role} names device {beyond[0]}, but {config.cluster.num_nodes} x "
                f"{devices_per_node} devices are numbered 0-{total - 1}: change the mapping, or set "
                "cluster.num_nodes and cluster.devices_per_node to what there is."
            )
    return Placement(
        num_nodes=config.cluster.num_nodes,
        devices_per_node=devices_per_node,
        trainer=_ranks(mapping.devices("actor_train"), devices_per_node),
        critic=_ranks(mapping.devices("critic"), devices_per_node),
        reference=_ranks(mapping.devices("reference"), devices_per_node),
        engines=_engines(mapping.actor_infer, config.inference.tensor_parallel, devices_per_node, "inference"),
        judge=_engines(
            config.judge_devices, config.judge.tensor_parallel if config.judge else 1, devices_per_node, "judge"
        ),
    )


def _engines(devices: Sequence[int], width: int, devices_per_node: int, section: str) -> tuple[Seat, ...]:
    """One seat for each `width` devices."""
    parts = [devices[i : i + width] for i in range(0, len(devices), width)]
    return tuple(_seat(part, devices_per_node, "engine", f"{section}.tensor_parallel") for part in parts)


def _ranks(devices: Sequence[int], devices_per_node: int) -> tuple[Seat, ...]:
    return tuple(_seat([device], devices_per_node, "rank") for device in devices)


def _seat(devices: Sequence[int], devices_per_node: int, role: str, width_key: str = "") -> Seat:
    nodes = {device // devices_per_node for device in devices}
    if len(nodes) > 1:
        raise PlacementError(
            f"cluster.device_mapping: devices {list(devices)} of one {role} lie on machines {sorted(nodes)}, but one "
            f"engine stays on one machine: lower {width_key}, or align the mapping with the machines."
        )
    return Seat(node=nodes.pop(), local_devices=tuple(device % devices_per_node for device in devices))
