"""What the algorithm layer costs beside a training step: rewards, filters, advantages, weights, the loss itself.

    make bench NAME=algorithms

One quickstart-sized step (8 groups of 8 answers of 16 to 32 tokens) of the default model: `train_step` with its loss,
and beside it everything that is algorithm: `select` and `weigh` on the controller, and the loss on the tokens of the
batch with its gradient to the log-probs. Attention credit is measured as steps with and without it, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from _report import report
from _trainer_parts import quickstart_config, random_batch

from roll.algorithms.selection import Selection, select_training_rollouts
from roll.algorithms.token_weights import add_advantages
from roll.config.algorithm import AlgorithmConfig
from roll.config.presets import PRESET_NAMES
from roll.data.samples import build_batch
from roll.models import resolve_model
from roll.pipelines.learning.losses import build_policy_loss
from roll.training import TrainerSpec
from roll.training.backend import TorchBackend
from roll.types import (
    AttentionStatistics,
    Group,
    LossInputs,
    Prompt,
    PromptDraw,
    RewardResult,
    Rollout,
    SequenceAttention,
    TrainingBatch,
    Turn,
)

ANSWER = (16, 32)
REPEATS = 5
PAIRS = 9
"""Steps with and without attention credit."""
LIMIT_PERCENT = 2.0
ATTENTION_LIMIT_PERCENT = 4.0


def groups_of(batch: TrainingBatch) -> list[Group]:
    """The batch's samples as scored rollouts, two turns each."""
    rng = np.random.default_rng(1)
    groups: dict[int, list[Rollout]] = {}
    for sample in batch.samples:
        length, start = len(sample) - sample.prefix_length, sample.prefix_length
        prompt = Prompt(uid=f"p/{sample.unit}", domain="d", messages=())
        own = groups.setdefault(sample.unit, [])
        half, right = length // 2, bool(rng.integers(0, 2))
        own.append(
            Rollout(
                draw_id=sample.unit,
                index=len(own),
                prompt=prompt,
                prompt_token_ids=sample.token_ids[:start],
                token_ids=sample.token_ids[start:],
                logprobs=np.full(length, -10.0, np.float32),
                policy_versions=np.zeros(length, np.int32),
                finish_reason="stop",
                text="",
                reward=RewardResult(value=float(right), correct=right, verdict="correct" if right else "wrong"),
                turns=(Turn(start=0, end=half, state="s"), Turn(start=half, end=length, state=str(rng.integers(3)))),
            )
        )
    return [
        Group(draw=PromptDraw(draw_id=i, prompt=own[0].prompt, token_ids=own[0].prompt_token_ids), rollouts=tuple(own))
        for i, own in groups.items()
    ]


def median_of(work: Callable[[], Any]) -> float:
    """Median seconds, after one call that is not counted."""
    times = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def inputs_of(batch: TrainingBatch) -> LossInputs:
    """The batch's loss tokens, all in one, with random log-probs."""
    lengths = torch.tensor([int(s.loss_mask.sum()) for s in batch.samples])
    total = int(lengths.sum())
    noise = torch.randn(5, total, generator=torch.Generator().manual_seed(0)) * 0.1
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    rng = np.random.default_rng(0)
    numbers = [rng.random((2, len(s)), dtype=np.float32) for s in batch.samples]
    seen = [AttentionStatistics(waad=waad, fai=fai) for waad, fai in numbers]
    return LossInputs(
        logprobs=(noise[0] - 10).requires_grad_(),
        old_logprobs=noise[1] - 10,
        rollout_logprobs=noise[2] - 10,
        ref_logprobs=noise[3] - 10,
        advantages=torch.from_numpy(np.concatenate([np.asarray(s.advantages)[s.loss_mask] for s in batch.samples])),
        sequence_ids=ids,
        chunk_ids=ids,
        sequence_lengths=lengths.float(),
        num_tokens=float(total),
        num_sequences=float(len(lengths)),
        num_units=float(len(lengths)),
        max_lengths=torch.full((len(lengths),), float(ANSWER[1])),
        attention=tuple(SequenceAttention(own, s.loss_mask) for own, s in zip(seen, batch.samples, strict=True)),
        entropy=noise[4].abs().requires_grad_(),
    )


def layer_seconds(preset: str, groups: list[Group]) -> dict[str, float]:
    """Of one preset: choosing, weighing, the loss and its gradient."""
    algorithm = AlgorithmConfig.model_validate({"type": preset})
    limits = {"max_new_tokens": ANSWER[1]}

    def choose() -> Selection:
        return select_training_rollouts(groups, algorithm, **limits, greedy=groups)

    selection = choose()
    plain = build_batch(selection.rollouts, temperature=1.0, max_new_tokens=ANSWER[1])
    values = [[np.zeros(len(s), np.float32) for s in plain.samples] for _ in range(algorithm.critic.num_critics)]
    values = values if algorithm.uses_critic else []

    def weighed() -> TrainingBatch:
        return add_advantages(plain, selection, algorithm, values=values)

    inputs, loss = inputs_of(weighed()), build_policy_loss(algorithm)

    def learn() -> None:
        loss(replace(inputs, logprobs=inputs.require("logprobs").detach().requires_grad_())).loss.backward()

    return {"select_s": median_of(choose), "weigh_s": median_of(weighed), "loss_s": median_of(learn)}


def credit_percent(backend: TorchBackend, batch: TrainingBatch) -> float:
    """What attention credit adds to a `train_step`, %: medians of steps with and without it, one after the other."""
    losses = [
        build_policy_loss(AlgorithmConfig.model_validate({"type": name})) for name in ("grpo", "attention_credit")
    ]
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(1 + PAIRS):
        for place, loss in sorted(enumerate(losses), reverse=bool(repeat % 2)):
            begin = time.perf_counter()
            backend.train_step(batch, loss)
            if repeat:
                times[place].append(time.perf_counter() - begin)
    plain, credited = map(statistics.median, times)
    return 100.0 * (credited / plain - 1.0)


def main() -> None:
    """Measure a step, then every preset beside it."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    config = quickstart_config()
    path = str(resolve_model(config.model.path))
    training = config.training.model_copy(update={"learning_rate": 1e-6})
    backend = TorchBackend(TrainerSpec(model_path=path, model=config.model, training=training))
    batch = random_batch(8, 8, ANSWER, 49_000)
    step_s = median_of(lambda: backend.train_step(batch, build_policy_loss(AlgorithmConfig())))
    attention = credit_percent(backend, batch)
    groups = groups_of(batch)
    layers = {preset: layer_seconds(preset, groups) for preset in PRESET_NAMES}
    shares = {preset: 100.0 * sum(layer.values()) / step_s for preset, layer in layers.items()}
    worst = max(shares, key=lambda preset: shares[preset])
    lines = (
        (f"algorithm layer, {worst} (the dearest), % of train_step", shares[worst], LIMIT_PERCENT),
        ("attention credit, % of train_step without it", attention, ATTENTION_LIMIT_PERCENT),
    )
    for label, value, limit in lines:
        met = "met" if value <= limit else "MISSED"
        print(f"{label:<64} {value:>7.3f}   target <= {limit:g} {met}", file=sys.stderr)
    report(
        "algorithms_cost",
        {"step_s": step_s, "attention_percent": attention, "share_percent": shares, "seconds": layers},
    )


if __name__ == "__main__":
    main()
