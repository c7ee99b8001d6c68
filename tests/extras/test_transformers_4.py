"""What ROLL exports, read by transformers 4 in an environment of its own: the same logits and tokens as in 5."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds.exported_models import export_all
from worlds.extras import extra_python

from roll.models import write_transformers4_settings
from roll.models.directory import read_json

pytestmark = [pytest.mark.extras, pytest.mark.timeout(900)]

TOKENS = (np.arange(2 * 200).reshape(2, 200) * 7919 % 256 + 4).tolist()
"""Longer than the lengths from which scaled rotary embeddings differ."""
TEXTS = ["What is 12 + 30?", " Ünïcode ✓\n\n<|im_end|> x<|endoftext|>", "<|im_start|>user\nhello<|im_end|>"]


def read_by_version_4(models: dict[str, Path], directory: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the logits by model, and what else is said of each."""
    python = extra_python("transformers-4")
    request = {"models": {name: str(path) for name, path in models.items()}, "tokens": TOKENS, "texts": TEXTS}
    (directory / "request.json").write_text(json.dumps(request))
    script = Path(__file__).with_name("read_exports.py")
    command = [python, "-P", script, directory / "request.json", directory / "answer.npz"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    answer = np.load(directory / "answer.npz")
    assert str(answer["version"]).startswith("4.57.")
    return {name: answer[f"{name}/logits"] for name in models}, json.loads(str(answer["said"]))


@torch.no_grad()
def logits_of(directory: Path) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model(torch.tensor(TOKENS)).logits.double().numpy()


def compare(name: str, directory: Path, logits: np.ndarray, said: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert said["missing"] == [], name
    assert np.abs(logits - logits_of(directory)).max() <= 1e-4, name
    assert said["class"].endswith("Fast"), said["class"]
    assert said["tokens"] == [tokenizer(text)["input_ids"] for text in TEXTS]
    assert said["decoded"] == [tokenizer.decode(tokens) for tokens in said["tokens"]]
    assert said["special"] == sorted(tokenizer.all_special_tokens)
    chat = [{"role": "user", "content": TEXTS[0]}]
    assert said["chat"] == tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def test_extras_transformers_4_exports_are_read_alike_by_transformers_4_and_5(tmp_path: Path):
    extra_python("transformers-4")
    models = export_all(tmp_path)
    logits, said = read_by_version_4(models, tmp_path)
    for name, directory in models.items():
        compare(name, directory, logits[name], said[name])
        assert said[name]["dtype"] == "torch.float32"
        newer = AutoModelForCausalLM.from_pretrained(tmp_path / "sources" / name, dtype=torch.float32).eval()
        with torch.no_grad():
            assert np.array_equal(logits_of(directory), newer(torch.tensor(TOKENS)).logits.double().numpy()), name


def test_extras_transformers_4_exports_without_the_older_spellings_are_read_otherwise_by_transformers_4(tmp_path: Path):
    """The comparison above can fail: without the older keys version 4 computes something else and says nothing."""
    extra_python("transformers-4")
    models = export_all(tmp_path, ["llama", "qwen2"])
    for directory in models.values():
        config = read_json(directory / "config.json")
        for key in ("rope_theta", "rope_scaling"):
            config.pop(key, None)
        (directory / "config.json").write_text(json.dumps(config))
    logits, _ = read_by_version_4(models, tmp_path)
    for name, directory in models.items():
        assert np.abs(logits[name] - logits_of(directory)).max() > 1e-2, name
        write_transformers4_settings(directory)
    logits, said = read_by_version_4(models, tmp_path)
    for name, directory in models.items():
        compare(name, directory, logits[name], said[name])


def test_extras_transformers_4_exports_of_the_default_model_are_read_alike_by_transformers_4_and_5(
    tmp_path: Path, default_model: Path
):
    extra_python("transformers-4")
    directory = Path(shutil.copytree(default_model, tmp_path / "model"))
    write_transformers4_settings(directory)
    logits, said = read_by_version_4({"default": directory}, tmp_path)
    compare("default", directory, logits["default"], said["default"])
