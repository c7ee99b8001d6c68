"""What `roll doctor` finds on machines that are told to it, and between two nodes on one."""

from __future__ import annotations

import json
import resource
import socket
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from roll.cli.main import run
from roll.errors import ConfigError
from roll.preflight.doctor import Finding, examine, find_worst_verdict, limits, network, render, software, stores
from roll.preflight.doctor import host as host_room
from roll.preflight.machine import Machine

Usage = namedtuple("Usage", "total used free")
MACHINE = Machine(num_cores=8, memory_bytes=16 * 2**30, accelerator_bytes=())


def by_name(findings) -> dict[str, Finding]:
    return {each.name: each for each in findings}


@pytest.fixture
def no_sandboxes(monkeypatch):
    """Starting one takes long beside the rest."""
    monkeypatch.setattr(software, "_check_sandboxes", lambda: iter(()))


@pytest.mark.integration
def test_doctor_the_command_says_every_finding_and_the_same_as_json(no_sandboxes, capsys, tmp_path):
    code = run(["doctor", "--runs", str(tmp_path)])
    text = capsys.readouterr().out
    assert code == run(["doctor", "--json", "--runs", str(tmp_path)])
    told = json.loads(capsys.readouterr().out)
    assert [each["section"] for each in told["findings"]] == sorted(
        (each["section"] for each in told["findings"]), key=["Machine", "Limits", "Software", "Disk", "Network"].index
    )
    assert code == (2 if told["verdict"] == "problem" else 0)
    for each in told["findings"]:
        assert each["name"] in text and each["found"]
        assert each["verdict"] == "ok" or each["advice"], each
        assert each["verdict"] in ("ok", "warning", "problem")
    assert {"system", "shared memory", "open files", "packages", "runs", "ray cluster"} <= {
        each["name"] for each in told["findings"]
    }


def test_doctor_a_problem_gives_exit_code_2_and_a_warning_0(no_sandboxes, monkeypatch, tmp_path):
    only = {"Machine": lambda runs: [Finding(name="x", verdict="warning", found="y", advice="z")]}
    monkeypatch.setattr("roll.preflight.doctor.checks.SECTIONS", only)
    assert run(["doctor"]) == 0
    only["Limits"] = lambda runs: [Finding(name="x", verdict="problem", found="y", advice="z")]
    assert run(["doctor"]) == 2


def test_doctor_a_look_that_fails_is_a_finding_and_the_others_go_on(monkeypatch, tmp_path):
    def broken(runs: Path):
        yield Finding(name="first", verdict="ok", found="seen")
        raise KeyError("MemAvailable")

    sections = {"Machine": broken, "Disk": lambda runs: [Finding(name="last", verdict="ok", found=str(runs))]}
    monkeypatch.setattr("roll.preflight.doctor.checks.SECTIONS", sections)
    found = list(examine(tmp_path))
    assert [(each.section, each.name, each.verdict) for each in found] == [
        ("Machine", "first", "ok"),
        ("Machine", "machine", "problem"),
        ("Disk", "last", "ok"),
    ]
    assert "KeyError" in found[1].found


def test_doctor_the_text_counts_what_it_found():
    lines = render(
        [
            Finding(name="a", verdict="ok", found="1", section="Machine"),
            Finding(name="bcd", verdict="problem", found="2", advice="do it", section="Disk"),
        ]
    ).splitlines()
    assert lines == [
        "Machine",
        "  ok       a    1",
        "",
        "Disk",
        "  PROBLEM  bcd  2",
        "                -> do it",
        "",
        "1 problem, no warnings.",
    ]
    assert find_worst_verdict([]) == "ok"


@pytest.mark.parametrize(
    ("quota", "threads", "verdict"),
    [("max 100000", None, "ok"), ("200000 100000", None, "warning"), ("200000 100000", "2", "ok")],
)
def test_doctor_a_containers_quota_of_cores_asks_for_as_many_threads(monkeypatch, tmp_path, quota, threads, verdict):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(host_room, "_CPU_MAX_FILE", tmp_path / "cpu.max")
    monkeypatch.setattr(host_room.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(host_room, "_read_cpu_flags", lambda: {"avx2", "avx512f"})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    found = host_room._check_processor(MACHINE)
    assert found.verdict == verdict
    assert "OMP_NUM_THREADS=2" in found.advice or verdict == "ok"


@pytest.mark.parametrize(
    ("flags", "verdict", "advice"),
    [
        ({"avx2", "avx512f", "amx_bf16"}, "ok", ""),
        ({"avx2", "fma"}, "warning", "set model.dtype=float32"),
        (set(), "warning", "slow without AVX2"),
    ],
)
def test_doctor_a_processor_without_bfloat16_products_is_a_warning(monkeypatch, tmp_path, flags, verdict, advice):
    monkeypatch.setattr(host_room, "_CPU_MAX_FILE", tmp_path / "cpu.max")
    monkeypatch.setattr(host_room.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(host_room.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(host_room, "_read_cpu_flags", lambda: flags)
    found = host_room._check_processor(MACHINE)
    assert found.verdict == verdict and advice in found.advice


@pytest.mark.parametrize(
    ("driver", "torch", "free", "verdict", "says"),
    [
        ("", {"names": [], "built_for": "", "warnings": []}, (), "ok", "none"),
        (
            "570.1",
            {"names": ["H100"], "built_for": "12.8", "warnings": []},
            (2**36,),
            "ok",
            "H100 (64.0 GiB free); driver",
        ),
        ("570.1", {"names": [], "built_for": "", "warnings": []}, (), "warning", "supports only CPUs"),
        ("470.1", {"names": [], "built_for": "12.8", "warnings": ["driver is too old"]}, (), "problem", "too old"),
        ("", None, (), "problem", "cannot be imported"),
    ],
)
def test_doctor_accelerators_that_pytorch_does_not_see_are_explained(monkeypatch, driver, torch, free, verdict, says):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(host_room, "_read_driver_version", lambda: driver)
    monkeypatch.setattr(host_room, "_query_torch", lambda: torch)
    found = host_room._check_accelerators(Machine(num_cores=1, memory_bytes=1, accelerator_bytes=free))
    assert (found.verdict, says in found.found) == (verdict, True), found


def test_doctor_little_shared_memory_and_few_files_are_warned_of(monkeypatch):
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda path: Usage(64 * 2**20, 0, 64 * 2**20))
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (1024, 1048576))
    found = by_name([limits._check_shared_memory(), limits._check_open_files()])
    assert found["shared memory"].found == "/dev/shm: 64 MiB of 64 MiB free"
    assert "--shm-size" in found["shared memory"].advice
    assert found["open files"].advice.endswith("ulimit -n 65536.")
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (1024, 2048))
    assert "limits.conf" in limits._check_open_files().advice
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert limits._check_open_files().verdict == limits._check_processes().verdict == "ok"


@pytest.mark.parametrize(
    ("number", "policy", "verdict"),
    [("", "", "ok"), ("4", "", "ok"), ("2", "", "warning"), ("8", "", "warning"), ("", "ACTIVE", "warning")],
)
def test_doctor_thread_settings_are_compared_with_the_cores(monkeypatch, number, policy, verdict):
    monkeypatch.setattr(limits, "count_available_cores", lambda: 4.0)
    for name, value in (("OMP_NUM_THREADS", number), ("OMP_WAIT_POLICY", policy)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    assert limits._check_thread_variables().verdict == verdict


def test_doctor_packages_that_are_missing_or_too_old_are_named_with_the_command(monkeypatch):
    monkeypatch.setattr(
        software.metadata,
        "requires",
        lambda name: ["torch>=2.13,<2.14", "click>=8.1", "no-such", "wandb>=1; extra == 'w'"],
    )
    known = {"torch": "2.12.1", "click": "8.5.1"}
    monkeypatch.setattr(software, "_read_version", lambda name: known.get(name, ""))
    found = software._check_packages()
    assert found.verdict == "problem"
    assert "torch 2.12.1" in found.found and "no-such missing" in found.found and "click" not in found.found
    assert found.advice == "pip install 'torch<2.14,>=2.13' 'no-such'"


def test_doctor_a_full_or_wrong_place_for_runs_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(stores, "measure_free_disk", lambda place: 2**20)
    assert stores._check_space("runs", tmp_path, 2**33, "move").verdict == "warning"
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    found = stores._check_space("runs", tmp_path / "file" / "runs", 2**33, "move")
    assert found.verdict == "problem" and "is a file" in found.found


def listening(said: list[str]) -> tuple[threading.Thread, int]:
    """A node that answers one peer; its port is known when this returns."""
    ready = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        ready.set()

    options = {"seconds": 60.0, "max_peers": 1, "report_progress": say}
    thread = threading.Thread(target=network.answer_peers, args=(0,), kwargs=options)
    thread.start()
    assert ready.wait(10)
    return thread, int(said[0].split()[3])


def test_doctor_a_peer_that_listens_tells_versions_clock_and_speed():
    said: list[str] = []
    thread, port = listening(said)
    found = by_name(network.check_peer(f"127.0.0.1:{port}"))
    thread.join()
    peer = f"127.0.0.1:{port}"
    assert list(found) == [peer, f"{peer} versions", f"{peer} clock", f"{peer} bandwidth"]
    assert found[f"{peer} versions"].found == "the same as on this machine"
    assert "(16 MiB)" in found[f"{peer} bandwidth"].found
    assert said[1] == "peer 127.0.0.1"


def test_doctor_a_peer_with_other_versions_is_a_problem(monkeypatch):
    theirs = software.read_versions() | {"torch": "2.9.0"}
    found = network._compare_versions("node2 versions", theirs)
    assert found.verdict == "problem" and found.found.startswith("torch 2.9.0 (here ")


def test_doctor_a_port_without_a_listener_is_told_from_one_that_is_closed_off(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (refused,) = network.check_peer(f"127.0.0.1:{port}")
    assert refused.verdict == "warning" and f"roll doctor --listen {port}" in refused.advice

    def silent(address, timeout):
        raise TimeoutError("timed out")

    monkeypatch.setattr(network.socket, "create_connection", silent)
    (closed,) = network.check_peer("10.0.0.9:29500")
    assert closed.verdict == "problem" and "firewall" in closed.advice


@pytest.mark.parametrize("peer", ["node2", "node2:", ":29500", "node2:port", "node2:70000"])
def test_doctor_a_peer_that_is_no_host_and_port_is_refused(peer):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        list(network.check_peer(peer))


def test_doctor_an_interface_that_is_not_there_is_a_problem():
    assert network._check_interface("NCCL_SOCKET_IFNAME", "nope0").verdict == "problem"
    assert network._check_interface("NCCL_SOCKET_IFNAME", "lo").verdict == "ok"
    assert network._check_interface("NCCL_SOCKET_IFNAME", "^docker").verdict == "ok"


def test_doctor_a_ray_cluster_that_is_gone_is_said(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        assert network._check_ray_cluster().verdict == "ok"
    found = network._check_ray_cluster()
    assert found.verdict == "warning" and "RAY_ADDRESS" in found.advice


def test_doctor_the_driver_is_asked_by_its_own_tool(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!{sys.executable}\nprint('570.86.10')\n")
    tool.chmod(0o755)
    monkeypatch.setattr(host_room.shutil, "which", lambda name: str(tool))
    assert host_room._read_driver_version() == "570.86.10"


@pytest.mark.parametrize(
    ("mode", "token", "file", "verdict", "says"),
    [
        ("", "", False, "ok", "none"),
        ("", "", True, "ok", "requires this token"),
        ("token", "", False, "problem", "no token"),
        ("token", "secret", False, "ok", "RAY_AUTH_MODE=token"),
        ("token", "", True, "ok", "RAY_AUTH_MODE=token"),
        ("disabled", "", True, "ok", "disabled"),
    ],
)
def test_doctor_that_ray_asks_for_a_token_is_said_and_not_which(
    monkeypatch, tmp_path, mode, token, file, verdict, says
):
    for name, value in (("RAY_AUTH_MODE", mode), ("RAY_AUTH_TOKEN", token)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "auth_token"))
    if file:
        (tmp_path / "auth_token").write_text("secret")
    found = network._check_ray_token()
    assert (found.verdict, says in found.found) == (verdict, True), found
    assert "secret" not in found.found + found.advice
