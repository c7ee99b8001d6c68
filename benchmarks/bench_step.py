"""Time per GRPO step against TRL's GRPOTrainer: same model, prompts, group size, lengths; both in one run.

    make bench NAME=step

Every step draws 8 prompts x 8 rollouts of at most 32 new tokens, scores them, and trains on all 64, equal rewards
or not. TRL runs in each dtype it offers, without gradient checkpointing (its faster setting here), and its fastest
one counts. The sides take turns, each in a process of its own; the first steps of each process warm up and are not
counted.

The machine's own rates of matmuls and of copies are measured before and after each side, and ROLL's step is
shown by phase. `ideal_s` is what the step's multiplications and additions would take at the rate of a large square
product; no step can be faster on that machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

PROMPTS_PER_STEP, GROUP_SIZE, MAX_NEW_TOKENS = 8, 8, 32
LEARNING_RATE = 1e-6
WARM_UP_STEPS = 1
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
MODEL = "smollm2-135m-instruct"
PHASES = {
    "generate": "time/generate_s",
    "forward_backward": "time/forward_backward_s",
    "optimizer": "time/optimizer_s",
    "sync_transfer": "sync/transfer_s",
    "sync_probe": "sync/probe_s",
}
"""Parts of ROLL's step, and the metrics that have their seconds."""
COPIED_BYTES = 2**28


def run_config(directory: str, num_steps: int) -> dict[str, Any]:
    """A run of ROLL that does what TRL is asked to do."""
    return {
        "name": "bench-step",
        "output_dir": directory,
        "model": MODEL,
        "algorithm": {"filters": {"skip_zero_variance": False}},
        "data": [{"source": "arithmetic", "reward": "math"}],
        "rollout": {
            "prompts_per_step": PROMPTS_PER_STEP,
            "group_size": GROUP_SIZE,
            "max_new_tokens": MAX_NEW_TOKENS,
        },
        "training": {"num_steps": num_steps, "learning_rate": LEARNING_RATE},
        "evaluation": {"every_num_steps": 0, "before_training": False, "num_prompts": 1, "samples_per_prompt": 1},
        "checkpoint": {"at_end": False},
        "tracking": {"console": "quiet"},
    }


def run_roll(num_steps: int) -> dict[str, Any]:
    """Train with ROLL; seconds of each counted step, and the mean answer length."""
    import roll

    with tempfile.TemporaryDirectory() as directory:
        roll.train(run_config(directory, num_steps))
        lines = (Path(directory) / "bench-step" / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "time/step_s" in row]
    counted = rows[WARM_UP_STEPS:]
    return {
        "seconds": [row["time/step_s"] for row in counted],
        "length": statistics.fmean(row["rollout/length_mean"] for row in counted),
        "phases": {phase: statistics.median(row[name] for row in counted) for phase, name in PHASES.items()},
        "trained_tokens": statistics.median(row["training/num_tokens"] for row in counted),
        "loss_tokens": statistics.median(row["training/num_loss_tokens"] for row in counted),
    }


def run_trl(num_steps: int, dtype: str) -> dict[str, Any]:
    """Train with TRL; seconds of each counted step, and the mean answer length."""
    import time

    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from roll.config.pipelines.rlvr import RLVRConfig
    from roll.data import build_data
    from roll.models import load_causal_lm, load_tokenizer, resolve_model

    path = resolve_model(MODEL)
    tokenizer = load_tokenizer(path)
    config = RLVRConfig.model_validate(run_config("runs", num_steps))
    draws = build_data(config.data, tokenizer, config.seed, 1024).train.draw(PROMPTS_PER_STEP * num_steps)
    dataset = Dataset.from_list(
        [{"prompt": [m.to_dict() for m in d.prompt.messages], "answer": d.prompt.answer} for d in draws]
    )

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [float(a in c[0]["content"]) for c, a in zip(completions, answer, strict=True)]

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends = [time.perf_counter()]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=load_causal_lm(path, torch.bfloat16 if dtype == "bfloat16" else torch.float32),
            processing_class=tokenizer,
            reward_funcs=cast(Any, reward),
            train_dataset=dataset,
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=directory,
                use_cpu=True,
                bf16=dtype == "autocast",
                gradient_checkpointing=False,
                per_device_train_batch_size=PROMPTS_PER_STEP * GROUP_SIZE,
                num_generations=GROUP_SIZE,
                max_completion_length=MAX_NEW_TOKENS,
                max_steps=num_steps,
                learning_rate=LEARNING_RATE,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.train()
        lengths = [r["completions/mean_length"] for r in trainer.state.log_history if "completions/mean_length" in r]
    seconds = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
    return {"seconds": seconds[WARM_UP_STEPS:], "length": statistics.fmean(lengths[WARM_UP_STEPS:])}


def machine_rates() -> dict[str, float]:
    """FLOP/s of bfloat16 products of large square matrices, and bytes/s of a copy in memory."""
    import torch
    from _trainer_parts import seconds_of, square_rate

    device = torch.device("cpu")
    source, target = (torch.ones(COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    return {
        "flops_per_s": square_rate(device),
        "copied_bytes_per_s": COPIED_BYTES / seconds_of(lambda: target.copy_(source), device),
    }


def ideal_seconds(result: dict[str, Any], flops_per_s: float) -> float:
    """Time of the products of one step of ROLL's at a rate: every prompt computed once, each answer generated once."""
    import torch
    from _trainer_parts import Products

    from roll.models import load_causal_lm, resolve_model

    products = Products.of(load_causal_lm(resolve_model(MODEL), torch.bfloat16))
    tokens, predicted = int(result["trained_tokens"]), int(result["loss_tokens"])
    return (products.projection_flops(tokens, predicted) * 4 / 3) / flops_per_s


def in_process(side: str, num_steps: int, dtype: str = "") -> dict[str, Any]:
    """Run one side in a fresh process."""
    command = [sys.executable, __file__, "--side", side, "--steps", str(num_steps), "--dtype", dtype]
    # TRL is one process with the machine to itself: its threads wait as the OpenMP runtime likes best, by spinning.
    environment = {name: value for name, value in os.environ.items() if side == "roll" or name not in WAITING}
    print(f"{side} {dtype}: {num_steps} steps ...", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{side} {dtype} failed:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"    median {statistics.median(result['seconds']):.2f} s per step", file=sys.stderr, flush=True)
    return result


def main() -> None:
    """Measure both sides and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=["roll", "trl"])
    parser.add_argument("--dtype", default="")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--trl-dtypes", default="float32,bfloat16,autocast", help="of TRL, by comma")
    arguments = parser.parse_args()
    if arguments.side:
        roll_side = arguments.side == "roll"
        result = run_roll(arguments.steps) if roll_side else run_trl(arguments.steps, arguments.dtype)
        print(json.dumps(result))
        return
    from _report import report

    rates = [machine_rates()]
    first = in_process("roll", 9)
    rates.append(machine_rates())
    trl: dict[str, dict[str, Any]] = {}
    for dtype in arguments.trl_dtypes.split(","):
        trl[dtype] = in_process("trl", 4, dtype)
        rates.append(machine_rates())
    second = in_process("roll", 9)
    rates.append(machine_rates())
    roll_seconds = first["seconds"] + second["seconds"]
    medians = {dtype: statistics.median(result["seconds"]) for dtype, result in trl.items()}
    fastest = min(medians, key=medians.__getitem__)
    ours = statistics.median(roll_seconds)
    rate = statistics.median(found["flops_per_s"] for found in rates)
    phases = {phase: statistics.fmean([first["phases"][phase], second["phases"][phase]]) for phase in PHASES}
    phases["rest"] = ours - sum(phases.values())
    report(
        "step",
        {
            "roll_seconds_per_step": ours,
            "roll_seconds_all": roll_seconds,
            "roll_mean_length": statistics.fmean([first["length"], second["length"]]),
            "phase_seconds": phases,
            "phase_shares": {phase: seconds / ours for phase, seconds in phases.items()},
            "ideal_s": ideal_seconds(first, rate),
            "machine_rates": rates,
            "trl_seconds_per_step": medians,
            "trl_mean_length": {dtype: result["length"] for dtype, result in trl.items()},
            "trl_fastest": fastest,
            "ratio": medians[fastest] / ours,
        },
    )


if __name__ == "__main__":
    main()
