"""Explains whether a run learns and, if it does not, why, from rewards, held-out scores and the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from roll.dashboard.answer import RECENT_STEPS, Answer, build_link
from roll.dashboard.run_facts import RunFacts
from roll.tracking.summary import count_compared_steps

__all__ = ["explain_learning"]

_MIN_CHANGE = 0.05
"""Minimum change of a mean reward or held-out score that is not treated as flat."""
_MIN_LEARNING_RATE = 1e-9
"""Smallest learning rate that changes weights noticeably."""
_MAX_FAILED_FRACTION = 0.5


def explain_learning(facts: RunFacts) -> Answer:
    """Answer the question why the reward is flat or, for runs without rewards, why the loss does not decrease."""
    return _explain_loss(facts) if facts.is_supervised else _explain_reward(facts)


def _explain_reward(facts: RunFacts) -> Answer:
    question = "Why is my reward flat?"
    links = [build_link("its curve", "overview", runs=facts.run, q="reward/mean")]
    failed = _explain_failed_rewards(facts)
    if failed is not None:
        text, tone = failed, "bad"
        links = [build_link("why answers got no reward", "health", show="Failures"), *links]
        return Answer(id="flat", question=question, text=text, tone=tone, links=links)
    rewards = [value for value in facts.train.columns.get("reward/mean", ()) if math.isfinite(value)]
    if len(rewards) < 2:
        text = "There are fewer than two steps with a reward."
        return Answer(id="flat", question=question, text=text, links=links)
    count = count_compared_steps(len(rewards))
    first, last = (sum(part) / count for part in (rewards[:count], rewards[-count:]))
    held_out = facts.find_held_out_metric()
    figures = [(f"reward, first {count} steps", first), (f"last {count} steps", last)]
    if held_out is not None:
        name, before, after = held_out
        figures += [(f"held-out {name} before", before), ("after", after)]
    if last - first > _MIN_CHANGE:
        text = f"The reward is not flat: it rose from {first:.3f} to {last:.3f}."
        return Answer(id="flat", question=question, text=text, tone="good", figures=figures, links=links)
    if held_out is not None and held_out[2] - held_out[1] > _MIN_CHANGE:
        name, before, after = held_out
        text = (
            f"The run learns: the held-out {name} rose from {before:.3f} to {after:.3f}. The mean training reward "
            f"changed from {first:.3f} to {last:.3f}; it also depends on the prompts of each step."
        )
        return Answer(id="flat", question=question, text=text, tone="good", figures=figures, links=links)
    causes = list(_find_causes(facts, last))
    links += [found for _, found in causes if found]
    text = " ".join(cause for cause, _ in causes) or (
        "The reward is flat, and no metric shows the cause: score some answers with `roll reward test`, or raise the "
        "learning rate."
    )
    tone = "bad" if causes else "warn"
    return Answer(id="flat", question=question, text=text, tone=tone, figures=figures, links=links)


def _explain_failed_rewards(facts: RunFacts) -> str | None:
    """Return the reason why most of the recent answers have no reward (not a reward of 0); `None` if most have one."""
    share = facts.compute_mean("rollout/infra_error_share", slice(-RECENT_STEPS, None))
    evaluated = facts.evaluation.get_last("eval/infra_errors") or 0.0
    nothing_trained = not facts.train.steps and evaluated > 0
    if not nothing_trained and (share is None or share < _MAX_FAILED_FRACTION):
        return None
    which = "of the first evaluation" if nothing_trained else f"of the last steps ({share or 0:.0%})"
    cause = f": {facts.failures[0]['cause']}" if facts.failures else ""
    return (
        f"Answers {which} got no reward, because the reward, the environment or an engine failed{cause}. Test the "
        "reward with `roll reward test`."
    )


def _explain_loss(facts: RunFacts) -> Answer:
    question = "Why does my loss not fall?"
    links = [build_link("its curve", "overview", runs=facts.run, q="loss")]
    losses = [value for value in facts.train.columns.get("training/loss", ()) if math.isfinite(value)]
    if len(losses) < 2:
        text = "There are fewer than two steps with a loss."
        return Answer(id="flat", question=question, text=text, links=links)
    count = count_compared_steps(len(losses))
    first, last = (sum(part) / count for part in (losses[:count], losses[-count:]))
    held_out = facts.find_held_out_metric()
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
        text, tone = f"The loss falls, from {first:.3f} to {last:.3f}.", "good"
        if worse and held_out is not None:
            text += f" The held-out loss rose from {held_out[1]:.3f} to {held_out[2]:.3f}: the model overfits."
            tone = "warn"
        return Answer(id="flat", question=question, text=text, tone=tone, figures=figures, links=links)
    causes = list(_find_optimizer_causes(facts))
    links += [found for _, found in causes if found]
    text = " ".join(cause for cause, _ in causes) or (
        f"The loss changed from {first:.3f} to {last:.3f}, and no metric shows the cause: inspect some examples with "
        "`roll check`, and try another learning rate."
    )
    tone = "bad" if causes else "warn"
    return Answer(id="flat", question=question, text=text, tone=tone, figures=figures, links=links)


def _find_causes(facts: RunFacts, reward: float) -> Iterable[tuple[str, dict[str, Any] | None]]:
    """Yield likely causes of a run that does not learn, most likely first, each with a link to a view or `None`."""
    recent = slice(-RECENT_STEPS, None)
    cut = facts.compute_mean("rollout/unfinished_share", recent)
    if cut is not None and cut > 0.1:
        limit = facts.get_number("rollout.max_new_tokens")
        yield (
            f"{cut:.0%} of answers are truncated at {limit or math.nan:g} tokens, and most rewards give truncated "
            "answers 0: raise rollout.max_new_tokens.",
            build_link("answers that were truncated", "rollouts", finish_reason="length", kind="train"),
        )
    groups = facts.compute_mean("data/groups_trained", recent)
    if groups is not None and groups < 0.5:
        why = "the prompts are too easy" if reward > 0.9 else "the prompts are too hard, or the reward does not work"
        yield (
            f"In the last steps, the rewards within each group are equal, so nothing was learned: {why}.",
            build_link("groups that were not trained", "rollouts", trained="false", kind="train"),
        )
    yield from _find_optimizer_causes(facts)
    apart = facts.compute_mean("agreement/logprob_mean_abs", recent)
    if apart is not None and apart > 0.1:
        yield f"The log-probs of engine and trainer differ by {apart:.2f} nats per token: check the weight syncs.", None
    for name, bound, what in (
        ("training/policy/clip_fraction", 0.2, "The share of clipped tokens is {:.2f}"),
        ("training/policy/approximate_kl", 0.1, "The KL divergence of an update is {:.2f} nats per token"),
    ):
        value = facts.compute_mean(name, recent)
        if value is not None and value > bound:
            text = f"{what.format(value)}: lower training.learning_rate."
            yield text, build_link(name, "overview", runs=facts.run, q=name)


def _find_optimizer_causes(facts: RunFacts) -> Iterable[tuple[str, dict[str, Any] | None]]:
    recent = slice(-RECENT_STEPS, None)
    stepped = facts.compute_mean("training/stepped", recent)
    if stepped is not None and stepped < 1:
        yield f"{1 - stepped:.0%} of optimizer steps had gradients that are not finite.", None
    rate = facts.compute_mean("training/learning_rate", recent)
    if rate is not None and rate < _MIN_LEARNING_RATE:
        yield (
            f"The learning rate is {rate:.1g}, too small to change the weights.",
            build_link("its curve", "overview", runs=facts.run, q="learning"),
        )
