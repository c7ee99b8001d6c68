"""A Ray cluster on this machine whose nodes join, are announced to leave, and are killed; and engines that count."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

MAX_JOIN_ATTEMPTS = 5
ENGINE = '''
"""The `hf` engine, which writes down every token as soon as it is sampled."""

import os
import time

from roll.inference import hf_requests
from roll.inference.hf import HFEngine
from roll.inference.spec import ENGINES

TOKENS, EVENTS = (os.open({log!r} + end, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for end in ("", ".events"))
TOKEN_S = {token_s!r}
append = hf_requests.BatchRow.append
own = ""


def note(file, *words):
    os.write(file, (" ".join(map(str, (time.time(), own, *words))) + "\\n").encode())


def append_and_note(row, token, *rest):
    note(TOKENS, row.request.request_id, row.request.sampling.position + row.num_generated, token)
    time.sleep(TOKEN_S)
    return append(row, token, *rest)


hf_requests.BatchRow.append = append_and_note


class CountingEngine(HFEngine):
    def __init__(self, spec):
        global own
        own = spec.engine_id
        super().__init__(spec)

    async def start(self):
        await super().start()
        note(EVENTS, "loaded")

    async def generate(self, request):
        answer = await super().generate(request)
        note(EVENTS, "answer")
        return answer
'''


@dataclass
class Log:
    """What the engines wrote down."""

    tokens: dict[tuple[str, int], list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    """By request and position: the engines that sampled the token, and the token."""
    loaded: dict[str, float] = field(default_factory=dict)
    first_answer: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read_events(cls, path: Path) -> Log:
        """Read a log without its tokens."""
        log, events = cls(), path.with_name(f"{path.name}.events")
        for line in events.read_text().splitlines() if events.exists() else ():
            at, engine_id, kind = line.split(" ")
            times = log.loaded if kind == "loaded" else log.first_answer
            times.setdefault(engine_id, float(at))
        return log

    @classmethod
    def read(cls, path: Path) -> Log:
        log = cls.read_events(path)
        for line in path.read_text().splitlines():
            _, engine_id, request_id, position, token = line.split(" ")
            log.tokens[request_id, int(position)].append((engine_id, int(token)))
        return log

    def list_repeated(self, killed: set[str]) -> list[tuple[str, int]]:
        """Return the tokens that were sampled again although no engine of `killed` had sampled them before."""
        return [
            key for key, found in self.tokens.items() if any(engine_id not in killed for engine_id, _ in found[:-1])
        ]

    def list_changed(self) -> list[tuple[str, int]]:
        """Return the positions at which an attempt sampled another token than the one before."""
        return [key for key, found in self.tokens.items() if len({token for _, token in found}) > 1]


def write_engine(path: Path, log: Path, token_s: float) -> str:
    """Write the engine, and return its name for a configuration."""
    path.write_text(ENGINE.format(log=str(log), token_s=token_s))
    return f"{path}:CountingEngine"


class RayNodes:
    """A cluster with a head, and further nodes of one CPU each."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.address: str = cluster.address

    def join(self) -> Any:
        """Start a node; on a machine with much other work, Ray gives nodes up that start slowly, so try again."""
        os.environ["RAY_NODE_MARKET_TYPE"] = "spot"
        own = psutil.Process()
        try:
            for attempt in range(MAX_JOIN_ATTEMPTS):
                before = set(own.children())
                try:
                    return self._cluster.add_node(num_cpus=1, include_log_monitor=False)
                except Exception as error:
                    if "timed out" not in str(error) or attempt + 1 == MAX_JOIN_ATTEMPTS:
                        raise
                    for process in set(own.children()) - before:
                        _kill_with_children(process)
        finally:
            del os.environ["RAY_NODE_MARKET_TYPE"]
        raise AssertionError("a node joined, or the last attempt failed")

    def notice(self, node: Any, seconds: float) -> None:
        """Announce that a node leaves, as `ray drain-node` does."""
        import ray
        from ray.core.generated import autoscaler_pb2

        accepted, why = ray._raylet.GcsClient(address=self.address).drain_node(
            node.node_id,
            autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            "the spot machine is taken away",
            int((time.time() + seconds) * 1000),
        )
        assert accepted, why

    def kill(self, node: Any) -> None:
        """End every process of a node at once."""
        _kill_with_children(psutil.Process(node.all_processes["raylet"][0].process.pid))
        self.forget(node)

    def forget(self, node: Any) -> None:
        """Reap the processes of a node that has ended."""
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        self._cluster.worker_nodes.discard(node)

    def list_answered(self, run_dir: Path, nodes: Sequence[Any], log: Log) -> list[tuple[Any, set[str]]]:
        """Return the nodes whose engines have all answered a request, with the ids of these engines."""
        path = run_dir / "logs" / "controller-0.log"
        joined = re.findall(r"engine (\S+) joined on node (\w+)", path.read_text()) if path.exists() else []
        found = [(node, {name for name, prefix in joined if node.node_id.startswith(prefix)}) for node in nodes]
        return [(node, engines) for node, engines in found if engines and engines <= log.first_answer.keys()]

    def has_ended(self, node: Any) -> bool:
        return not node.live_processes() or any(name == "raylet" for name, _ in node.dead_processes())


def _kill_with_children(process: psutil.Process) -> None:
    for each in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


@contextmanager
def ray_nodes(num_cpus: int) -> Iterator[RayNodes]:
    """Start a cluster with a head of so many CPUs, and end it."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": num_cpus, "include_dashboard": False})
    try:
        yield RayNodes(cluster)
    finally:
        cluster.shutdown()
