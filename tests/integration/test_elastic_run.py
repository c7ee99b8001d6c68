"""A run whose engines come and go with the nodes of a Ray cluster; all nodes are on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import Run, tiny_config
from worlds.ray_nodes import Log, RayNodes, ray_nodes, write_engine

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S = 240.0
FIRST_ANSWER_S = 15.0


def elastic_config(model: Path, engine: str, nodes: RayNodes, **elastic: Any) -> dict[str, Any]:
    """An asynchronous run with one trainer and one engine on the head."""
    config = tiny_config(model, engine=engine, num_steps=100_000)
    scheduling = {"async_ratio": 1.0}
    config["rollout"] = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 48, "scheduling": scheduling}
    config["inference"]["options"] = {"admission": "continuous"}
    config["evaluation"] = {"every_num_steps": 0}
    config["cluster"] = {
        "type": "ray",
        "address": nodes.address,
        "devices_per_node": 2,
        "device_mapping": {"actor_train": [0], "actor_infer": [1]},
        "elastic": {"max_engines": 2, **elastic},
    }
    return config


def test_elastic_run_nodes_join_and_leave_with_and_without_notice(tmp_path: Path, tiny_model: Path) -> None:
    tokens = tmp_path / "tokens.log"
    engine = write_engine(tmp_path / "counting.py", tokens, token_s=0.003)
    with ray_nodes(num_cpus=2) as nodes:
        run = Run(tmp_path / "runs", elastic_config(tiny_model, engine, nodes, min_engines=1))
        before = nodes.join()  # a spot machine that was there before the run gets no trainer
        process = run.begin()
        reached = _Counters(run, process)

        def answered(name: str) -> None:
            _wait_until(lambda: name in Log.read_events(tokens).first_answer, process, f"answer of {name}")

        reached.wait_for("joined", 1)
        answered("engine-1")
        nodes.notice(before, seconds=60.0)
        reached.wait_for("drained", 1)
        _wait_until(lambda: nodes.has_ended(before), process, "the end of the node that has no work")
        nodes.forget(before)

        lost = nodes.join()
        reached.wait_for("joined", 2)
        answered("engine-2")
        nodes.kill(lost)
        reached.wait_for("lost", 1)

        started = _start_node(nodes, tmp_path)
        reached.wait_for("joined", 3)
        answered("engine-3")
        started.terminate()
        reached.wait_for("drained", 2)
        started.wait(60)
        steps = reached.last["step"]
        reached.wait_until_step(steps + 2)
        process.terminate()
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 143, errors.decode()

    rows = [row for row in run.metrics() if row["kind"] == "train"]
    assert {row["rollout/infra_errors"] for row in rows} == {0}
    assert rows[-1]["engines/serving"] == 1 and rows[-1]["engines/elastic"] == 0
    assert rows[-1]["engines/replaced"] == 0
    log = Log.read(tokens)
    assert list(log.loaded) == ["engine-0", "engine-1", "engine-2", "engine-3"]
    assert log.list_repeated(killed={"engine-2"}) == []
    waits = {name: log.first_answer[name] - log.loaded[name] for name in ("engine-1", "engine-2", "engine-3")}
    print(f"seconds from a loaded engine to its first answer: {waits}")
    assert max(waits.values()) <= FIRST_ANSWER_S
    trace = (run.path / "trace.json").read_text()
    assert trace.count("joined on node") == 3 and trace.count("left the cluster without notice") == 1


class _Counters:
    """What the metrics of a run say of its engines."""

    def __init__(self, run: Run, process: Any) -> None:
        self._run, self._process = run, process

    @property
    def last(self) -> dict[str, Any]:
        path = self._run.path / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return next((row for row in reversed(rows) if row["kind"] == "train"), {"step": 0})

    def wait_for(self, name: str, count: int) -> None:
        _wait_until(lambda: self.last.get(f"engines/{name}") == count, self._process, f"{count} engines {name}")

    def wait_until_step(self, step: int) -> None:
        _wait_until(lambda: self.last["step"] >= step, self._process, f"step {step}")


def _start_node(nodes: RayNodes, place: Path) -> subprocess.Popen[bytes]:
    """Start a node with the command that the documentation names; SIGTERM is its notice."""
    command = [
        str(Path(sys.executable).parent / "ray"),
        "start",
        f"--address={nodes.address}",
        "--num-cpus=1",
        "--block",
    ]
    with (place / "node.log").open("w") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, "RAY_NODE_MARKET_TYPE": "spot"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait_until(condition: Callable[[], bool], process: Any, what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=60)
            pytest.fail(f"no {what}: {output.decode()[-2000:]}\n{errors.decode()[-2000:]}")
        time.sleep(0.1)
