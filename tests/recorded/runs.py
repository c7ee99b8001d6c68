"""Short runs of all online pipelines, whose numbers may not change while the code around them is rebuilt.

    python tests/recorded/runs.py record     write the hashes for this kind of machine to hashes.json
    python tests/recorded/runs.py compare    run again, and name every number that differs

Metrics (without durations and memory), the tokens, log-probs, rewards and advantages of the rollouts, the ledger and
the weights have a hash each, so that a difference says where it begins. Sums of floats differ between kinds of
processor and between versions of torch, so hashes are kept by both. For a machine that has none yet, `record` at the
commit to compare with, then `compare` at the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
HASHES = Path(__file__).with_name("hashes.json")
NUM_STEPS = 3
LETTERS = {"type": "regex", "pattern": "[a-m]", "require_finished": False}
PLAYED = {"environment": "guess_number", "num_turns": 2, "reward": [{"type": "environment"}, LETTERS]}
TURNS = {"source": "guess_number", "max_number": 3, "num_turns": 2, "prompt_template": "{prompt}"}

RUNS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"algorithm": {"type": "ppo", "critic": {"learning_rate": 1e-2}}},
    "ipa": {"algorithm": {"type": "ipa"}, "data": [{**TURNS, "demonstrations": True}]},
    "lora": {"model": {"lora": {"rank": 4}}},
    "asynchronous": {"algorithm": {"type": "decoupled_ppo"}},
    "agentic": {
        "pipeline": "agentic",
        "environments": [
            {**PLAYED, "domain": name, "options": {"max_number": most}} for name, most in (("near", 3), ("far", 9))
        ],
        "curriculum": {"num_episodes": 8},
        "anchors": {},
        "algorithm": {"type": "ipa"},
        "inference": {"engine": "hf", "max_context": 400},
    },
    "distill": {"pipeline": "distill", "teacher": "TEACHER", "distillation": {"reward_weight": 0.5}},
    "distill_reward": {
        "pipeline": "distill",
        "teacher": {"model": "TEACHER", "backend": "engine"},
        "distillation": {"mode": "reward"},
        "updates": {"num_minibatches": 2, "num_epochs": 2},
    },
    "preference_online": {"pipeline": "preference_online", "pairing": {"type": "all"}},
    "rejection_sampling": {"pipeline": "rejection_sampling", "rejection": {"keep": 2}},
}
"""What each run sets beyond `chaos.harness.tiny_config`. `asynchronous` generates beside training, at a ratio of 0."""
ADDED = ("env/",)
"""Measurements that came after the hashes were recorded: they change no other number."""


def configuration(name: str, model: Path, directory: Path) -> dict[str, Any]:
    """The whole configuration of one run."""
    from chaos.harness import tiny_config

    base = {**tiny_config(model, num_steps=NUM_STEPS), "output_dir": str(directory)}
    if "environments" in RUNS[name]:
        del base["data"]
    given = json.loads(json.dumps(RUNS[name]).replace("TEACHER", str(model.with_name("teacher"))))
    for section, changes in given.items():
        base[section] = {**base.get(section, {}), **changes} if isinstance(changes, dict) else changes
    return base


def run(name: str, model: Path, directory: Path) -> None:
    """Train in this process."""
    import roll
    from roll.pipelines.online.online_run import OnlineRun

    if name == "asynchronous":
        OnlineRun.is_asynchronous = property(lambda online: True)
    roll.train(configuration(name, model, directory))


def hashes(directory: Path) -> dict[str, str]:
    """What a finished run left behind, as hashes by name, in the order in which a run writes it."""
    from chaos.harness import Run

    found = Run.at(directory)
    rows = {
        f"metrics/{row['kind']}/{row['step']}": {k: v for k, v in row.items() if not k.startswith(ADDED)}
        for row in found.metrics()
        if row["kind"] in {"train", "eval"}
    }
    tables = {f"rollouts/{name}": table for name, table in found.rollouts().items()}
    written = {
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        for name, value in {**tables, **rows, "ledger": found.ledger()}.items()
    }
    weights = sorted(found.checkpoint().glob("model/*.safetensors"))
    return written | {f"weights/{path.name}": hashlib.sha256(_as_saved(path)).hexdigest() for path in weights}


def _as_saved(path: Path) -> bytes:
    """A file of weights as `safetensors` itself writes it, whoever wrote it: the same tensors give the same bytes."""
    from safetensors.torch import load_file, save

    return save(load_file(path), metadata={"format": "pt"})


def machine() -> str:
    """What two machines must share so that their sums agree bit for bit, as far as is known."""
    import torch

    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    units = [unit for unit in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if f" {unit} " in f"{flags} "]
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {units[0] if units else 'plain'}"


def all_hashes() -> dict[str, dict[str, str]]:
    """Every run, each in a process of its own with one thread."""
    from worlds.tiny_model import write_tiny_model

    with tempfile.TemporaryDirectory() as scratch:
        model = write_tiny_model(Path(scratch) / "tiny")
        write_tiny_model(Path(scratch) / "teacher", seed=1)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        for name in RUNS:
            print(f"  {name} …", file=sys.stderr, flush=True)
            command = [sys.executable, __file__, "run", name, str(model), str(Path(scratch) / name)]
            subprocess.run(command, check=True, env=environment)
        return {name: hashes(Path(scratch) / name / "run") for name in RUNS}


def differences(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> list[str]:
    """What differs, is missing or is new, by run."""
    return [
        f"{name}: {key}"
        for name in RUNS
        for key in [*after[name], *(before[name].keys() - after[name].keys())]
        if before[name].get(key) != after[name].get(key)
    ]


def main() -> None:
    """See the module."""
    from roll.process_environment import prepare_environment

    prepare_environment()
    sys.path.insert(0, str(TESTS))
    verb, *rest = sys.argv[1:] or ["compare"]
    if verb == "run":
        name, model, directory = rest
        return run(name, Path(model), Path(directory))
    kept = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    if verb == "compare" and machine() not in kept:
        sys.exit(f"no hashes for '{machine()}' (there are: {', '.join(kept) or 'none'}): record them first.")
    found = all_hashes()
    if verb == "record":
        HASHES.write_text(json.dumps({**kept, machine(): found}, indent=1, sort_keys=True) + "\n")
        return print(f"recorded {sum(map(len, found.values()))} hashes of {len(found)} runs for '{machine()}'.")
    different = differences(kept[machine()], found)
    print("\n".join([f"differs: {each}" for each in different] or ["every number is the same."]))
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
