"""Why a run does not learn, or evidence that it does: rewards and held-out scores, or the loss without rewards."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from roll.dashboard.answer import RECENT_STEPS, Answer, link
from roll.dashboard.known import RunFacts
from roll.tracking.summary import num_compared

__all__ = ["explain_learning"]

_MOVED = 0.05
"""Change of a mean reward or of a held-out score below which it counts as flat."""
_LEAST_RATE = 1e-9
"""Smallest learning rate that changes weights noticeably."""
_FAILED_SHARE = 0.5


def explain_learning(known: RunFacts) -> Answer:
    """Explain why the reward is flat or, without rewards, why the loss does not decrease."""
    return _explain_loss(known) if known.is_supervised else _explain_reward(known)


def _explain_reward(known: RunFacts) -> Answer:
    question = "Why is my reward flat?"
    links = [link("its curve", "overview", runs=known.run, q="reward/mean")]
    failed = _failed_rewards(known)
    if failed is not None:
        text, tone = failed, "bad"
        links = [link("why answers got no reward", "health", show="Failures"), *links]
        return Answer(id="flat", question=question, text=text, tone=tone, links=links)
    rewards = [value for value in known.train.columns.get("reward/mean", ()) if math.isfinite(value)]
    if len(rewards) < 2:
        text = "There are not two steps with a reward yet."
        return Answer(id="flat", question=question, text=text, links=links)
    count = num_compared(len(rewards))
    first, last = (sum(part) / count for part in (rewards[:count], rewards[-count:]))
    held_out = known.held_out()
    figures = [(f"reward, first {count} steps", first), (f"last {count} steps", last)]
    if held_out is not None:
        name, before, after = held_out
        figures += [(f"held-out {name} before", before), ("after", after)]
    if last - first > _MOVED:
        text = f"It is not: it rose from {first:.3f} to {last:.3f}."
        return Answer(id="flat", question=question, text=text, tone="good", figures=figures, links=links)
    if held_out is not None and held_out[2] - held_out[1] > _MOVED:
        name, before, after = held_out
        text = (
            f"The run learns: its held-out {name} rose from {before:.3f} to {after:.3f}. The mean training reward went "
            f"from {first:.3f} to {last:.3f}, which also depends on the prompts that each step drew."
        )
        return Answer(id="flat", question=question, text=text, tone="good", figures=figures, links=links)
    causes = list(_causes(known, last))
    links += [found for _, found in causes if found]
    text = " ".join(cause for cause, _ in causes) or (
        "It is, and no metric says why: score known answers with `roll reward test`, raise the learning rate."
    )
    tone = "bad" if causes else "warn"
    return Answer(id="flat", question=question, text=text, tone=tone, figures=figures, links=links)


def _failed_rewards(known: RunFacts) -> str | None:
    """Return the cause of failure if most recent answers got no reward at all, which differs from a reward of 0."""
    share = known.mean("rollout/infra_error_share", slice(-RECENT_STEPS, None))
    evaluated = known.evaluation.last("eval/infra_errors") or 0.0
    nothing_trained = not known.train.steps and evaluated > 0
    if not nothing_trained and (share is None or share < _FAILED_SHARE):
        return None
    which = "of the first evaluation" if nothing_trained else f"of the last steps ({share or 0:.0%})"
    cause = f": {known.failures[0]['cause']}" if known.failures else ""
    return (
        f"There is no reward to look at: answers {which} got none, because the reward, the environment or an engine "
        f"failed{cause}. Try the reward with `roll reward test`."
    )


def _explain_loss(known: RunFacts) -> Answer:
    question = "Why does my loss not fall?"
    links = [link("its curve", "overview", runs=known.run, q="loss")]
    losses = [value for value in known.train.columns.get("training/loss", ()) if math.isfinite(value)]
    if len(losses) < 2:
        text = "There are not two steps with a loss yet."
        return Answer(id="flat", question=question, text=text, links=links)
    count = num_compared(len(losses))
    first, last = (sum(part) / count for part in (losses[:count], losses[-count:]))
    held_out = known.held_out()
    figures: list[tuple[str, float | str | None]] = [
        (f"loss, first {count} steps", first),
        (f"last {count} steps", last),
    ]
    worse = False
    if held_out is not None:
        name, before, after = held_out
        figures += [(f"held-out {name} before", before), ("after", after)]
        worse = name == "loss" and after > before
    if last < first:
        text, tone = f"It does: from {first:.3f} to {last:.3f}.", "good"
        if worse and held_out is not None:
            text += f" But the held-out loss rose from {held_out[1]:.3f} to {held_out[2]:.3f}: the model overfits."
            tone = "warn"
        return Answer(id="flat", question=question, text=text, tone=tone, figures=figures, links=links)
    causes = list(_optimizer_causes(known))
    links += [found for _, found in causes if found]
    text = " ".join(cause for cause, _ in causes) or (
        f"It went from {first:.3f} to {last:.3f}, and no metric says why: look at some examples with `roll check`, "
        "and try another learning rate."
    )
    tone = "bad" if causes else "warn"
    return Answer(id="flat", question=question, text=text, tone=tone, figures=figures, links=links)


def _causes(known: RunFacts, reward: float) -> Iterable[tuple[str, dict[str, Any] | None]]:
    """Yield reasons why nothing is learned, the most likely first."""
    recent = slice(-RECENT_STEPS, None)
    cut = known.mean("rollout/unfinished_share", recent)
    if cut is not None and cut > 0.1:
        limit = known.number("rollout.max_new_tokens")
        yield (
            f"{cut:.0%} of answers are cut off at {limit or math.nan:g} tokens, and most rewards give such answers 0: "
            "raise rollout.max_new_tokens.",
            link("answers that were cut off", "rollouts", finish_reason="length", kind="train"),
        )
    groups = known.mean("data/groups_trained", recent)
    if groups is not None and groups < 0.5:
        why = "too easy: all are right" if reward > 0.9 else "too hard, or the reward never fires"
        yield (
            f"In the last steps no group had rewards that differ, so nothing was learned; the prompts are {why}.",
            link("groups that were left out", "rollouts", trained="false", kind="train"),
        )
    yield from _optimizer_causes(known)
    apart = known.mean("agreement/logprob_mean_abs", recent)
    if apart is not None and apart > 0.1:
        yield f"Engine and trainer differ by {apart:.2f} nats a token: do they have the same weights?", None
    for name, bound, what in (
        ("training/policy/clip_fraction", 0.2, "of tokens are clipped: lower training.learning_rate"),
        ("training/policy/approximate_kl", 0.1, "nats a token are between two updates: lower training.learning_rate"),
    ):
        value = known.mean(name, recent)
        if value is not None and value > bound:
            yield f"{value:.2f} {what}.", link(name, "overview", runs=known.run, q=name)


def _optimizer_causes(known: RunFacts) -> Iterable[tuple[str, dict[str, Any] | None]]:
    recent = slice(-RECENT_STEPS, None)
    stepped = known.mean("training/stepped", recent)
    if stepped is not None and stepped < 1:
        yield f"{1 - stepped:.0%} of optimizer steps had gradients that are not finite.", None
    rate = known.mean("training/learning_rate", recent)
    if rate is not None and rate < _LEAST_RATE:
        yield (
            f"The learning rate is {rate:.1g}: nothing moves.",
            link("its curve", "overview", runs=known.run, q="learning"),
        )
