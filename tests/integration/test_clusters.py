"""Runs on Ray clusters that somebody else starts: by the script for Slurm, and by `ray job submit`."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from chaos.harness import tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SRUN = """#!/bin/bash
# Slurm's srun, with every node on this machine: drops its own options and does the rest.
while [[ $1 == --* ]]; do shift; done
if [[ $1 == hostname ]]; then echo 127.0.0.1; exit; fi
exec "$@"
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then printf 'node1\\nnode2\\n'; else echo "$@" >>"$SCONTROL_LOG"; fi
"""


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """With a directory for Ray alone, so that no other cluster of this machine is met; sockets need a short path."""
    place = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    yield {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_TMPDIR": place,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    shutil.rmtree(place, ignore_errors=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def config_in(place: Path, model: Path, **changes: object) -> Path:
    config = tiny_config(model, num_steps=2)
    for key in ("output_dir", "name"):
        config.pop(key, None)
    path = place / "config.yaml"
    path.write_text(yaml.safe_dump(config | changes))
    return path


def test_cluster_run_the_slurm_script_trains_on_two_nodes_and_goes_on_after_its_time_limit(
    tmp_path, tiny_model, environment
):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    del environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN"]  # the script's own
    environment |= {
        "PATH": f"{tools}:{environment['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_ON_NODE": "1",
        "SCONTROL_LOG": str(tmp_path / "scontrol.log"),
        "RAY_PORT": str(free_port()),
    }
    config = config_in(tmp_path, tiny_model)
    script = [ROOT / "deploy" / "slurm" / "train.sbatch", config]
    mapping = ["cluster.device_mapping.actor_train=[0]", "cluster.device_mapping.actor_infer=[1]"]
    run = tmp_path / "runs" / "slurm-7"

    with (tmp_path / "first.log").open("w") as log:
        first = subprocess.Popen(
            [*script, "training.num_steps=5000", *mapping], cwd=tmp_path, env=environment, stdout=log, stderr=log
        )
    _wait_for(lambda: any(run.glob("checkpoints/step-*")), first, "a checkpoint")
    first.send_signal(signal.SIGTERM)
    assert first.wait(120) == 143, (tmp_path / "first.log").read_text()[-3000:]
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
    reached = max(int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*"))

    second = subprocess.run(
        [*script, f"training.num_steps={reached + 2}"],
        cwd=tmp_path,
        env=environment | {"RAY_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    assert json.loads((run / "summary.json").read_text())["num_steps"] == reached + 2
    written = yaml.safe_load((run / "config.yaml").read_text())["cluster"]
    assert (written["num_nodes"], written["devices_per_node"]) == (2, 1)


def test_cluster_run_a_job_that_is_submitted_to_ray_trains_there(tmp_path, tiny_model, environment):
    if importlib.util.find_spec("aiohttp_cors") is None:
        pytest.skip("the server of `ray job submit` is not installed (pip install 'ray[default]')")
    work, output = tmp_path / "work", tmp_path / "runs"
    work.mkdir()
    config_in(work, tiny_model)
    port, dashboard = free_port(), free_port()
    start = [
        BIN / "ray",
        "start",
        "--head",
        f"--port={port}",
        f"--dashboard-port={dashboard}",
        "--num-cpus=2",
        "--block",
    ]
    with (tmp_path / "head.log").open("w") as log:
        head = subprocess.Popen(start, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{dashboard}"
        _wait_for(lambda: _listens(dashboard), head, "server of jobs")
        overrides = ["cluster.type=ray", "cluster.address=auto", "cluster.devices_per_node=1", f"output_dir={output}"]
        command = [BIN / "ray", "job", "submit", "--address", address, "--working-dir", work, "--"]
        done = subprocess.run(
            [*command, BIN / "roll", "train", "config.yaml", "name=job", *overrides],
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "succeeded" in done.stdout
        assert json.loads((output / "job" / "summary.json").read_text())["num_steps"] == 2
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(60)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen, what: str) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert process.poll() is None and time.monotonic() < end, f"no {what}"
        time.sleep(0.1)
