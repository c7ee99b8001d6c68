"""What a run sees of the nodes of a Ray cluster, and where it starts engines; here, no process is started."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import (
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    ObjectReconstructionFailedError,
    OwnerDiedError,
)

from roll.cluster import ray_nodes
from roll.cluster.ray_answers import await_result
from roll.cluster.ray_nodes import RayNodes, build_label_selector
from roll.config.cluster import ElasticConfig
from roll.errors import EngineDiedError, InfraError
from roll.inference import EngineSpec
from roll.rollout.elastic import ElasticNode

NODE_ID = "ab" * 28


def described(name: str, *, alive: bool = True, labels: dict[str, str] | None = None, **resources: float) -> Any:
    return {
        "NodeID": name,
        "Alive": alive,
        "Labels": labels or {},
        "Resources": resources,
        "NodeManagerAddress": f"at {name}",
    }


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What Ray says."""
    says = SimpleNamespace(nodes=[], draining={}, free={}, started=[])
    monkeypatch.setattr(ray_nodes.ray, "nodes", lambda: says.nodes)
    monkeypatch.setattr(ray_nodes, "state", SimpleNamespace(get_draining_nodes=lambda: says.draining))
    monkeypatch.setattr(ray_nodes, "available_resources_per_node", lambda: says.free)
    monkeypatch.setattr(ray_nodes, "placement_group_table", lambda group: {"bundles_to_node_id": {0: "own"}})
    monkeypatch.setattr(ray_nodes, "RayEngine", lambda spec, options: says.started.append((spec, options)))
    return says


def nodes(*, width: int = 1, gpus: bool = False, most: int | None = None, label: str | None = None) -> RayNodes:
    return RayNodes(
        EngineSpec(engine_id="engine-0", kind="hf", model_path="", max_context=8, tensor_parallel=width),
        ElasticConfig(max_engines=4, node_label=label),
        None,  # type: ignore[arg-type]
        has_accelerators=gpus,
        max_devices_per_node=most,
        build_environment=lambda threads, number: {"THREADS": str(threads), "NUMBER": str(number)},
    )


async def test_ray_nodes_live_nodes_that_the_run_did_not_reserve_have_places_for_engines(
    cluster: SimpleNamespace,
) -> None:
    cluster.nodes = [
        described("own", CPU=8),
        described("dead", alive=False, CPU=8),
        described("a", CPU=5),
        described("b", CPU=2),
        described("gpus", GPU=8),
    ]
    cluster.free = {"a": {"CPU": 3.0}, "b": {}}
    assert await nodes(width=2).list_nodes() == [
        ElasticNode(node_id="a", capacity=2, num_free=1, address="at a"),
        ElasticNode(node_id="b", capacity=1, num_free=0, address="at b"),
        ElasticNode(node_id="gpus", capacity=0, num_free=0, address="at gpus"),
    ]
    cluster.free = {"gpus": {"GPU": 8.0}}
    assert [(node.capacity, node.num_free) for node in await nodes(gpus=True, most=4).list_nodes()][-1] == (4, 8)


async def test_ray_nodes_a_draining_node_has_its_deadline(cluster: SimpleNamespace) -> None:
    cluster.nodes = [described("a", CPU=1), described("b", CPU=1)]
    cluster.draining = {"a": (time.time() + 100) * 1000, "b": 0}
    first, second = await nodes().list_nodes()
    assert first.is_draining and first.seconds_left == pytest.approx(100, abs=5)
    assert second.is_draining and second.seconds_left is None


async def test_ray_nodes_a_label_selects_the_nodes_and_keeps_the_other_roles_away(cluster: SimpleNamespace) -> None:
    cluster.nodes = [described("a", CPU=1), described("b", CPU=1, labels={"market": "spot"})]
    assert [node.node_id for node in await nodes(label="market=spot").list_nodes()] == ["b"]
    assert build_label_selector(ElasticConfig(max_engines=1, node_label="market=spot")) == {"market": "!spot"}
    assert build_label_selector(ElasticConfig(max_engines=1)) == {"ray.io/market-type": "!spot"}


async def test_ray_nodes_an_engine_is_bound_to_its_node_and_takes_its_devices(cluster: SimpleNamespace) -> None:
    cluster.nodes = [described(NODE_ID, CPU=9)]
    found = nodes(width=2)
    await found.list_nodes()
    found.build_engine("engine-7", NODE_ID)
    [(spec, options)] = cluster.started
    assert (spec.engine_id, spec.num_threads) == ("engine-7", 2)
    assert (options["num_cpus"], options["num_gpus"]) == (2.0, 0)
    strategy = options["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == (NODE_ID, False)
    assert options["runtime_env"] == {"env_vars": {"THREADS": "2", "NUMBER": "7"}}
    nodes(width=2, gpus=True).build_engine("engine-8", NODE_ID)
    spec, options = cluster.started[-1]
    assert (spec.num_threads, options["num_cpus"], options["num_gpus"]) == (None, 0, 2.0)


async def test_ray_nodes_a_head_that_does_not_answer_is_an_infrastructure_error(
    cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Any:
        raise RuntimeError("GCS is down")

    monkeypatch.setattr(ray_nodes.ray, "nodes", refuse)
    with pytest.raises(InfraError, match=r"^the head of the Ray cluster does not respond: GCS is down$"):
        await nodes().list_nodes()


@pytest.mark.parametrize(
    "error",
    [
        ActorUnschedulableError("the node does not exist any more"),
        NodeDiedError("the node died"),
        ObjectLostError("00ff", None, "call site"),
        ObjectReconstructionFailedError("00ff"),
        OwnerDiedError("00ff", None, "call site"),
    ],
)
async def test_ray_nodes_an_actor_whose_node_is_gone_is_a_dead_engine(error: Exception) -> None:
    async def answer() -> None:
        raise error

    with pytest.raises(EngineDiedError):
        await await_result(answer(), lambda: EngineDiedError("engine-1", "its process ended"))
