"""The unmodified client of the Tinker API against `roll serve`, as a user starts both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from worlds.extras import extra_python

pytestmark = [pytest.mark.extras, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
KEY = "tml-a-key-for-tests"


@contextmanager
def serving(model: Path, directory: Path, *options: str) -> Iterator[str]:
    """`roll serve` in a process of its own; its address."""
    command = [sys.executable, "-m", "roll", "serve", str(model), "--name", "tiny", "--port", "0", "--key", KEY]
    command += ["--dir", str(directory), "--dtype", "float32", "--num-threads", "1", *options]
    log = directory.with_suffix(".log")
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("export TINKER_BASE_URL="):
                yield line.partition("=")[2].strip()
                break
        else:
            pytest.fail(log.read_text())
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, log.read_text()


def run_client(url: str, program: Path, *arguments: str) -> str:
    environment = os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(extra_python("tinker")), str(program), *arguments]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout


ENGINES = ("hf", pytest.param("vllm", marks=pytest.mark.vllm))


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    return request.param


@pytest.fixture
def model(request: pytest.FixtureRequest, engine: str) -> Path:
    return request.getfixturevalue("servable_model" if engine == "vllm" else "tiny_model")


def test_extras_tinker_the_client_trains_samples_saves_and_resumes(model: Path, tmp_path: Path, engine: str) -> None:
    with serving(model, tmp_path / "checkpoints", "--engine", engine) as url:
        output = run_client(url, Path(__file__).parent / "tinker" / "train.py", "tiny", str(model))
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert found["info"]["model_data"] == {"arch": None, "model_name": "tiny", "tokenizer_id": str(model)}
    assert found["losses"][-1] < 0.3 * found["losses"][0]
    assert found["same"] and found["sequence_ids"] == 8
    assert found["prompt_logprobs"][0] is None and all(each < 0 for each in found["prompt_logprobs"][1:])
    assert found["difference"] < (1e-4 if engine == "vllm" else 1e-5)  # between trainer and sampler
    assert abs(found["ratio_loss"]) < 1e-3  # the ratios are 1
    assert all(found[loss][1] > 0 for loss in ("importance_sampling", "ppo", "cispo", "dro"))
    assert found["custom"]["mine"] == 1.0 and found["custom"]["loss:sum"] < 0
    assert found["chunks"] == [1100, pytest.approx(1100 * found["one"], rel=1e-4)]
    (failed, category), (rejected, _) = found["failures"]
    assert "data[1].model_input: token 100000" in failed and category == "user"
    assert "optim_step was rejected" in rejected
    assert found["one_after_failure"] == found["one"]
    assert found["resumed"][0] == found["resumed"][1] != found["one"]
    assert found["named"] in ("length", "stop")
    assert found["scores"][0] is None and len(found["scores"]) == 7
    assert found["pickled"] and found["concurrent"] > 10
    assert [reason for _, reason in found["stop string"]] == [reason for _, reason in found["stop tokens"]]
    assert "the loss 'stable_reinforce' is not supported" in found["refused"][0]
    assert "topk_prompt_logprobs: top-k log-probs of the prompt are not supported" in found["refused"][1]
    assert "lora_config.rank: must be <= 32" in found["refused"][2]


def test_extras_tinker_the_example_of_the_documentation_runs(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path / "checkpoints") as url:
        output = run_client(url, ROOT / "examples" / "serve" / "client.py")
    losses = [float(line.rpartition(" ")[2]) for line in output.splitlines() if line.startswith("step")]
    assert len(losses) == 10 and losses[-1] < losses[0]
    assert "saved: tinker://" in output
    (path,) = (line.partition(" ")[2] for line in output.splitlines() if line.startswith("saved:"))
    saved = tmp_path / "checkpoints" / path.removeprefix("tinker://")
    assert json.loads((saved / "adapter_config.json").read_text())["r"] == 16


def test_extras_tinker_two_clients_at_once_train_as_one_alone(model: Path, tmp_path: Path, engine: str) -> None:
    program = ROOT / "examples" / "serve" / "client.py"
    with serving(model, tmp_path / "checkpoints", "--engine", engine) as url, ThreadPoolExecutor() as threads:
        alone = run_client(url, program)
        together = list(threads.map(lambda _: run_client(url, program), range(2)))
    for output in together:
        assert [line for line in output.splitlines() if not line.startswith("saved")] == [
            line for line in alone.splitlines() if not line.startswith("saved")
        ]
