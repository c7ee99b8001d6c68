"""What acting over many turns costs: one function per part, each with its figures.

    make bench NAME=agentic

Training: 8-turn episodes whose history is rewritten before every turn, thinking stripped from it, so that a rollout is
one training sample per turn. What the contexts of a group have in common goes through the network once; beside it, the
same samples without sharing. Both sides take turns in one process, and the ratio of neighbours is what counts: of
seconds, and of CPU time, which other work on the machine moves less.
"""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.types import TrainingBatch

NUM_GROUPS, GROUP_SIZE, NUM_TURNS = 1, 4, 8
PROMPT_TOKENS, OBSERVATION_TOKENS = 128, 32
THINKING_TOKENS, ANSWER_TOKENS = (32, 64), (8, 24)
"""Shortest and longest."""


def stripped_episodes(vocab_size: int, num_turns: int = NUM_TURNS) -> TrainingBatch:
    """Groups of random tokens: a turn is thought and answered after the prompt, all answers and observations so far."""
    import numpy as np

    from roll.types import TrainingBatch, TrainingSample

    rng = np.random.default_rng(0)

    def some(shortest: int, longest: int) -> Any:
        return rng.integers(0, vocab_size, rng.integers(shortest, longest + 1))

    samples = []
    for group in range(NUM_GROUPS):
        prompt = some(PROMPT_TOKENS, PROMPT_TOKENS)
        for index in range(GROUP_SIZE):
            context = prompt
            for turn in range(num_turns):
                answer = some(*ANSWER_TOKENS)
                token_ids = np.concatenate([context, some(*THINKING_TOKENS), answer]).astype(np.int32)
                written = np.arange(len(token_ids)) >= len(context)
                samples.append(
                    TrainingSample(
                        sample_id=f"{group}.{index}.{turn}",
                        unit=group,
                        prefix_length=len(context),
                        token_ids=token_ids,
                        loss_mask=written,
                        advantages=np.where(written, rng.normal(), 0.0).astype(np.float32),
                        rollout_logprobs=np.where(written, -10.0, 0.0).astype(np.float32),
                    )
                )
                context = np.concatenate([context, answer, some(OBSERVATION_TOKENS, OBSERVATION_TOKENS)])
    return TrainingBatch(samples=tuple(samples))


def measure_training(repeats: int) -> dict[str, Any]:
    """A training step on rewritten histories, with common prefixes computed once and without."""
    import time

    from _trainer_parts import quickstart_config

    from roll.algorithms.losses import PolicyLoss
    from roll.models import resolve_model
    from roll.training import TrainerSpec
    from roll.training.backend import TorchBackend

    config = quickstart_config()
    path = str(resolve_model(config.model.path))
    sides = {}
    for share in (True, False):
        training = config.training.model_copy(update={"learning_rate": 1e-6, "share_prefix": share})
        sides[share] = TorchBackend(TrainerSpec(model_path=path, model=config.model, training=training))
    vocab_size = sides[True].model.config.vocab_size
    batch = stripped_episodes(vocab_size)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    processor: dict[bool, list[float]] = {True: [], False: []}
    tokens: dict[bool, int] = {}
    for backend in sides.values():
        backend.train_step(stripped_episodes(vocab_size, num_turns=2), PolicyLoss())
    for _ in range(repeats):
        for share, backend in sides.items():
            started = time.process_time()
            result = backend.train_step(batch, PolicyLoss())
            tokens[share] = result.num_tokens
            seconds[share].append(sum(result.timings_s.values()))
            processor[share].append(time.process_time() - started)
    ratios, of_processor = (
        [ours / theirs for ours, theirs in zip(times[True], times[False], strict=True)]
        for times in (seconds, processor)
    )
    return {
        "num_samples": len(batch.samples),
        "num_turns": NUM_TURNS,
        "num_tokens": {"shared": tokens[True], "one_sample_per_turn": tokens[False]},
        "step_s": {"shared": seconds[True], "one_sample_per_turn": seconds[False]},
        "token_ratio": tokens[True] / tokens[False],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "processor_s": {"shared": processor[True], "one_sample_per_turn": processor[False]},
        "processor_ratio": statistics.median(of_processor),
    }


PARTS = {"training": measure_training}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; by comma")
    parser.add_argument("--repeats", type=int, default=3, help="of every timing")
    arguments = parser.parse_args()
    from _report import report

    report("agentic", {name: PARTS[name](arguments.repeats) for name in arguments.parts.split(",")})


if __name__ == "__main__":
    main()
