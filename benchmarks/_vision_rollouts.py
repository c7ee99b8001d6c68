"""10,000 rollouts of 100 images: how often each image is decoded, memory over time, and what text-only rollouts cost.

    rows            one question about each image; a run with the image column of a file
    environment     one screenshot per episode, sent by an environment as the bytes of a file
    text            the same questions without images, and without a vision tower: this checkout against an earlier one

Every run is a program of its own. A module `sitecustomize` counts in all of its processes how often an image is opened
by Pillow, which is how ROLL decodes. The models are small and have random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from _report import ROOT, report
from PIL import Image

BEFORE = "72260725"
"""The last commit without code for images."""
NUM_IMAGES = 100
WIDTH, HEIGHT = 640, 480
GROUP_SIZE = 8
MAX_SAMPLES = 30
"""Maximum number of measurements of memory that are stored for a run."""
PROMPTS_PER_STEP = 50
TEXT_STEPS = 12
"""Number of steps of a text-only run; CPU time counts after the second."""
TOKENIZER = "smollm2-135m-instruct"

_COUNTER = """
import os
log = os.environ.get("ROLL_DECODED")
if log:
    from PIL import Image
    original = Image.open
    def count(*args, **kwargs):
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{os.getpid()}\\n".encode())
        os.close(descriptor)
        return original(*args, **kwargs)
    Image.open = count
"""
_PROGRAM = """
import json, os, pathlib, sys, threading, time
import psutil, roll

config, first, last = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
metrics = pathlib.Path(config["output_dir"], config["name"], "metrics.jsonl")
spent = {}

def measure():
    own = psutil.Process()
    found = []
    for process in [own, *own.children(recursive=True)]:
        try:
            found.append(process.cpu_times())
        except psutil.Error:
            pass
    return sum(times.user + times.system for times in found)

def watch():
    while True:
        done = metrics.read_text().count('"kind": "train"') if metrics.exists() else 0
        for step in (first, last):
            if done >= step and step not in spent:
                spent[step] = measure(), time.monotonic()
        time.sleep(0.02)

threading.Thread(target=watch, daemon=True).start()
roll.train(config)
time.sleep(0.1)
(early, began), (late, ended) = spent[first], spent[last]
print(json.dumps({"cpu_s": late - early, "began": began, "ended": ended}))
"""
_HELPERS = '''
from pathlib import Path


def reward(text, answer, metadata):
    """Return 1 for answers of odd length, so that groups of random answers have a spread."""
    return float(len(text) % 2)


class Screens:
    """Shows one of the images of a folder, chosen by the seed."""

    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*.png"))

    def reset(self, seed=None):
        return ("What is this?", self.paths[(seed or 0) % len(self.paths)].read_bytes()), {}

    def step(self, action):
        return "", float(len(action) % 2), True, False, {}
'''


def write_models(directory: Path) -> dict[str, Path]:
    """Write a small model with a vision tower, and its language model alone; both have random weights."""
    import torch
    import transformers as hf

    from roll.models import load_tokenizer

    torch.manual_seed(0)
    tokenizer = load_tokenizer(TOKENIZER)
    found = {"text": directory / "text-model", "vision": directory / "vision-model"}
    text: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 49280, "tie_word_embeddings": True}
    hf.LlamaForCausalLM(hf.LlamaConfig(**text)).save_pretrained(found["text"])
    tokenizer.save_pretrained(found["text"])

    from _vision_model import IMAGE_TOKENS, TEMPLATE

    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS)})
    tokenizer.chat_template = TEMPLATE
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.SmolVLMConfig(
        text_config={**text, "model_type": "llama"},
        vision_config={**tower, "image_size": 64, "patch_size": 8},
        image_token_id=int(tokenizer.convert_tokens_to_ids("<image>")),  # type: ignore[arg-type]
        scale_factor=2,
        tie_word_embeddings=True,
    )
    hf.SmolVLMForConditionalGeneration(config).save_pretrained(found["vision"])
    size = {"longest_edge": 64}
    images = hf.SmolVLMImageProcessor(size=size, max_image_size=size, do_image_splitting=False)
    hf.SmolVLMProcessor(images, tokenizer, hf.SmolVLMVideoProcessor(), image_seq_len=16).save_pretrained(
        found["vision"]
    )
    return found


def write_images(directory: Path) -> dict[str, Path]:
    """Write the images, and the rows with and without them."""
    folder = directory / "images"
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    rows: dict[str, list[str]] = {"vision": [], "text": []}
    for number in range(NUM_IMAGES):
        small = rng.integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((WIDTH, HEIGHT)).save(folder / f"{number:03}.png")
        asked = {"answer": "3", "prompt": [{"role": "user", "content": f"What is on screenshot {number}?"}]}
        rows["text"].append(json.dumps(asked))
        rows["vision"].append(json.dumps({**asked, "images": [f"images/{number:03}.png"]}))
    for name, lines in rows.items():
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "helpers.py").write_text(_HELPERS)
    return {name: directory / f"{name}.jsonl" for name in rows}


def build_config(directory: Path, name: str, model: Path, num_steps: int, **settings: Any) -> dict[str, Any]:
    """Return the configuration of a run with short answers."""
    return {
        "name": name,
        "model": {"path": str(model), "dtype": "float32"},
        "rollout": {"prompts_per_step": PROMPTS_PER_STEP, "group_size": GROUP_SIZE, "max_new_tokens": 4},
        "training": {"num_steps": num_steps, "learning_rate": 1e-6},
        "inference": {"engine": "hf"},
        "evaluation": {"num_prompts": 8},
        "tracking": {"console": "plain"},
        "output_dir": str(directory / "runs"),
        **settings,
    }


def build_row_config(directory: Path, name: str, model: Path, rows: Path, num_steps: int) -> dict[str, Any]:
    """Return the configuration of a run over the rows of a file."""
    reward = {"type": "python", "function": f"{directory}/helpers.py:reward"}
    data = [{"source": "file", "path": str(rows), "reward": reward}]
    return build_config(directory, name, model, num_steps, pipeline="rlvr", data=data)


def run(directory: Path, config: dict[str, Any], *, checkout: Path = ROOT, first: int = 1) -> dict[str, Any]:
    """Run a configuration in a program of its own, and return what was measured from outside.

    Args:
        directory: For logs.
        config: The configuration.
        checkout: The checkout to run.
        first: The step after which CPU time counts.
    """
    name, last = config["name"], config["training"]["num_steps"]
    shutil.rmtree(Path(config["output_dir"], name), ignore_errors=True)
    hook = directory / "hook"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(_COUNTER)
    decoded = directory / f"{name}-decoded.txt"
    decoded.write_text("")
    sources = [hook, checkout / "src", checkout / "packages" / "roll-sandbox" / "src"]
    path = os.pathsep.join([*map(str, sources), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "ROLL_DECODED": str(decoded)}
    command = [sys.executable, "-c", _PROGRAM, json.dumps(config), str(first), str(last)]
    began = time.monotonic()
    with (directory / f"{name}.log").open("w") as log:
        program = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        memory = follow_memory(program, began)
        output = program.communicate()[0]
    if program.returncode:
        raise SystemExit(f"the run '{name}' failed with exit code {program.returncode}: see {directory / name}.log")
    by_process = Counter(decoded.read_text().split())
    spent = json.loads(output.splitlines()[-1])
    num_rollouts = (last - first) * PROMPTS_PER_STEP * GROUP_SIZE
    return {
        "seconds": round(time.monotonic() - began, 1),
        "rollouts": last * PROMPTS_PER_STEP * GROUP_SIZE,
        "decoded": sum(by_process.values()),
        "processes_that_decoded": len(by_process),
        "cpu_ms_per_rollout": round(1000 * spent["cpu_s"] / num_rollouts, 3),
        "rollouts_per_s": round(num_rollouts / (spent["ended"] - spent["began"]), 1),
        "memory": [one for one in memory if spent["began"] - began <= one["seconds"] <= spent["ended"] - began],
    }


def follow_memory(program: subprocess.Popen[str], began: float) -> list[dict[str, float]]:
    """Return the memory of a program every few seconds until it ends: RSS of its first process, PSS of all, in MiB."""
    found: list[dict[str, float]] = []
    while True:
        try:
            program.wait(timeout=2)
            return found
        except subprocess.TimeoutExpired:
            pass
        try:
            own = psutil.Process(program.pid)
            rss = own.memory_info().rss
        except psutil.Error:
            return found
        pss = 0
        for process in [own, *own.children(recursive=True)]:
            try:
                pss += process.memory_full_info().pss
            except psutil.Error:  # it has ended
                continue
        seconds = round(time.monotonic() - began, 1)
        found.append({"seconds": seconds, "rss_mib": round(rss / 2**20, 1), "pss_mib": round(pss / 2**20, 1)})
        print(json.dumps(found[-1]), flush=True)


def compute_quarters(memory: list[dict[str, float]], key: str) -> list[float]:
    """Return the mean memory in MiB of each quarter of the time after the first step."""
    parts = np.array_split([entry[key] for entry in memory], 4)
    return [round(float(part.mean()), 1) for part in parts if len(part)]


def compare_text(directory: Path, model: Path, rows: Path, commit: str, num_repeats: int) -> dict[str, Any]:
    """Return the CPU time of text-only rollouts in this checkout and at an earlier commit, run alternately."""
    before = directory / "before"
    if not before.exists():
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", str(before), commit], check=True)
    found: dict[str, list[float]] = {"before": [], "now": []}
    try:
        for repeat in range(num_repeats):
            order = [("before", before), ("now", ROOT)]
            for name, checkout in order if repeat % 2 == 0 else order[::-1]:
                config = build_row_config(directory, f"text-{name}", model, rows, TEXT_STEPS)
                measured = run(directory, config, checkout=checkout, first=2)
                found[name].append(round(measured["cpu_ms_per_rollout"], 3))
                print(name, found[name][-1], "ms of CPU time per rollout", flush=True)
    finally:
        subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(before)], check=False)
    ratios = {
        f"ratio_of_{name}": round(compute(found["now"]) / compute(found["before"]), 3)
        for name, compute in (("medians", statistics.median), ("minima", min))
    }
    return {"commit_before": commit, **found, **ratios}


def measure_rollouts(directory: Path, *, num_rollouts: int = 10_000, before: str = BEFORE, repeats: int = 5) -> None:
    """Run all parts, and write `results/vision_rollouts.json`.

    Args:
        directory: For models, data and runs.
        num_rollouts: Number of rollouts of each run with images.
        before: The commit to compare text-only rollouts with; empty: no comparison.
        repeats: Number of runs of each side of the comparison.
    """
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    models, rows = write_models(directory), write_images(directory)
    num_steps = -(-num_rollouts // (PROMPTS_PER_STEP * GROUP_SIZE))
    entry = {"environment": f"{directory}/helpers.py:Screens", "options": {"folder": str(directory / "images")}}
    environments = [{**entry, "num_turns": 1, "host": "loop"}]
    configs = {
        "rows": build_row_config(directory, "rows", models["vision"], rows["vision"], num_steps),
        "environment": build_config(
            directory, "environment", models["vision"], num_steps, pipeline="agentic", environments=environments
        ),
    }
    figures: dict[str, Any] = {"images": NUM_IMAGES, "pixels": [WIDTH, HEIGHT]}
    for name, config in configs.items():
        figures[name] = run(directory, config)
        figures[name] |= {key: compute_quarters(figures[name]["memory"], key) for key in ("rss_mib", "pss_mib")}
        figures[name]["memory"] = figures[name]["memory"][:: -(-len(figures[name]["memory"]) // MAX_SAMPLES)]
        print(name, json.dumps({key: value for key, value in figures[name].items() if key != "memory"}), flush=True)
    if before:
        figures["text"] = compare_text(directory, models["text"], rows["text"], before, repeats)
    report("vision_rollouts", figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("runs/vision-rollouts"))
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--before", default=BEFORE)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    measure_rollouts(chosen.directory, num_rollouts=chosen.rollouts, before=chosen.before, repeats=chosen.repeats)
