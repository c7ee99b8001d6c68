"""`roll serve` under load: clients and the server are killed, and every model is as if they never were."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from chaos.serving_client import KEY

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("serving_client.py")
NUM_CLIENTS, NUM_REQUESTS, NUM_STREAMS = 8, 250, 2
"""The clients of a stream send the same requests, each to its own model."""


def read_log(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


class Server:
    """`roll serve` on a port that stays the same."""

    def __init__(self, model: Path, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [sys.executable, "-m", "roll", "serve", str(model), "--name", "tiny", "--port", str(self.port)]
        self.command += ["--key", KEY, "--dir", str(directory), "--dtype", "float32", "--num-threads", "1"]
        self.log = directory.with_suffix(".log")
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log.open("a") as output:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=output, text=True, env=environment
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("export"):
                return
        pytest.fail(self.log.read_text())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def start_client(server: Server, stream: int, log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), server.url, str(stream), str(log), str(NUM_REQUESTS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def test_serving_chaos_every_request_is_applied_exactly_once(tiny_model: Path, tmp_path: Path) -> None:
    choice = random.Random(36)
    server = Server(tiny_model, tmp_path / "served")
    server.start()
    # each stream alone, without any kill
    expected = {}
    for stream in range(NUM_STREAMS):
        client = start_client(server, stream, tmp_path / f"alone-{stream}")
        assert client.wait(300) == 0, client.stderr.read() if client.stderr else ""
        expected[stream] = [row for row in read_log(tmp_path / f"alone-{stream}") if row[0] != "session"]
        assert len(expected[stream]) == NUM_REQUESTS
    assert expected[0] != expected[1]

    logs = [tmp_path / f"client-{index}" for index in range(NUM_CLIENTS)]
    clients = [start_client(server, index % NUM_STREAMS, log) for index, log in enumerate(logs)]
    num_kills, server_kills, next_kill = 0, 0, time.monotonic() + 3
    while any(client.poll() is None for client in clients):
        time.sleep(0.05)
        for client in clients:
            assert client.poll() in (None, 0, -9), client.stderr.read() if client.stderr else ""
        done = sum(len(read_log(log)) for log in logs)
        if server_kills == 0 and done > NUM_CLIENTS * NUM_REQUESTS // 2:
            server.kill()
            server.start()
            server_kills += 1
        running = [index for index, client in enumerate(clients) if client.poll() is None]
        if running and time.monotonic() > next_kill:
            index = choice.choice(running)
            clients[index].kill()
            clients[index].wait()
            clients[index] = start_client(server, index % NUM_STREAMS, logs[index])
            num_kills, next_kill = num_kills + 1, time.monotonic() + choice.uniform(0.5, 3.0)
    assert server_kills == 1 and num_kills >= 3
    server.kill()
    for index, log in enumerate(logs):
        assert clients[index].returncode == 0
        rows = [row for row in read_log(log) if row[0] != "session"]
        assert rows == expected[index % NUM_STREAMS], index
        sessions = {row[1] for row in read_log(log) if row[0] == "session"}
        assert len(sessions) == 1
        (session,) = sessions
        weights = tmp_path / "served" / f"{session}:train:0" / "weights"
        saved = sorted(int(each.name.removeprefix("step-")) for each in weights.glob("step-*"))
        assert saved == list(range(9, NUM_REQUESTS + 1, 10))  # every checkpoint that was confirmed
        for number in saved:
            counted = json.loads((weights / f"step-{number}" / "checkpoint.json").read_text())["num_steps"]
            assert counted == sum(step % 10 in (3, 6, 8) for step in range(1, number + 1))
