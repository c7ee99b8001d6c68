"""Unmodified recipes of tinker-cookbook 0.6.1 against `roll serve`, with a tiny model, and data without a network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds.boxed_model import write_boxed_model
from worlds.extras import extra_python

pytestmark = [pytest.mark.extras, pytest.mark.timeout(900)]

KEY = "tml-a-key-for-tests"
MODEL = "Qwen/Qwen3-8B"
"""The name of the tiny model: a recipe looks up by it how to render chats, and loads the tokenizer from a directory of
this name in the working directory."""


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest) -> str:
    """The inference engine; `-m "extras and not vllm"` halves the time."""
    if request.param == "vllm":
        pytest.importorskip("vllm")
    return request.param


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, engine: str) -> Path:
    """A working directory with the model, and with data sets under the names that recipes load."""
    directory = tmp_path_factory.mktemp(f"cookbook-{engine}")
    write_boxed_model(directory / MODEL, hidden=128 if engine == "vllm" else 64)  # vLLM's kernels need wide heads
    chats = [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"Here: {n}{n}."}]}
        for n in range(40)
    ]
    sums = [{"question": f"What is {n} + 0?", "answer": f"It is {n}.\n#### {n}"} for n in range(10)] * 2
    pairs = [
        {"chosen": f"\n\nHuman: {n}?\n\nAssistant: yes", "rejected": f"\n\nHuman: {n}?\n\nAssistant: no, {n}"}
        for n in range(24)
    ]
    for split in ("train", "test"):
        write_rows(directory / "HuggingFaceH4" / "no_robots" / f"{split}.jsonl", chats)
        write_rows(directory / "openai" / "gsm8k" / "main" / f"{split}.jsonl", sums)
        write_rows(directory / "Anthropic" / "hh-rlhf" / f"{split}.jsonl", pairs)
    (directory / "openai" / "gsm8k" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n"
        "  - split: test\n    path: main/test.jsonl\n---\n"
    )
    return directory


class Server:
    """`roll serve` on a port that stays the same."""

    def __init__(self, place: Path, engine: str) -> None:
        self.directory, self.port, self.url = place / "served", 0, ""
        self.engine, self.log = engine, place / "server.log"

    def start(self) -> None:
        command = [sys.executable, "-m", "roll", "serve", MODEL, "--port", str(self.port), "--key", KEY]
        command += ["--dir", str(self.directory), "--dtype", "float32", "--num-threads", "1", "--max-context", "2048"]
        command += ["--engine", self.engine]
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                command, cwd=self.log.parent, stdout=subprocess.PIPE, stderr=output, text=True
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("export TINKER_BASE_URL="):
                self.url = line.partition("=")[2].strip()
                self.port = int(self.url.rpartition(":")[2])
                return
        pytest.fail(self.log.read_text())

    def stop(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def server(place: Path, engine: str) -> Iterator[Server]:
    started = Server(place, engine)
    started.start()
    yield started
    assert started.stop(signal.SIGTERM) == 0, started.log.read_text()


def start(server: Server, place: Path, *command: str) -> subprocess.Popen[str]:
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_DATASETS_OFFLINE": "1", "HF_HOME": str(place / "home"), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.Popen(
        [str(extra_python("tinker")), *command],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_recipe(server: Server, place: Path, recipe: str, log: str, *arguments: str) -> subprocess.Popen[str]:
    fixed = (f"model_name={MODEL}", f"log_path={place / log}")
    return start(server, place, "-m", f"tinker_cookbook.recipes.{recipe}", *fixed, *arguments)


def finish(process: subprocess.Popen[str], log: Path) -> list[dict[str, Any]]:
    """Wait for the end of a recipe; its metrics."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-6000:]
    return read_metrics(log)


def run_recipe(server: Server, place: Path, recipe: str, log: str, *arguments: str) -> list[dict[str, Any]]:
    return finish(start_recipe(server, place, recipe, log, *arguments), place / log)


def run_basic(server: Server, place: Path, recipe: str, size: int, log: str, *arguments: str) -> list[dict[str, Any]]:
    program = str(Path(__file__).parent / "tinker" / "basic.py")
    fixed = (program, recipe, MODEL, str(size), f"log_path={place / log}")
    return finish(start(server, place, *fixed, *arguments), place / log)


def read_metrics(log: Path) -> list[dict[str, Any]]:
    file = log / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_steps(process: subprocess.Popen[str], log: Path, count: int) -> None:
    while len(read_metrics(log)) < count:
        if process.poll() is not None:
            assert process.stdout is not None
            pytest.fail(process.stdout.read()[-6000:])
        time.sleep(0.02)


SL_LOOP = ("batch_size=4", "lora_rank=8", "learning_rate=0.01", "save_every=3", "max_steps=9")


def test_extras_cookbook_sl_loop_is_killed_and_resumes(server: Server, place: Path) -> None:
    process = start_recipe(server, place, "sl_loop", "sl-killed", *SL_LOOP)
    wait_for_steps(process, place / "sl-killed", 5)
    process.kill()
    process.wait()
    before = read_metrics(place / "sl-killed")
    metrics = run_recipe(server, place, "sl_loop", "sl-killed", *SL_LOOP)
    assert metrics[: len(before)] == before
    resumed = metrics[len(before)]["step"]
    assert resumed in (3, 6)  # a checkpoint
    again = {row["step"]: row["train_mean_nll"] for row in metrics[len(before) :]}
    for row in before[resumed:]:  # steps that were repeated
        assert again[row["step"]] == pytest.approx(row["train_mean_nll"], rel=1e-6)
    assert list(again) == list(range(resumed, 9))
    assert again[8] < 0.8 * before[0]["train_mean_nll"]


def test_extras_cookbook_sl_loop_goes_on_when_the_server_is_killed_and_started_again(place: Path, engine: str) -> None:
    (place / "other").mkdir(exist_ok=True)
    own = Server(place, engine)
    own.directory = place / "other" / "served"
    own.start()
    process = start_recipe(own, place, "sl_loop", "sl-server", *SL_LOOP)
    wait_for_steps(process, place / "sl-server", 4)
    own.stop(signal.SIGKILL)
    own.start()
    assert [row["step"] for row in finish(process, place / "sl-server")] == list(range(9))
    (final,) = own.directory.glob("*/weights/final/checkpoint.json")
    assert json.loads(final.read_text())["num_steps"] == 9  # each update was applied once
    assert own.stop(signal.SIGTERM) == 0


RL_LOOP = ("batch_size=4", "group_size=16", "max_tokens=12", "lora_rank=8", "learning_rate=0.01", "max_steps=3")
"""About 8 of the 192 answers are right, so that a run without any reward is not a matter of chance."""


def check_rl_loop(metrics: list[dict[str, Any]]) -> None:
    assert [row["progress/batch"] for row in metrics] == [0, 1, 2]
    assert any("grad_norm" in row for row in metrics)
    assert 0 < sum(row["reward/total"] for row in metrics) < 3


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo"])
def test_extras_cookbook_rl_loop_trains(server: Server, place: Path, loss: str) -> None:
    check_rl_loop(run_recipe(server, place, "rl_loop", f"rl-{loss}", f"loss_fn={loss}", *RL_LOOP))


def test_extras_cookbook_recipes_at_once_train_as_each_alone(server: Server, place: Path) -> None:
    alone = run_recipe(server, place, "sl_loop", "sl-alone", *SL_LOOP)
    first, *_ = (place / "sl-alone" / "checkpoints.jsonl").read_text().splitlines()
    together = []
    for index in range(2):  # from the same checkpoint, because the recipe has no seed
        write_rows(place / f"sl-{index}" / "checkpoints.jsonl", [json.loads(first)])
        together.append(start_recipe(server, place, "sl_loop", f"sl-{index}", *SL_LOOP))
    sampling = start_recipe(server, place, "rl_loop", "rl-beside", "loss_fn=cispo", *RL_LOOP)
    for index, process in enumerate(together):
        rows = finish(process, place / f"sl-{index}")
        assert [row["step"] for row in rows] == list(range(3, 9))
        assert [row["train_mean_nll"] for row in rows] == [row["train_mean_nll"] for row in alone[3:]]
    check_rl_loop(finish(sampling, place / "rl-beside"))


def test_extras_cookbook_sl_basic_trains(server: Server, place: Path) -> None:
    arguments = ("lora_rank=8", "learning_rate=0.01", "max_steps=5", "eval_every=2", "save_every=2")
    metrics = run_basic(server, place, "sl_basic", 4, "sl-basic", *arguments)
    losses = [row["train_mean_nll"] for row in metrics if "train_mean_nll" in row]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert any("test/nll" in row for row in metrics)


RL_BASIC = (
    "max_tokens=12",
    "lora_rank=8",
    "max_steps=2",
)
VARIANTS = {
    "plain": (),
    "kl": (
        "kl_penalty_coef=0.1",
        "kl_reference_config=tinker_cookbook.rl.train:KLReferenceConfig",
        f"kl_reference_config.base_model={MODEL}",
    ),
    "async": (
        "async_config=tinker_cookbook.rl.train:AsyncConfig",
        "async_config.max_steps_off_policy=1",
        "async_config.groups_per_batch=2",
        "async_config.loss_fn=ppo",
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_extras_cookbook_rl_basic_trains(server: Server, place: Path, variant: str) -> None:
    metrics = run_basic(server, place, "rl_basic", 2, f"rl-basic-{variant}", *RL_BASIC, *VARIANTS[variant])
    rewards = [row["env/all/reward/total"] for row in metrics if "env/all/reward/total" in row]
    assert len(rewards) == 2
    assert (variant == "kl") == any("kl_policy_base" in row for row in metrics)


def test_extras_cookbook_dpo_trains(server: Server, place: Path) -> None:
    arguments = ("dataset=hhh", "batch_size=4", "learning_rate=0.001", "max_steps=4")
    metrics = run_recipe(server, place, "preference.dpo.train", "dpo", *arguments)
    losses = [row["dpo_loss"] for row in metrics if "dpo_loss" in row]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # log 2: the policy is the reference
    assert losses[-1] < losses[0]
