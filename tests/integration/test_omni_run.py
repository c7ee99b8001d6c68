"""Runs that train a thinker on tones (which pitch?) and moving shapes (which direction?)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file
from worlds.omni_models import OMNI_MODELS, moving_shape, tone, write_full_omni_model, write_omni_model

import roll
from roll.media.wav import write_wav
from roll.models import load_causal_lm
from roll.models.omni import SPEECH_PREFIXES

PITCHES = {"low": 220, "high": 1760}
DIRECTIONS = ("left", "right", "up", "down")


def write_media(directory: Path) -> list[dict[str, Any]]:
    """Write tones and frames; return rows with a prompt and an answer."""
    rows: list[dict[str, Any]] = []
    for number in range(6):
        name, pitch = list(PITCHES.items())[number % 2]
        clip = tone(pitch * (1 + 0.02 * number), 0.2 + 0.05 * number)
        (directory / f"{number}.wav").write_bytes(write_wav(clip.samples, clip.rate))
        rows.append({"prompt": "<audio>Which pitch?", "answer": name, "audios": [f"{number}.wav"]})
    for number in range(6):
        direction = DIRECTIONS[number % 4]
        video = moving_shape(direction, num_frames=4, size=16, seed=number)
        film = {"frames": video.frames.tolist(), "fps": 2}
        rows.append({"prompt": "<video>Which way?", "answer": direction, "videos": [film]})
    return rows


@pytest.fixture(scope="module", name="world")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("omni")
    for name in OMNI_MODELS:
        write_omni_model(directory / name, name, heads=2)
        write_full_omni_model(directory / f"full {name}", directory / name)
    rows = write_media(directory)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = [
        {key: value for key, value in row.items() if key in ("audios", "videos")}
        | {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}]}
        for row in rows
    ]
    (directory / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples))
    (directory / "reward.py").write_text(
        "def share_of_letters(text, answer, metadata):\n    return sum(letter.isalpha() for letter in text) / 16\n"
    )
    return directory


def online(world: Path, name: str, tmp_path: Path, **inference: Any) -> dict[str, Any]:
    reward = {"type": "python", "function": f"{world / 'reward.py'}:share_of_letters", "require_finished": False}
    return {
        "pipeline": "rlvr",
        "name": "omni",
        "model": {"path": str(world / name), "dtype": "float32"},
        "data": [{"source": "file", "path": str(world / "rows.jsonl"), "held_out": 0.25, "reward": reward}],
        "rollout": {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 6},
        "training": {"num_steps": 2, "learning_rate": 1e-3},
        "evaluation": {"every_num_steps": 2},
        "checkpoint": {"at_end": True},
        "inference": inference,
        "output_dir": str(tmp_path),
    }


def check_probes(directory: Path) -> None:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    probes = [line["sync/probe_mean_abs"] for line in lines if "sync/probe_mean_abs" in line]
    assert len(probes) == 2 and max(probes) < 1e-5


@pytest.mark.parametrize("name", [OMNI_MODELS[0], pytest.param(OMNI_MODELS[1], marks=pytest.mark.slow)])
def test_omni_run_reinforcement_learning_with_the_embedded_engine(world: Path, tmp_path: Path, name: str) -> None:
    roll.train(online(world, name, tmp_path, engine="hf") | {"tracking": {"record_rollouts": True}})
    check_probes(tmp_path / "omni")
    model = tmp_path / "omni" / "checkpoints" / "step-000002" / "model"
    exported = transformers.AutoModelForImageTextToText.from_pretrained(model)
    assert "Thinker" in type(exported).__name__
    assert transformers.AutoProcessor.from_pretrained(model).audio_token == "<|AUDIO|>"


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OMNI_MODELS)
def test_omni_run_reinforcement_learning_with_vllm(world: Path, tmp_path: Path, name: str) -> None:
    """vLLM serves complete models; the first sync finds the names of the weights, and the probe their effect."""
    roll.train(online(world, f"full {name}", tmp_path, engine="vllm"))
    check_probes(tmp_path / "omni")


@pytest.mark.parametrize("name", [OMNI_MODELS[1], pytest.param(OMNI_MODELS[0], marks=pytest.mark.slow)])
def test_omni_run_supervised_fine_tuning_exports_the_complete_model(world: Path, tmp_path: Path, name: str) -> None:
    roll.train(
        {
            "pipeline": "sft",
            "name": "omni",
            "model": {"path": str(world / f"full {name}"), "dtype": "float32"},
            "data": [{"source": "file", "path": str(world / "examples.jsonl"), "held_out": 0.25}],
            "training": {"num_steps": 2, "examples_per_step": 4, "learning_rate": 1e-3},
            "output_dir": str(tmp_path),
        }
    )
    exported = tmp_path / "omni" / "checkpoints" / "step-000002" / "model"
    old, new = (load_file(path / "model.safetensors") for path in (world / f"full {name}", exported))
    assert new.keys() == old.keys()
    speech = [key for key in old if key.startswith(SPEECH_PREFIXES)]
    assert len(speech) == 2 and all(new[key].equal(old[key]) for key in speech)
    trained = [key for key in old if not new[key].equal(old[key])]
    for part in ("audio_tower.layers", "audio_tower.proj", "visual.blocks", "visual.merger", "model.layers", "lm_head"):
        assert any(key.startswith(f"thinker.{part}") for key in trained), part
    config = json.loads((exported / "config.json").read_text())
    assert config["model_type"] == json.loads((world / f"full {name}" / "config.json").read_text())["model_type"]
    thinker = load_causal_lm(exported, "float32")
    assert all(
        new[f"thinker.{key}"].equal(weight) for key, weight in thinker.state_dict().items() if "experts" not in key
    )
