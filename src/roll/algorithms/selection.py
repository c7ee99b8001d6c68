"""Selection of the rollouts that a step trains on, with their shaped and normalized rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from roll.algorithms.answer_selection import find_failure_reason
from roll.algorithms.episodes import Float64Array, clamp_value
from roll.algorithms.filters import cannot_pass_filter, find_filter_reason, select_rollouts, select_top_variance
from roll.algorithms.normalization import Moments
from roll.algorithms.rewards import (
    ShapedRollout,
    compute_baseline_reward,
    compute_filter_value_range,
    normalize_outcomes,
    shape_rollout,
)
from roll.config.algorithm import AlgorithmConfig
from roll.config.algorithm_parts import FilterConfig
from roll.types import DrawOutcome, Group, Rollout

__all__ = ["Selection", "build_early_stop_predicate", "find_group_filter_reason", "select_training_rollouts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The rollouts that a step trains on, and the outcome (`DrawOutcome`) of every group."""

    trained_rollouts: tuple[ShapedRollout, ...]
    """The policy's rollouts to train on, in the order of their groups."""
    untrained_rollouts: tuple[ShapedRollout, ...] = ()
    """Scored rollouts that are not trained on, but are included in baselines, standard deviations and whitening."""
    outcomes: Float64Array
    """[n + m] normalized rewards of `trained_rollouts`, then of `untrained_rollouts`."""
    demonstrations: tuple[ShapedRollout, ...] = ()
    """Expert rollouts that are also trained on; no baseline includes them."""
    draw_outcomes: dict[int, tuple[DrawOutcome, str]]
    """The outcome of each group by draw id, with the reason if it is not trained on."""
    accuracies: dict[int, float] = field(default_factory=dict)
    """Fraction of solved rollouts of each group by draw id, or the mean reward if rewards do not decide correctness."""
    moments: dict[str, Moments] = field(default_factory=dict)
    """Moments of all rewards of the run by domain, including this step's."""

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All rollouts to train on: the policy's rollouts, then demonstrations."""
        return tuple(shaped.rollout for shaped in (*self.trained_rollouts, *self.demonstrations))


def select_training_rollouts(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    *,
    max_new_tokens: int,
    moments: Mapping[str, Moments] | None = None,
    greedy: Sequence[Group] = (),
    demonstrations: Sequence[Rollout] = (),
    known_outcomes: Mapping[int, tuple[DrawOutcome, str]] | None = None,
) -> Selection:
    """Select the rollouts that a step trains on: shape and normalize rewards, then filter groups and rollouts.

    No baseline includes a rollout with an infrastructure error; a group in which all rollouts failed gets the outcome
    `failed`. Baselines and standard deviations include every scored rollout, including rollouts that are then filtered
    out.

    Args:
        groups: Groups of the step.
        algorithm: The algorithm's settings.
        max_new_tokens: Maximum length of one turn's answer, in tokens.
        moments: Moments of the run before this step, for `running` scopes.
        greedy: Groups with the greedy answer to each prompt, for the baseline `greedy`; a group without a greedy answer
            has failed.
        demonstrations: Expert rollouts of some of the prompts; no baseline includes them, and only
            `algorithm.imitation` filters them. A draw is treated as trained if its demonstration is used for training.
        known_outcomes: Maps draw IDs to the outcomes of groups that were stopped early and of draws that were dropped.
    """
    shape = partial(shape_rollout, algorithm=algorithm, max_new_tokens=max_new_tokens)
    answers = (shape(rollout) for group in greedy for rollout in group.scored_rollouts)
    compared = {s.rollout.draw_id: compute_baseline_reward(s.episode, algorithm) for s in answers}
    shaped = {
        group.draw.draw_id: [
            shape(rollout, greedy_reward=compared.get(rollout.draw_id)) for rollout in group.scored_rollouts
        ]
        for group in groups
    }
    draw_outcomes = {
        group.draw.draw_id: _decide_outcome(group, shaped[group.draw.draw_id], algorithm.filters) for group in groups
    }
    draw_outcomes |= known_outcomes or {}
    lost = shaped.keys() - compared.keys() if algorithm.advantage.mean == "greedy" else set()
    draw_outcomes |= dict.fromkeys(lost, (DrawOutcome.FAILED, "the greedy answer failed"))
    _filter_low_variance(shaped, draw_outcomes, algorithm.filters.top_variance)
    scored = [s for draw_id, own in shaped.items() if draw_id not in lost for s in own]
    going = [own for draw_id, own in shaped.items() if draw_outcomes[draw_id][0] is DrawOutcome.TRAINED]
    trained = {s.rollout.rollout_id for own in going for s in _select_trained_rollouts(own, algorithm.filters)}
    order = sorted(range(len(scored)), key=lambda i: scored[i].rollout.rollout_id not in trained)
    outcomes, moments = normalize_outcomes([s.episode for s in scored], algorithm, moments)
    shown = _select_demonstrations(map(shape, demonstrations), groups, algorithm.imitation.when)
    draw_outcomes |= {s.rollout.draw_id: (DrawOutcome.TRAINED, "") for s in shown}
    return Selection(
        trained_rollouts=tuple(scored[i] for i in order[: len(trained)]),
        untrained_rollouts=tuple(scored[i] for i in order[len(trained) :]),
        outcomes=outcomes[order],
        demonstrations=shown,
        draw_outcomes=draw_outcomes,
        accuracies={g.draw.draw_id: _compute_accuracy(g) for g in groups if g.scored_rollouts},
        moments=moments,
    )


def _select_demonstrations(
    demonstrations: Iterable[ShapedRollout], groups: Sequence[Group], when: str
) -> tuple[ShapedRollout, ...]:
    """Return the demonstrations to train on.

    The reward of a demonstration must be positive and, with `when: unsolved`, higher than the policy's best reward for
    the prompt.
    """
    best = {g.draw.draw_id: _collect_raw_rewards(g).max() for g in groups if g.scored_rollouts}

    def is_imitated(demonstration: ShapedRollout) -> bool:
        assert demonstration.rollout.reward is not None, "a demonstration was scored"
        unsolved = demonstration.rollout.reward.value > best.get(demonstration.rollout.draw_id, -np.inf)
        return (
            demonstration.episode.total > 0
            and demonstration.episode.num_policy_tokens > 0
            and (unsolved or when == "always")
        )

    return tuple(filter(is_imitated, demonstrations))


def _collect_raw_rewards(group: Group) -> Float64Array:
    """Return a group's rewards before shaping, shape [G]."""
    return np.array([clamp_value(r.reward.value) for r in group.scored_rollouts if r.reward], dtype=np.float64)


def _compute_accuracy(group: Group) -> float:
    solved = [float(r.reward.correct) for r in group.scored_rollouts if r.reward and r.reward.correct is not None]
    return float(np.mean(solved)) if solved else float(np.mean(_collect_raw_rewards(group)))


def find_group_filter_reason(group: Group, algorithm: AlgorithmConfig, max_new_tokens: int) -> str:
    """Return the reason why a group has failed or will be filtered out; an empty string if the step may train on it.

    Only filters that do not depend on other groups of the step are applied.
    """
    shaped = [shape_rollout(rollout, algorithm, max_new_tokens) for rollout in group.scored_rollouts]
    return _decide_outcome(group, shaped, algorithm.filters)[1]


def build_early_stop_predicate(
    algorithm: AlgorithmConfig, reward_range: tuple[float, float], max_new_tokens: int, *, single_turn: bool
) -> Callable[[Sequence[Rollout], int], bool] | None:
    """Build a predicate that returns whether a group can no longer pass the filters.

    The predicate takes the finished rollouts of a group and the number of its missing rollouts, and considers every
    possible reward of the missing rollouts. The result is `None` if the settings do not allow early stopping.

    Args:
        algorithm: Settings of the filters and of reward shaping.
        reward_range: Lowest and highest reward before shaping.
        max_new_tokens: Maximum length of one turn's answer.
        single_turn: Whether every prompt has a single turn.
    """
    filters = algorithm.filters
    bounds = {"min_mean": filters.min_mean, "max_mean": filters.max_mean, "min_std": filters.min_std}
    between = compute_filter_value_range(reward_range, algorithm, single_turn=single_turn)
    if between is None or set(bounds.values()) == {None}:
        return None

    def cannot_pass(finished: Sequence[Rollout], num_missing: int) -> bool:
        judged = [shape_rollout(rollout, algorithm, max_new_tokens).filter_value for rollout in finished]
        return cannot_pass_filter(judged, num_missing, between, **bounds)

    return cannot_pass


def _decide_outcome(group: Group, shaped: Sequence[ShapedRollout], filters: FilterConfig) -> tuple[DrawOutcome, str]:
    if not any(s.episode.num_policy_tokens for s in shaped):
        return DrawOutcome.FAILED, find_failure_reason(group)
    reason = find_filter_reason(
        np.array([s.filter_value for s in shaped], dtype=np.float64),
        skip_zero_variance=filters.skip_zero_variance,
        min_mean=filters.min_mean,
        max_mean=filters.max_mean,
        min_std=filters.min_std,
    )
    if not reason and not _select_trained_rollouts(shaped, filters):
        reason = f"no rollout was kept (filters.keep {filters.keep}, drop_unfinished {filters.drop_unfinished})"
    return (DrawOutcome.FILTERED, reason) if reason else (DrawOutcome.TRAINED, "")


def _select_trained_rollouts(group: Sequence[ShapedRollout], filters: FilterConfig) -> list[ShapedRollout]:
    """Return the rollouts of a group that pass the filters `keep` and `drop_unfinished` and have a token to train on.

    The filter `keep` compares shaped rewards.
    """
    index = select_rollouts(
        np.array([s.training_reward for s in group], dtype=np.float64), filters.keep, filters.keep_num
    )
    kept = [group[i] for i in index if group[i].episode.num_policy_tokens]
    return [s for s in kept if s.rollout.is_finished or not filters.drop_unfinished]


def _filter_low_variance(
    shaped: Mapping[int, Sequence[ShapedRollout]], draw_outcomes: dict[int, tuple[DrawOutcome, str]], fraction: float
) -> None:
    if fraction == 1.0:
        return
    passed = [draw_id for draw_id in shaped if draw_outcomes[draw_id][0] is DrawOutcome.TRAINED]
    deviations = [float(np.std([s.filter_value for s in shaped[draw_id]])) for draw_id in passed]
    for i in set(range(len(passed))) - set(select_top_variance(deviations, fraction)):
        draw_outcomes[passed[i]] = (
            DrawOutcome.FILTERED,
            f"the reward std is not in the top fraction {fraction:g} of groups",
        )
