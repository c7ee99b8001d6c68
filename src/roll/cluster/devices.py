"""Resource mapping: a placement slot (machine and devices) for each rank and engine. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll.config.cluster import ClusterConfig, RoleDevices
from roll.errors import PlacementError

__all__ = ["Placement", "PlacementSlot", "list_accelerator_types", "resolve_placement"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementSlot:
    """The machine and the devices of one rank or engine."""

    node: int
    """The index of the machine, from 0 to num_nodes - 1."""
    local_devices: tuple[int, ...]
    """The indices of the devices on that machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The placement slots of every role, one for each rank or engine, in order. Roles may share devices."""

    num_nodes: int
    devices_per_node: int
    slots: Mapping[str, tuple[PlacementSlot, ...]]

    @property
    def num_workers_on_first_node(self) -> int:
        """The number of ranks and engines on node 0; they share the node's cores if there are no accelerators."""
        return sum(slot.node == 0 for slots in self.slots.values() for slot in slots)


def resolve_placement(cluster: ClusterConfig, roles: Mapping[str, RoleDevices], devices_per_node: int) -> Placement:
    """Resolve the device mapping of each role to the machine and devices of every rank and engine.

    Args:
        cluster: The configuration of the machines.
        roles: The roles by name; messages use the names.
        devices_per_node: The number of devices of each machine.

    Raises:
        PlacementError: a device does not exist in the cluster, or an engine would span machines.
    """
    total = cluster.num_nodes * devices_per_node
    slots: dict[str, tuple[PlacementSlot, ...]] = {}
    for name, role in roles.items():
        beyond = [device for device in role.devices if device >= total]
        if beyond:
            raise PlacementError(
                f"cluster.device_mapping.{name} contains device {beyond[0]}, but {cluster.num_nodes} x "
                f"{devices_per_node} devices are numbered 0-{total - 1}: change the mapping, cluster.num_nodes or "
                "cluster.devices_per_node."
            )
        key = f"{role.section}.tensor_parallel"
        slots[name] = tuple(_build_slot(part, devices_per_node, key) for part in role.list_parts())
    return Placement(num_nodes=cluster.num_nodes, devices_per_node=devices_per_node, slots=slots)


def _build_slot(devices: Sequence[int], devices_per_node: int, width_key: str) -> PlacementSlot:
    nodes = {device // devices_per_node for device in devices}
    if len(nodes) > 1:
        raise PlacementError(
            f"cluster.device_mapping: an engine must not span machines, but its devices {list(devices)} are on "
            f"machines {sorted(nodes)}: lower {width_key}, or align the mapping with the machines."
        )
    return PlacementSlot(node=nodes.pop(), local_devices=tuple(device % devices_per_node for device in devices))


def list_accelerator_types(cluster: ClusterConfig, devices_per_node: int) -> list[str | None]:
    """Return, for each machine, the accelerator type that Ray must find on it; `None` if its device classes name none.

    Raises:
        PlacementError: a machine has devices of classes with different accelerator types.
    """
    types: list[dict[str, str]] = [{} for _ in range(cluster.num_nodes)]
    for name, device_class in cluster.device_classes.items():
        if device_class.accelerator_type is not None:
            for node in {device // devices_per_node for device in device_class.devices} & set(range(cluster.num_nodes)):
                types[node].setdefault(device_class.accelerator_type, name)
    for node, found in enumerate(types):
        if len(found) > 1:
            (first, a), (second, b) = list(found.items())[:2]
            raise PlacementError(
                f"cluster.device_classes: machine {node} (devices {node * devices_per_node}-"
                f"{(node + 1) * devices_per_node - 1}) has devices of the classes {a} and {b} with the accelerator "
                f"types {first} and {second}: give the devices of each machine to classes of one type."
            )
    return [next(iter(found), None) for found in types]
