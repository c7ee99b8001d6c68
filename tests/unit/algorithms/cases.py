"""Random ragged batches, as the reference sees them and as ROLL does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import reference_loss as paper
import torch
from reference_advantages import Attempt, Turn

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
)
from roll.types import Turn as RollTurn

MAX_LENGTH = 16
"""Longest possible answer of every batch here."""
PROMPT = 2
"""Tokens of every prompt."""
KINDS = ("ragged", "one_token", "all_masked", "single_sample", "zero_variance", "multi_turn", "many_domains")


def random_attempts(seed: int, kind: str = "ragged", critics: int = 2) -> list[Attempt]:
    """Groups of a step.

    `all_masked`: some rollouts have tokens, none of which the policy wrote. `single_sample`: groups of one.
    """
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    groups = 5 if kind == "single_sample" else int(rng.integers(2, 5))
    result = []
    for group in range(groups):
        size = 1 if kind == "single_sample" else int(rng.integers(2, 6))
        binary = bool(rng.integers(2))
        for index in range(size):
            reward = float(rng.integers(2)) if binary else round(float(rng.normal()), 3)
            if kind == "zero_variance" and group != 1:
                reward = (0.0, 0.1, 1.0)[group % 3]
            masked = kind == "all_masked" and bool(rng.integers(2))
            turns = random_turns(rng, kind, masked)
            length = (turns[-1].end if turns else 0) + int(
                rng.integers(3) if kind in ("multi_turn", "all_masked") else 0
            )
            result.append(
                Attempt(
                    group=group,
                    index=index,
                    domain=f"d{group % 2}" if kind == "many_domains" else "d",
                    reward=reward,
                    correct=reward > 0.5 if binary else None,
                    finished=bool(rng.integers(4)),
                    verdict="no answer" if rng.integers(4) == 0 else "",
                    length=length,
                    turns=turns,
                    greedy=round(float(rng.normal()), 3),
                    **random_tokens(rng, length, critics),
                )
            )
    firsts = {a.group: a.greedy for a in reversed(result)}
    return [replace(a, greedy=firsts[a.group]) for a in result]


def random_turns(rng: np.random.Generator, kind: str, masked: bool) -> list[Turn]:
    if kind == "one_token":
        return [Turn(start=0, end=1)]
    if kind != "multi_turn":
        length = int(rng.integers(1, 9))
        return [Turn(start=0, end=0 if masked else length)]
    turns, start = [], 0
    for _ in range(rng.integers(1, 4)):
        end = start + int(rng.integers(0, 4))
        reward = (0.0, 0.5, -0.1)[rng.integers(3)]
        turns.append(Turn(start=start, end=end, reward=reward, state=("", "s", "t", "u")[rng.integers(4)]))
        start = end + int(rng.integers(0, 3))
    return turns


def random_tokens(rng: np.random.Generator, length: int, critics: int) -> dict[str, Any]:
    """Log-probs near each other, and whatever else tokens carry; float32 numbers."""

    def floats(scale: float, around: float | np.ndarray = 0.0) -> np.ndarray:
        return (around + scale * rng.normal(size=length)).astype(np.float32)

    new = -np.abs(floats(1.5)) - np.float32(0.01)
    old = floats(0.25, new)
    values = [floats(1.0).tolist() for _ in range(critics)]
    return {
        "new": new.tolist(),
        "old": old.tolist(),
        "rollout": floats(0.3, old).tolist(),
        "ref": floats(0.3, new).tolist(),
        "values": values,
        "waad": (rng.integers(0, 13, size=length) / 4).tolist(),
        "fai": (rng.integers(0, 13, size=length) / 16).tolist(),
        "entropy": np.abs(floats(1.0)).tolist(),
    }


def to_groups(attempts: Sequence[Attempt], greedy: bool = False) -> list[Group]:
    """As the pipeline gets them; with `greedy` one more answer per prompt, which has the greedy reward."""
    groups: dict[int, list[Attempt]] = {}
    for attempt in attempts:
        groups.setdefault(attempt.group, []).append(attempt)
    result = []
    for number, members in groups.items():
        prompt = Prompt(uid=f"d/{number}", domain=members[0].domain, messages=())
        draw = PromptDraw(draw_id=number, prompt=prompt, token_ids=np.full(PROMPT, 5, np.int32))
        chosen = [replace(members[0], reward=members[0].greedy, turns=[], index=0)] if greedy else members
        result.append(Group(draw=draw, rollouts=tuple(_to_rollout(attempt, draw) for attempt in chosen)))
    return result


def _to_rollout(attempt: Attempt, draw: PromptDraw) -> Rollout:
    turns = tuple(RollTurn(start=t.start, end=t.end, reward=t.reward, state=t.state) for t in attempt.turns)
    return Rollout(
        draw_id=draw.draw_id,
        index=attempt.index,
        prompt=draw.prompt,
        prompt_token_ids=draw.token_ids,
        token_ids=np.full(attempt.length, 7, np.int32),
        logprobs=np.array(attempt.rollout, np.float32),
        policy_versions=np.zeros(attempt.length, np.int32),
        finish_reason="stop" if attempt.finished else "length",
        text="",
        reward=RewardResult(value=attempt.total, correct=attempt.correct, verdict=attempt.verdict),
        turns=turns,
        expert=attempt.expert,
    )


def after_prompt(values: Sequence[float]) -> np.ndarray:
    """[T] as [L]."""
    return np.concatenate([np.zeros(PROMPT, np.float32), np.array(values, np.float32)])


def attention_of(attempt: Attempt) -> AttentionStatistics:
    """What the policy's attention says of a rollout, its prompt included."""
    return AttentionStatistics(waad=after_prompt(attempt.waad), fai=after_prompt(attempt.fai))


def inputs_of(batch: TrainingBatch, attempts: dict[str, Attempt], *, order: Sequence[int] | None = None,
              totals: TrainingBatch | None = None) -> LossInputs:  # fmt: skip
    """What a loss sees of the samples of a batch, in float64, put together sample by sample.

    Args:
        batch: the samples.
        attempts: by sample id, for the log-probs.
        order: of the samples.
        totals: the batch whose counts normalise the loss; by default this one.
    """
    columns: dict[str, list[float]] = {name: [] for name in ("new", "old", "rollout", "ref", "advantages", "entropy")}
    sequences, chunks, lengths, expert, bonus, attention = [], [], [], [], [], []
    chunk = -1
    for i in range(len(batch.samples)) if order is None else order:
        sample = batch.samples[i]
        attempt = attempts[sample.sample_id]
        places = [int(t) for t in np.flatnonzero(sample.loss_mask)]
        if not places:
            continue
        last = None
        for place in places:
            for name in ("new", "old", "ref", "entropy"):
                columns[name].append(getattr(attempt, name)[place - PROMPT])
            columns["rollout"].append(float(sample.rollout_logprobs[place]))
            columns["advantages"].append(float(sample.advantages[place]))
            own = 0 if sample.chunk_ids is None else int(sample.chunk_ids[place])
            chunk += own != last
            last = own
            chunks.append(chunk)
            sequences.append(len(lengths))
            expert.append(sample.expert)
            bonus.append(True if sample.entropy_mask is None else bool(sample.entropy_mask[place]))
        lengths.append(len(places))
        attention.append(SequenceAttention(attention_of(attempt), sample.loss_mask))
    tensors = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    whole = totals or batch
    return LossInputs(
        logprobs=tensors["new"].requires_grad_(),
        old_logprobs=tensors["old"],
        rollout_logprobs=tensors["rollout"],
        advantages=tensors["advantages"],
        ref_logprobs=tensors["ref"],
        entropy=tensors["entropy"],
        entropy_mask=torch.tensor(bonus, dtype=torch.bool),
        expert=torch.tensor(expert, dtype=torch.bool) if any(expert) else None,
        attention=tuple(attention),
        sequence_ids=torch.tensor(sequences, dtype=torch.int64),
        sequence_lengths=torch.tensor(lengths, dtype=torch.float64),
        chunk_ids=torch.tensor(chunks, dtype=torch.int64),
        num_tokens=float(whole.num_loss_tokens),
        num_expert_tokens=float(whole.num_expert_tokens),
        num_sequences=float(whole.num_sequences),
        num_units=float(whole.num_units),
        max_lengths=torch.full((len(lengths),), float(MAX_LENGTH), dtype=torch.float64),
    )


def random_answers(seed: int, lengths: Sequence[int], noise: float = 0.3) -> list[paper.Answer]:
    """Sequences of loss tokens for the reference; chunks of random lengths, an expert now and then."""
    rng = np.random.default_rng(seed)
    result = []
    for number, length in enumerate(lengths):
        new = -np.abs(rng.normal(size=length)) - 0.01
        old, ref = (new + noise * rng.normal(size=length) for _ in range(2))
        result.append(
            paper.Answer(
                new=new.tolist(),
                held=new.tolist(),
                old=old.tolist(),
                rollout=(old + noise * rng.normal(size=length)).tolist(),
                ref=ref.tolist(),
                advantages=rng.choice([-1.5, -0.3, 0.0, 0.7, 2.0], size=length).tolist(),
                chunks=np.sort(rng.integers(0, 3, size=length)).tolist(),
                entropy=np.abs(rng.normal(size=length)).tolist(),
                gets_bonus=(rng.integers(3, size=length) > 0).tolist(),
                full_kl=np.abs(rng.normal(size=length)).tolist(),
                behavior=(old + noise * np.random.default_rng([seed, number]).normal(size=length)).tolist(),
                expert=number % 4 == 3,
            )
        )
    return result


def loss_inputs_of(answers: Sequence[paper.Answer], longest: int = MAX_LENGTH, experts: bool = True) -> LossInputs:
    """The same for ROLL."""

    def column(name: str) -> torch.Tensor:
        return torch.tensor([x for answer in answers for x in getattr(answer, name)], dtype=torch.float64)

    lengths = [len(answer.new) for answer in answers if answer.new]
    chunks, offset = [], 0
    for answer in answers:
        found = sorted(set(answer.chunks))
        chunks += [offset + found.index(chunk) for chunk in answer.chunks]
        offset += len(found)
    expert = [answer.expert for answer in answers for _ in answer.new]
    return LossInputs(
        logprobs=column("new").requires_grad_(),
        old_logprobs=column("old"),
        rollout_logprobs=column("rollout"),
        advantages=column("advantages"),
        ref_logprobs=column("ref"),
        entropy=column("entropy"),
        entropy_mask=column("gets_bonus").to(torch.bool),
        full_kl=column("full_kl"),
        behavior_logprobs=column("behavior") if all(len(a.behavior) == len(a.new) for a in answers) else None,
        expert=torch.tensor(expert) if any(expert) and experts else None,
        sequence_ids=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        sequence_lengths=torch.tensor(lengths, dtype=torch.float64),
        chunk_ids=torch.tensor(chunks, dtype=torch.int64),
        num_tokens=float(sum(lengths)),
        num_expert_tokens=float(sum(expert)) if experts else 0.0,
        num_sequences=float(len(lengths)),
        num_units=float(len(lengths)),
        max_lengths=torch.full((len(lengths),), float(longest), dtype=torch.float64),
    )
