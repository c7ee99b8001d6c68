"""Supervised fine-tuning and DPO beside TRL's SFTTrainer and DPOTrainer: same model, examples, steps; both in one run.

    make bench NAME=sft

Examples are questions of GSM8K with their solutions (`--data`: the file that `examples/gsm8k.yaml` names). A pair has
worked examples before the question; its other answer is the next question's. Both sides learn from the same examples,
ROLL as `roll train` does it. TRL packs with its `bfd` strategy, whose mask keeps examples apart, a row for each forward
pass and gradients of several added up (one long row would be mostly mask), in each dtype it offers; it fits no prompts
together. Reference log-probs are computed before the first step on both sides. The sides take turns, each in a process
of its own; first steps of each process warm up and are not counted. Tokens are those of the examples: padding never
counts, and a pair's prompt counts with each of its two answers, however often it is computed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _trl_sides import Setting, Work, train_dpo, train_sft

if TYPE_CHECKING:
    from roll.types import Conversation

KINDS = ("sft", "dpo")
MODEL = "smollm2-135m-instruct"
LEARNING_RATE = 1e-5
PER_STEP = {"sft": 8, "dpo": 2}
"""Examples, or pairs."""
NUM_ROWS = 512
"""Of the file."""
WORKED_EXAMPLES = 4
WARM_UP_STEPS = 1
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
DTYPES = ("bfloat16", "autocast", "float32")
PASSIVE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def setting_of(kind: str, dtype: Any) -> Setting:
    """TRL's fastest way through a step here."""
    if kind == "dpo":
        return Setting(dtype=dtype, rows=PER_STEP[kind])
    return Setting(dtype=dtype, packing="bfd", rows=1, passes=2, length=1024)


def rows_of(kind: str, file: Path) -> list[dict[str, Any]]:
    """What is learnt, in a form that both sides read."""
    read = [json.loads(line) for line in file.read_text().splitlines()[:NUM_ROWS]]
    if kind == "sft":
        return [{"prompt": row["question"], "completion": row["answer"]} for row in read]
    worked = "\n\n".join(f"Question: {row['question']}\nAnswer: {row['answer']}" for row in read[:WORKED_EXAMPLES])
    return [
        {
            "prompt": [{"role": "user", "content": f"{worked}\n\nQuestion: {row['question']}\nAnswer:"}],
            "chosen": [{"role": "assistant", "content": row["answer"]}],
            "rejected": [{"role": "assistant", "content": other["answer"]}],
        }
        for row, other in pairwise(read[WORKED_EXAMPLES:])
    ]


def run_config(kind: str, rows: Path, directory: str, num_steps: int) -> dict[str, Any]:
    """A run of ROLL that does what TRL is asked to do."""
    return {
        "pipeline": "sft" if kind == "sft" else "preference",
        "name": "bench",
        "output_dir": directory,
        "model": MODEL,
        "data": [{"source": "file", "path": str(rows), "held_out": 0.0}],
        "training": {
            "num_steps": num_steps,
            "examples_per_step": PER_STEP[kind],
            "learning_rate": LEARNING_RATE,
        },
        "evaluation": {"every_num_steps": 0, "before_training": False},
        "checkpoint": {"at_end": False},
        "tracking": {"console": "quiet"},
    }


def run_roll(kind: str, rows: Path, num_steps: int) -> dict[str, Any]:
    """`roll train`; what each step took, from drawing its examples to its boundary."""
    import torch

    import roll
    from roll.training.backend import TorchBackend
    from roll.types import StepResult, TrainingBatch

    counted: list[dict[str, float]] = []
    train_step = TorchBackend.train_step

    def watched(self: TorchBackend, batch: TrainingBatch, loss: Any) -> StepResult:
        began = time.process_time()
        result = train_step(self, batch, loss)
        used = time.process_time() - began
        counted.append({"processor_seconds": used, "tokens": sum(map(len, batch.samples))})
        return result

    TorchBackend.train_step = watched  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as directory:
        roll.train(run_config(kind, rows, directory, num_steps))
        lines = (Path(directory) / "bench" / "metrics.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if "time/step_s" in row]
    steps = [
        {
            "seconds": row["time/step_s"],
            "trainer_seconds": row["time/forward_backward_s"] + row["time/optimizer_s"],
            "computed_tokens": row["training/num_tokens"],
            "loss_tokens": row["training/num_loss_tokens"],
            **more,
        }
        for row, more in zip(found, counted, strict=True)
    ]
    return {"steps": steps, "losses": [row["training/loss"] for row in found], "num_threads": torch.get_num_threads()}


def run_trl(kind: str, rows: Path, num_steps: int, dtype: str) -> dict[str, Any]:
    """TRL's trainer on the examples that ROLL draws in so many steps; twice as many where it packs, for full rows."""
    from roll.config.pipelines.preference import PreferenceConfig
    from roll.config.pipelines.sft import SFTConfig
    from roll.pipelines.supervised.preparation import prepare

    section = SFTConfig if kind == "sft" else PreferenceConfig
    config = section.model_validate(run_config(kind, rows, "runs", num_steps))
    examples = prepare(config, "supervised" if kind == "sft" else "pair").examples
    draws = examples.train.draw(num_steps * PER_STEP[kind] * (2 if kind == "sft" else 1))
    work = Work(model=MODEL, num_steps=num_steps, learning_rate=LEARNING_RATE)
    if kind == "dpo":
        return train_dpo([_pair(*draw.example.conversations) for draw in draws], setting_of(kind, dtype), work)
    samples = [sample for draw in draws for sample in examples.sample_builder.build_samples(draw)[0]]
    learnt = [(s.token_ids.tolist(), s.loss_mask.tolist()) for s in samples]
    given = [{"input_ids": i, "labels": [t if m else -100 for t, m in zip(i, k, strict=True)]} for i, k in learnt]
    return train_sft(given, setting_of(kind, dtype), work)


def _pair(chosen: Conversation, rejected: Conversation) -> dict[str, Any]:
    return {
        "prompt": [m.to_dict() for m in chosen.messages[: chosen.num_prompt_messages]],
        "chosen": [m.to_dict() for m in chosen.messages[chosen.num_prompt_messages :]],
        "rejected": [m.to_dict() for m in rejected.messages[rejected.num_prompt_messages :]],
    }


def machine_rate() -> dict[str, float]:
    """FLOP/s of bfloat16 products here, and what the model asks for, forward and backward, beside attention."""
    import torch
    from _trainer_parts import Products, square_rate

    from roll.models import load_causal_lm

    products = Products.of(load_causal_lm(MODEL, torch.bfloat16))
    return {
        "flops_per_s": square_rate(torch.device("cpu")),
        "flops_per_token": products.projection_flops(1, 0),
        "flops_per_loss_token": products.projection_flops(0, 1),
    }


def in_process(side: str, kind: str, rows: Path, arguments: argparse.Namespace, dtype: str = "") -> dict[str, Any]:
    """Run one side in a fresh process; all but the steps that warm it up."""
    words = ["--side", side, "--kind", kind, "--data", str(rows), "--steps", str(arguments.steps), "--dtype", dtype]
    waiting = PASSIVE if arguments.passive or side == "roll" else {}
    # A trainer that has the machine to itself waits as the OpenMP runtime likes best, by spinning.
    environment = {name: value for name, value in os.environ.items() if name not in WAITING} | waiting
    print(f"{kind} {side} {dtype}: {arguments.steps} steps ...", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{kind} {side} {dtype} failed:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    result["steps"] = result["steps"][WARM_UP_STEPS:]
    print(f"    {rate(result, 'tokens', 'seconds'):.0f} tokens/s", file=sys.stderr, flush=True)
    return result


def rate(result: dict[str, Any], what: str, time_name: str) -> float:
    """The median step's."""
    return statistics.median(step[what] / step[time_name] for step in result["steps"])


def rates(result: dict[str, Any]) -> dict[str, Any]:
    """What is said of a side."""
    found = {
        "tokens_per_s": rate(result, "tokens", "seconds"),
        "loss_tokens_per_s": rate(result, "loss_tokens", "seconds"),
        "tokens_per_processor_s": rate(result, "tokens", "processor_seconds"),
        "tokens_per_step": statistics.fmean(step["tokens"] for step in result["steps"]),
    }
    return {**found, **result}


def compare(kind: str, rows: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both sides of a kind, in turns: ROLL, TRL in each dtype, ROLL."""
    first = in_process("roll", kind, rows, arguments)
    trl = {dtype: rates(in_process("trl", kind, rows, arguments, dtype)) for dtype in arguments.trl_dtypes.split(",")}
    second = in_process("roll", kind, rows, arguments)
    roll = rates({**first, "steps": first["steps"] + second["steps"]})
    fastest = max(trl, key=lambda dtype: trl[dtype]["tokens_per_s"])
    names = "tokens_per_s", "loss_tokens_per_s", "tokens_per_processor_s"
    return {
        "roll": roll,
        "trl": trl,
        "trl_fastest": fastest,
        "trl_setting": setting_of(kind, fastest).name,
        "ratio": {name: roll[name] / trl[fastest][name] for name in names},
    }


def share_of_rate(kind: dict[str, Any], machine: dict[str, float]) -> float:
    """Of the machine's matmul rate, in ROLL's median step."""
    per_step = statistics.median(
        (step["computed_tokens"] * machine["flops_per_token"] + step["loss_tokens"] * machine["flops_per_loss_token"])
        / step["seconds"]
        for step in kind["roll"]["steps"]
    )
    return per_step / machine["flops_per_s"]


def main() -> None:
    """Measure both sides of each kind and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/gsm8k/train.jsonl"), help="GSM8K's train.jsonl")
    parser.add_argument("--kinds", default="sft,dpo", help="by comma")
    parser.add_argument("--steps", type=int, default=6, help="of each process, with those that warm up")
    parser.add_argument("--trl-dtypes", default=",".join(DTYPES), help="by comma")
    parser.add_argument("--passive", action="store_true", help="TRL's threads sleep while they wait, too")
    parser.add_argument("--side", choices=["roll", "trl", "machine"], help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side == "machine":
        print(json.dumps(machine_rate()))
        return
    if arguments.side:
        given = arguments.kind, arguments.data, arguments.steps
        print(json.dumps(run_roll(*given) if arguments.side == "roll" else run_trl(*given, arguments.dtype)))
        return
    from _report import report

    if not arguments.data.exists():
        raise SystemExit(f"{arguments.data} does not exist: examples/gsm8k.yaml says how to fetch it, or give --data.")
    with tempfile.TemporaryDirectory() as directory:
        for kind in arguments.kinds.split(","):
            load = os.getloadavg()
            rows = Path(directory) / f"{kind}.jsonl"
            rows.write_text("\n".join(map(json.dumps, rows_of(kind, arguments.data))))
            command = [sys.executable, __file__, "--side", "machine"]
            machine = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            found = compare(kind, rows, arguments)
            found["machine"], found["share_of_machine_rate"] = machine, share_of_rate(found, machine)
            report(kind, {**found, "passive": arguments.passive, "load": [load, os.getloadavg()]})


if __name__ == "__main__":
    main()
