"""Runs that train on images: from the file of rows to the exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file
from worlds.vision_models import picture, write_vision_model

import roll
from roll.models.multimodal import MediaProcessor, ProcessedMedia
from roll.pipelines.exporting import export


@pytest.fixture(scope="module", name="world")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision")
    write_vision_model(directory / "model", "smolvlm", heads=2)
    rows = []
    for number in range(12):
        picture(number, 24 + 4 * number, 40).save(directory / f"{number}.png")
        rows.append({"prompt": "<image>What is it?", "answer": str(number), "images": [f"{number}.png"]})
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # In a file of its own: workers import it, and this module imports transformers.
    (directory / "reward.py").write_text(
        "def share_of_letters(text, answer, metadata):\n    return sum(letter.isalpha() for letter in text) / 16\n"
    )
    return directory


def online(world: Path, tmp_path: Path, **inference: Any) -> dict[str, Any]:
    return {
        "pipeline": "rlvr",
        "name": "images",
        "model": {"path": str(world / "model"), "dtype": "float32"},
        "data": [
            {
                "source": "file",
                "path": str(world / "rows.jsonl"),
                "held_out": 0.25,
                "reward": {
                    "type": "python",
                    "function": f"{world / 'reward.py'}:share_of_letters",
                    "require_finished": False,
                },
            }
        ],
        "rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 8},
        "training": {"num_steps": 2, "learning_rate": 1e-3},
        "evaluation": {"every_num_steps": 2},
        "checkpoint": {"at_end": True},
        "inference": inference,
        "output_dir": str(tmp_path),
    }


def check_run(directory: Path, *, has_engine: bool = True) -> None:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    probes = [line["sync/probe_mean_abs"] for line in lines if "sync/probe_mean_abs" in line]
    assert bool(probes) == has_engine
    assert all(value < 1e-4 for value in probes)
    assert len(list((directory / "media").rglob("*"))) > 12
    model = directory / "checkpoints" / "step-000002" / "model"
    assert transformers.AutoProcessor.from_pretrained(model).image_token == "<image>"
    exported = transformers.AutoModelForImageTextToText.from_pretrained(model)
    assert type(exported).__name__ == "SmolVLMForConditionalGeneration"


def test_images_run_reinforcement_learning_with_the_embedded_engine(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processed: list[bytes] = []
    process = MediaProcessor.process

    def count(self: MediaProcessor, image: Any) -> ProcessedMedia:
        processed.append(image.tobytes())
        return process(self, image)

    monkeypatch.setattr(MediaProcessor, "process", count)
    roll.train(online(world, tmp_path, engine="hf") | {"tracking": {"record_rollouts": True}})
    check_run(tmp_path / "images")
    # Controller, trainer and engine share the images: each is processed once, and the small image for checks too.
    assert len(processed) == len(set(processed)) == 13
    roll.replay(tmp_path / "images", ["name=again"])
    weights = [
        load_file(tmp_path / name / "checkpoints" / "step-000002" / "model" / "model.safetensors")
        for name in ("images", "again")
    ]
    assert all(weight.equal(weights[1][key]) for key, weight in weights[0].items())


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_images_run_reinforcement_learning_with_vllm(world: Path, tmp_path: Path) -> None:
    roll.train(online(world, tmp_path, engine="vllm"))
    check_run(tmp_path / "images")


def test_images_run_supervised_fine_tuning(world: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (world / "rows.jsonl").read_text().splitlines()]
    examples = [
        {
            "images": row["images"],
            "messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}],
        }
        for row in rows
    ]
    path = world / "examples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in examples))
    roll.train(
        {
            "pipeline": "sft",
            "name": "images",
            "model": {"path": str(world / "model"), "dtype": "float32"},
            "data": [{"source": "file", "path": str(path), "held_out": 0.25}],
            "training": {"num_steps": 2, "examples_per_step": 4, "learning_rate": 1e-3},
            "checkpoint": {"every_num_steps": 1},  # training continues after an export
            "output_dir": str(tmp_path),
        }
    )
    check_run(tmp_path / "images", has_engine=False)
    exported = export(tmp_path / "images", tmp_path / "exported")
    assert "pipeline_tag: image-text-to-text" in (exported / "README.md").read_text()
    assert type(transformers.AutoProcessor.from_pretrained(exported)).__name__ == "SmolVLMProcessor"
    weights = [
        transformers.AutoModelForImageTextToText.from_pretrained(model).state_dict()
        for model in (exported, tmp_path / "images" / "checkpoints" / "step-000002" / "model")
    ]
    assert all(weight.equal(weights[1][key]) for key, weight in weights[0].items())


def test_images_run_episodes_with_screenshots(world: Path, tmp_path: Path) -> None:
    settings = online(world, tmp_path, engine="hf")
    environment = {
        "environment": "gui:Click-v0-hard",
        "options": {"width": 56, "height": 40, "rows": 4, "columns": 5, "num_targets": 1, "max_turns": 3},
        "num_turns": 3,
        "num_held_out": 2,
    }
    del settings["data"]
    settings |= {"pipeline": "agentic", "environments": [environment]}
    settings["inference"] |= {"max_context": 480}
    settings["rollout"]["max_new_tokens"] = 6
    roll.train(settings)
    check_run(tmp_path / "images")


def test_images_run_evaluation_without_a_run(world: Path, tmp_path: Path) -> None:
    settings = online(world, tmp_path, engine="hf")
    metrics = roll.evaluate(settings)
    assert 0 <= metrics["eval/score"] <= 1
    assert not list(tmp_path.iterdir())
