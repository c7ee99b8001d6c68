"""A cluster of Ray actors: one per trainer rank, one per engine.

One placement-group bundle per machine reserves its devices. Each actor requests a tiny fraction of a bundle and gets
its devices through environment variables, so that roles may share devices (colocated) or not (disaggregated).

All processes end with the run: a cluster that this process started ends with it, even if it is killed; actors end with
their cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
import urllib.parse
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll.cluster.actor_log import ACTOR_LOG
from roll.cluster.base import count_accelerators, set_media_dir
from roll.cluster.devices import Placement, PlacementSlot, list_accelerator_types, resolve_placement
from roll.cluster.engines import ManagedEngineGroup
from roll.cluster.pool import LocalWorkerPool
from roll.cluster.ray_devices import CUDA_VISIBLE_DEVICES, KEEP_CUDA_VISIBLE_DEVICES, list_reserved_devices
from roll.cluster.ray_engines import RayEngine
from roll.cluster.ray_nodes import RayNodes, build_label_selector
from roll.cluster.ray_pool import RayWorkerPool
from roll.cluster.ray_trainer import RayTrainerGroup
from roll.config.cluster import ClusterConfig, ElasticConfig, RoleDevices
from roll.errors import InfraError, PlacementError
from roll.inference import EngineSpec
from roll.process_environment import find_socket_directory
from roll.protocols import WorkerPool
from roll.tracking import RunDirectory
from roll.training import TrainerSpec
from roll.user_code import START_DIRECTORY_VARIABLE, list_loaded_modules

__all__ = ["RayCluster", "open_ray"]

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
CLIENT_PORT, HEAD_PORT = 10001, 6379
"""Default ports of a Ray cluster."""
FRACTIONAL_CPU = 0.001
"""The fraction of a bundle that each actor requests: bundles, not actors, reserve the devices."""


def open_ray(config: ClusterConfig, roles: Mapping[str, RoleDevices], run: RunDirectory | None = None) -> RayCluster:
    """Join the cluster at `cluster.address`, or start a private cluster on this machine, and reserve its devices.

    Raises:
        PlacementError: the device mapping does not fit, or the cluster cannot be joined or cannot reserve the devices.
        InfraError: Ray does not start on this machine.
    """
    accelerators = count_accelerators()
    per_node = config.devices_per_node or accelerators or os.cpu_count() or 1
    placement = resolve_placement(config, roles, per_node)
    is_owner = not ray.is_initialized()
    if is_owner:
        _connect(config, per_node)
    kind = "GPU" if accelerators else "CPU"
    elastic = config.elastic
    types = list_accelerator_types(config, per_node)
    group = placement_group(
        [{kind: float(per_node), **({f"accelerator_type:{each}": FRACTIONAL_CPU} if each else {})} for each in types],
        strategy="STRICT_SPREAD" if placement.num_nodes > 1 else "PACK",
        # Trainers must not run on nodes that may leave.
        bundle_label_selector=[build_label_selector(elastic)] * placement.num_nodes if elastic else None,
    )
    # `wait` returns False instead of raising, and a group that is still pending would take the devices later.
    if not group.wait(PLACEMENT_TIMEOUT_S):
        available = ray.cluster_resources().get(kind, 0)
        remove_placement_group(group)
        raise PlacementError(
            f"the Ray cluster could not reserve {placement.num_nodes} x {per_node} {kind} within "
            f"{PLACEMENT_TIMEOUT_S:g} s ({available:g} in total{_describe_excluded_nodes(config)}): lower "
            "cluster.num_nodes or cluster.devices_per_node, correct the accelerator_type of cluster.device_classes, or "
            "wait until other jobs end."
        )
    for module in list_loaded_modules():  # workers cannot import the pipeline's file, which may define a loss
        ray.cloudpickle.register_pickle_by_value(module)
    devices = list_reserved_devices(group, placement.num_nodes, per_node, PLACEMENT_TIMEOUT_S) if accelerators else None
    media_dir = None if run is None else run.media_dir
    return RayCluster(
        roles,
        placement,
        group,
        devices=devices,
        is_owner=is_owner,
        run=run,
        media_dir=media_dir,
        elastic=elastic,
        max_devices_per_node=config.devices_per_node,
    )


def _describe_excluded_nodes(config: ClusterConfig) -> str:
    """Describe the nodes that the reservation excludes, for a message."""
    if config.elastic is None:
        return ""
    key, value = next(iter(build_label_selector(config.elastic).items()))
    return f", including nodes with the label {key}={value.removeprefix('!')}, which only elastic engines use"


def _connect(config: ClusterConfig, per_node: int) -> None:
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": False,
    }
    if not (config.address or "").startswith("ray://"):
        quiet["job_config"] = _build_job_config()
    if config.address:
        _check_address(config.address)
    elif (directory := find_socket_directory(relative_length=75)) != tempfile.gettempdir():
        quiet["_temp_dir"] = os.path.join(directory, "ray")
    try:
        with _restore_sigterm():
            if config.address:
                ray.init(address=config.address, **quiet)
            else:
                os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
                # "local": otherwise Ray would join a running cluster on this machine, and then reject `num_cpus`.
                ray.init("local", num_cpus=max(per_node, os.cpu_count() or 1), include_dashboard=False, **quiet)
    except Exception as error:  # Ray raises many types, and a plain `Exception` when one of its processes is late
        if config.address:
            raise PlacementError(
                f"cannot connect to a Ray cluster at cluster.address '{config.address}': {error}"
            ) from error
        raise InfraError(
            f"Ray failed to start on this machine: {error} Retry with fewer other programs running; Ray's logs are in "
            "/tmp/ray/session_latest/logs."
        ) from error


class _EmptySearchPath(list[str]):
    """A search path that stays empty when Ray extends it with the current directory.

    Otherwise, Ray's workers would search that directory before the standard library. `roll.user_code` searches it last,
    so workers still find users' functions.
    """

    def extend(self, values: Iterable[str], /) -> None:
        """Ignore all paths."""


def _build_job_config() -> JobConfig:
    config = JobConfig()
    config._py_driver_sys_path = _EmptySearchPath()
    return config


def _check_address(address: str) -> None:
    """Check that a server listens at an address; without the check, Ray would silently wait for ten minutes.

    Raises:
        PlacementError: no server listens at the address.
    """
    scheme, separator, rest = address.rpartition("://")
    if not separator and ":" not in address:  # `auto`, `local`
        return
    parts = urllib.parse.urlsplit(f"//{rest}")
    try:
        host, port = parts.hostname or "", parts.port or (CLIENT_PORT if scheme == "ray" else HEAD_PORT)
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlacementError(
            f"cannot reach a Ray cluster at cluster.address '{address}' ({reason}): start one with `ray start "
            "--head`, correct the address, or remove it to start a cluster on this machine only."
        ) from error


@contextlib.contextmanager
def _restore_sigterm() -> Iterator[None]:
    """Restore the SIGTERM handler at the end: `ray.init` replaces it, but a run must save a checkpoint on SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@dataclass(eq=False)
class RayCluster:
    """Implements `Cluster` over a placement group."""

    roles: Mapping[str, RoleDevices]
    placement: Placement
    group: PlacementGroup
    _: KW_ONLY
    devices: Sequence[Sequence[str]] | None
    """For each machine, the names of its reserved devices; `None` without accelerators."""
    is_owner: bool
    """True if this process started the Ray cluster."""
    run: RunDirectory | None = None
    media_dir: Path | None = None
    elastic: ElasticConfig | None = None
    max_devices_per_node: int | None = None
    """The number of devices that elastic engines use of a node; `None` for all."""

    @property
    def _threads(self) -> int | None:
        """CPU threads per actor: the cores divided by the number of actors that share them; `None` with GPUs."""
        if self.devices is not None:
            return None
        sharing = max(role.count for role in self.roles.values())
        return max(1, (os.cpu_count() or 1) // min(sharing, self.placement.num_workers_on_first_node or 1))

    def _build_options(self, slot: PlacementSlot, threads: int | None, role: str, index: int) -> dict[str, Any]:
        """Return the Ray options of an actor on a placement slot."""
        environment = self._build_environment(threads, role, index)
        if self.devices is not None:
            names = [self.devices[slot.node][device] for device in slot.local_devices]
            environment |= {**KEEP_CUDA_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES: ",".join(names)}
        return {
            "num_cpus": 0 if self.devices is not None else FRACTIONAL_CPU,
            "num_gpus": 0 if self.devices is None else FRACTIONAL_CPU,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=slot.node
            ),
            "runtime_env": {"env_vars": environment},
        }

    def _build_environment(self, threads: int | None, role: str, index: int) -> dict[str, str]:
        """Return the environment variables that an actor needs on any node."""
        environment = {name: os.environ[name] for name in _PROPAGATED_VARIABLES if name in os.environ}
        environment[START_DIRECTORY_VARIABLE] = os.getcwd()
        if self.run:
            environment[ACTOR_LOG] = str(self.run.get_log_path(role, index).absolute())
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        return environment

    async def start_trainer(self, spec: TrainerSpec, role: str) -> RayTrainerGroup:
        threads = spec.training.num_threads or self._threads
        training = spec.training.model_copy(update={"num_threads": threads})
        slots = [
            self._build_options(slot, threads, spec.role, rank) for rank, slot in enumerate(self.placement.slots[role])
        ]
        return await RayTrainerGroup.start(set_media_dir(replace(spec, training=training), self.media_dir), slots)

    async def start_engines(
        self, specs: Sequence[EngineSpec], role: str, asleep: Sequence[Collection[str]] = ()
    ) -> ManagedEngineGroup:
        factories = {}
        name = f"{self.roles[role].log_name}_actor"
        for index, (spec, slot) in enumerate(zip(specs, self.placement.slots[role], strict=True)):
            threads = spec.num_threads or self._threads
            options = self._build_options(slot, threads, name, index)
            own = set_media_dir(replace(spec, num_threads=threads), self.media_dir)
            factories[spec.engine_id] = partial(RayEngine, own, options)
        return await ManagedEngineGroup.start(factories, concurrently=True, asleep=asleep)

    def open_elastic_nodes(self, spec: EngineSpec, role: str) -> RayNodes | None:
        """See `Cluster.open_elastic_nodes`."""
        if self.elastic is None:
            return None
        name = f"{self.roles[role].log_name}_actor"
        return RayNodes(
            set_media_dir(spec, self.media_dir),
            self.elastic,
            self.group,
            has_accelerators=self.devices is not None,
            max_devices_per_node=self.max_devices_per_node,
            build_environment=lambda threads, index: self._build_environment(threads, name, index),
        )

    async def start_pool(self, num_workers: int) -> WorkerPool:
        """Start a worker pool on the controller's machine, or on all machines if there are several."""
        if self.placement.num_nodes == 1:
            return LocalWorkerPool(num_workers)
        devices = tuple(range(self.placement.devices_per_node))
        slots = [PlacementSlot(node=node, local_devices=devices) for node in range(self.placement.num_nodes)]
        return RayWorkerPool(num_workers, [self._build_options(slot, None, "rewards", slot.node) for slot in slots])

    def choose_transport(self, engine_kind: str) -> str:
        """Return `shared_memory` for a single machine without accelerators, else `broadcast`."""
        is_single = self.placement.num_nodes == 1 and self.elastic is None
        return "shared_memory" if is_single and self.devices is None else "broadcast"

    async def close(self) -> None:
        """Free the devices, and stop the Ray cluster if this process started it."""
        await asyncio.to_thread(remove_placement_group, self.group)
        if self.is_owner:
            await asyncio.to_thread(ray.shutdown)


_PROPAGATED_VARIABLES = ("OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "ROLL_CACHE")
