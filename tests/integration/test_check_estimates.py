"""What `roll check` says a run needs, beside what a short run of each pipeline takes: within 15 %.

Times need a machine that does nothing else; the fastest of a run's steps counts, as it does for the estimate.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from worlds.tiny_model import write_tiny_model
from worlds.vision_models import picture, write_vision_model

import roll
from roll.config.estimate import LIBRARIES_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 0.15
RUN = """
import json, pathlib, sys
import roll
roll.train(json.loads(sys.argv[1]))
status = pathlib.Path("/proc/self/status").read_text()
print(int(status.partition("VmHWM:")[2].split()[0]) * 1024)
"""
"""A run, and its own peak: `ru_maxrss` would begin at that of the process which started it."""
SLOW_DISK = """
import threading
from roll.training.checkpoint import writer as state_writer
from roll.training.backend import TorchBackend

write, step, finish = state_writer.write_entries, TorchBackend.train_step, state_writer.StateWriter.finish
may_end = threading.Event()

def write_beside_a_step(*args):
    may_end.wait()
    write(*args)

def train_step(*args, **settings):
    try:
        return step(*args, **settings)
    finally:
        may_end.set()

def finish_now(writer):
    may_end.set()
    finish(writer)
    may_end.clear()

state_writer.write_entries = write_beside_a_step
TorchBackend.train_step = train_step
state_writer.StateWriter.finish = finish_now
"""
"""A checkpoint that is not written before the next step is made, so that its copy is there at that step's peak."""
WORDS = [f"{number} and then {number + 1}, " for number in range(60)]
PAIRS = [{"prompt": w, "chosen": w * 14 + "yes", "rejected": w * 14 + "no"} for w in WORDS]
TEXTS = [{"prompt": w, "completion": w * 14} for w in WORDS]
LABELLED = [{**row, "label": n % 2 == 0} for n, row in enumerate(TEXTS)]
SCORED = [{**row, "score": n / len(TEXTS)} for n, row in enumerate(TEXTS)]
ADAPTERS = {"model": {"lora": {"rank": 16}}}
SUPERVISED: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "sft": (TEXTS, {"pipeline": "sft"}),
    "preference": (PAIRS, {"pipeline": "preference"}),
    "preference, kto": (LABELLED, {"pipeline": "preference", "preference": {"type": "kto"}}),
    "preference, adapters": (PAIRS, {"pipeline": "preference", **ADAPTERS, "preference": {"reference": "adapters"}}),
    "reward_model": (PAIRS, {"pipeline": "reward_model"}),
    "reward_model, regression": (SCORED, {"pipeline": "reward_model", "reward_model": {"loss": "regression"}}),
    "distill_offline": (TEXTS, {"pipeline": "distill_offline", "teacher": "MODEL"}),
    "distill_offline, loss": (
        TEXTS,
        {"pipeline": "distill_offline", "teacher": "MODEL", "distillation": {"mode": "loss"}},
    ),
}
ONLINE: dict[str, dict[str, Any]] = {
    "rlvr": {"pipeline": "rlvr"},
    "rlvr, ppo": {"pipeline": "rlvr", "algorithm": {"type": "ppo"}},
    "preference_online": {"pipeline": "preference_online"},
    "preference_online, all pairs": {"pipeline": "preference_online", "pairing": {"type": "all"}},
    "rejection_sampling": {"pipeline": "rejection_sampling", "rejection": {"keep": 8, "min_reward": -1.0}},
    "distill": {"pipeline": "distill", "teacher": "MODEL"},
    "distill, reward": {"pipeline": "distill", "teacher": "MODEL", "distillation": {"mode": "reward"}},
}


SMALLER: dict[str, dict[str, Any]] = {
    "everything kept": {},
    "layers again": {"training": {"activation_checkpointing": True}},
    "MLPs in slices": {"training": {"tiled_mlp_tokens": 512}},
    "moments in 8 bits": {"training": {"optimizer": "adamw_8bit"}},
    "weights in 4 bits": {"model": {"lora": {"rank": 16, "base": "nf4"}}},
    "adapters, closed": {**ADAPTERS, "training": {"malloc_trim": True}},
    "closed": {"training": {"malloc_trim": True}},
    "closed, saved beside training": {
        "training": {"malloc_trim": True},
        "checkpoint": {"every_num_steps": 1, "keep_last": 1, "asynchronous": True},
    },
}
MIXTURES: dict[str, dict[str, Any]] = {
    "closed": {"malloc_trim": True},
    "layers again": {"activation_checkpointing": True},
}
RANK = """
import dataclasses, json, pathlib, sys
config, rank, meeting, peak = json.loads(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
from roll.config.load import load_config
from roll.pipelines.sft.pipeline import LOSS
from roll.pipelines.supervised.preparation import build_policy_spec, prepare
from roll.training.backend import TorchBackend
from roll.types import TrainingBatch
config = load_config(config)
prepared = prepare(config, "supervised")
ranks = {"rank": rank, "world_size": 2, "device": "cpu", "init_method": meeting}
backend = TorchBackend(dataclasses.replace(build_policy_spec(config, prepared), **ranks))
for _ in range(config.training.num_steps):
    drawn = map(prepared.examples.samples, prepared.examples.train.draw(config.training.examples_per_step))
    backend.train_step(TrainingBatch(samples=tuple(sample for samples in drawn for sample in samples)), LOSS)
status = pathlib.Path("/proc/self/status").read_text()
pathlib.Path(peak).write_text(str(int(status.partition("VmHWM:")[2].split()[0]) * 1024))
backend.close()
"""
"""One of two ranks of a trainer, and its own peak."""


@pytest.fixture(scope="module", name="wide_model")
def _wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wide model")
    return write_tiny_model(directory, layers=30, hidden=576, heads=9, kv_heads=3, context_length=2048)


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return write_tiny_model(directory, layers=12, hidden=512, heads=8, kv_heads=4, context_length=1024)


@pytest.fixture(scope="module", name="mixture")
def _mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 layers of 8 experts, of which a token goes through 2: 47 million weights, 38 million of experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    directory = write_tiny_model(tmp_path_factory.mktemp("mixture"), context_length=2048)
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=260, head_dim=64, **sizes, **experts))
    model.save_pretrained(directory)
    return directory


def looked_at(
    directory: Path, model: Path, changes: dict[str, Any], more: dict[str, Any], before: str = ""
) -> tuple[float, float]:
    """Measured by estimated: memory of the run, and seconds of a step (0 where that is not estimated); code may come
    before the run."""
    config = {
        **{key: str(model) if value == "MODEL" else value for key, value in changes.items()},
        **more,
        "name": "run",
        "output_dir": str(directory),
        "model": {"path": str(model), **changes.get("model", {})},
        "checkpoint": {"at_end": False, **changes.get("checkpoint", {})},
        "tracking": {"console": "quiet", "tensorboard": False},
    }
    report = roll.check(config)
    assert not report.problems
    estimated = sum(role.bytes_total for role in report.memory)
    done = subprocess.run(
        [sys.executable, "-c", before + RUN, json.dumps(config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    step_s = min(row["time/step_s"] for row in rows if row["kind"] == "train")
    peak = int(done.stdout.splitlines()[-1])
    print(f"\n{peak / 2**20:,.0f} MiB measured, {estimated / 2**20:,.0f} MiB estimated")
    memory = peak / estimated
    return memory, step_s / report.step_s if report.step_s else 0.0


@pytest.fixture(scope="module", name="vision_model")
def _vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SmolVLM with a tower of 12 layers of width 384; an image has 5 tiles of 16 patches."""
    import torch
    import transformers

    directory = write_vision_model(tmp_path_factory.mktemp("vision") / "model", "smolvlm")
    config = transformers.AutoConfig.from_pretrained(directory)
    text, tower = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers, text.num_attention_heads = 256, 768, 6, 4
    text.num_key_value_heads, text.head_dim = 2, 64
    tower.hidden_size, tower.intermediate_size, tower.num_hidden_layers, tower.num_attention_heads = 384, 1536, 12, 6
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("frozen", [[], ["tower"]], ids=["all", "frozen tower"])
def test_check_estimates_a_tower_takes_the_memory_that_was_estimated(
    tmp_path: Path, vision_model: Path, frozen: list[str]
) -> None:
    rows = []
    for number in range(72):
        picture(number, 64, 64).save(tmp_path / f"{number}.png")
        rows.append({"prompt": "<image>" + WORDS[number % 60], "completion": "yes", "images": [f"{number}.png"]})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"pipeline": "sft", "model": {"vision": {"freeze": frozen}}}
    more = {
        "data": [{"source": "file", "path": str(path), "held_out": 0}],
        "training": {"num_steps": 3, "examples_per_step": 24, "max_tokens_per_micro_batch": 4096},
    }
    with mock.patch("roll.pipelines.supervised.check.can_measure_step_time", lambda sizes: False):
        memory, _ = looked_at(tmp_path, vision_model, changes, more)
    print(f"\ntower, frozen {frozen}: memory {memory:.3f} of the estimate")
    assert memory == pytest.approx(1.0, abs=TOLERANCE)


def test_check_estimates_a_script_without_a_guard_may_check_a_run(tmp_path: Path, model: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    config = {"name": "run", "pipeline": "sft", "model": str(model), "data": [{"source": "file", "path": str(rows)}]}
    script = tmp_path / "script.py"
    script.write_text(f"import roll\nprint('once', roll.check({config!r}).step_s > 0)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "once True\n", done.stderr


@pytest.mark.parametrize("name", SUPERVISED)
def test_check_estimates_a_pipeline_of_examples_takes_the_memory_and_time_that_were_estimated(
    tmp_path: Path, model: Path, name: str
) -> None:
    rows, changes = SUPERVISED[name]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {
        "data": [{"source": "file", "path": str(path)}],
        "training": {"num_steps": 4, "examples_per_step": 12, "max_tokens_per_micro_batch": 2048},
        "evaluation": {"every_num_steps": 0, "before_training": False, "num_examples": 1},
    }
    memory, time = looked_at(tmp_path, model, changes, more)
    print(f"\n{name}: memory {memory:.3f}, time {time:.3f} of the estimate")
    assert memory == pytest.approx(1.0, abs=TOLERANCE)
    assert time == pytest.approx(1.0, abs=TOLERANCE)


def of_texts(directory: Path, training: dict[str, Any]) -> dict[str, Any]:
    """Three steps of one micro-batch of some 3,000 tokens."""
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    usual = {"num_steps": 3, "examples_per_step": 12, "max_tokens_per_micro_batch": 4096, "share_prefix": False}
    return {
        "data": [{"source": "file", "path": str(path)}],
        "training": {**usual, **training},
        "evaluation": {"every_num_steps": 0, "before_training": False, "num_examples": 1},
    }


@pytest.mark.parametrize("name", SMALLER)
def test_check_estimates_less_memory_is_taken_as_estimated(tmp_path: Path, wide_model: Path, name: str) -> None:
    """Within 10 %, at the width of SmolLM2-135M."""
    changes = SMALLER[name]
    more = of_texts(tmp_path, changes.get("training", {}))
    with mock.patch("roll.pipelines.supervised.check.can_measure_step_time", lambda sizes: False):
        before = SLOW_DISK if "checkpoint" in changes else ""
        memory, _ = looked_at(tmp_path, wide_model, {"pipeline": "sft", **changes}, more, before)
    print(f"\n{name}: memory {memory:.3f} of the estimate")
    assert memory == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("name", MIXTURES)
def test_check_estimates_a_mixture_takes_the_memory_that_was_estimated(
    tmp_path: Path, mixture: Path, name: str
) -> None:
    """Within 10 %."""
    more = of_texts(tmp_path, MIXTURES[name])
    with mock.patch("roll.pipelines.supervised.check.can_measure_step_time", lambda sizes: False):
        memory, _ = looked_at(tmp_path, mixture, {"pipeline": "sft"}, more)
    print(f"\nmixture, {name}: memory {memory:.3f} of the estimate")
    assert memory == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("ep", [1, 2])
def test_check_estimates_ranks_of_a_mixture_take_the_memory_that_was_estimated(
    tmp_path: Path, mixture: Path, ep: int
) -> None:
    """Each of two, which divide experts or gather them: within 10 %."""
    config = {
        **of_texts(tmp_path, {"parallel": {"ep": ep}}),
        "pipeline": "sft",
        "name": "run",
        "output_dir": str(tmp_path),
        "model": str(mixture),
        "cluster": {"type": "ray", "devices_per_node": 2, "device_mapping": {"actor_train": "0-1"}},
    }
    report = roll.check(config)
    assert not report.problems
    estimated = report.memory[0].bytes_each + LIBRARIES_BYTES
    peaks = [tmp_path / f"peak-{rank}" for rank in range(2)]
    call, meeting = [sys.executable, "-c", RANK, json.dumps(config)], f"file://{tmp_path / 'meeting'}"
    ranks = [subprocess.Popen([*call, str(rank), meeting, str(peak)]) for rank, peak in enumerate(peaks)]
    assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
    memory = max(int(peak.read_text()) for peak in peaks) / estimated
    print(f"\nmixture, two ranks, ep {ep}: memory {memory:.3f} of the estimate")
    assert memory == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("name", ONLINE)
def test_check_estimates_a_pipeline_of_rollouts_takes_the_memory_that_was_estimated(
    tmp_path: Path, model: Path, name: str
) -> None:
    rows = [{"prompt": word * 4, "answer": "1"} for word in WORDS]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text("def score(text, answer, metadata):\n    return sum(map(ord, text)) % 97 / 97\n")
    reward = {"type": "python", "function": f"{tmp_path / 'own.py'}:score"}
    more = {
        "data": [{"source": "file", "path": str(path), "reward": reward}],
        "rollout": {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 24},
        "inference": {"engine": "hf"},
        "training": {"num_steps": 2, "max_tokens_per_micro_batch": 2048},
        "evaluation": {"every_num_steps": 0, "before_training": False, "num_prompts": 1},
    }
    memory, _ = looked_at(tmp_path, model, ONLINE[name], more)
    print(f"\n{name}: memory {memory:.3f} of the estimate")
    assert memory == pytest.approx(1.0, abs=TOLERANCE)
