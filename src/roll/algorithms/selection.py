"""From scored groups to what a step learns from: shaped and normalised rewards, and which rollouts are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from roll.algorithms.doom import is_doomed
from roll.algorithms.episodes import Episode, Float64Array, bounded
from roll.algorithms.filters import kept_rollouts, reason_to_leave_out, top_variance
from roll.algorithms.normalise import Moments
from roll.algorithms.rewards import (
    episode_of,
    is_whole,
    judged_range,
    judged_rewards,
    num_written,
    outcomes_of,
    trained_rewards,
)
from roll.config.algorithm import AlgorithmConfig
from roll.types import Fate, Group, Rollout

__all__ = ["Selection", "doom_of", "group_reason", "select"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What a step learns from, and what became of every group."""

    rollouts: tuple[Rollout, ...]
    """In the order of their groups; then demonstrations."""
    episodes: tuple[Episode, ...]
    """The same as advantages see them; rewards shaped."""
    outcomes: Float64Array
    """[n] their normalised rewards; a demonstration's as it is."""
    others: tuple[Episode, ...] = ()
    """Scored rollouts that are not trained: they count in baselines, deviations and whitening."""
    other_outcomes: Float64Array = field(default_factory=lambda: np.zeros(0))
    """[m] their normalised rewards."""
    fates: dict[int, tuple[Fate, str]]
    """By draw id, with the reason where it is not trained."""
    accuracies: dict[int, float] = field(default_factory=dict)
    """Of every group, by draw id: share of solved rollouts, or the mean reward where solving has no meaning."""
    moments: dict[str, Moments] = field(default_factory=dict)
    """Of all rewards of the run, this step's included."""

    def count(self, fate: Fate) -> int:
        """Groups with this fate."""
        return sum(found is fate for found, _ in self.fates.values())


def select(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    *,
    max_new_tokens: int,
    moments: Mapping[str, Moments] | None = None,
    greedy: Sequence[Group] = (),
    demonstrations: Sequence[Rollout] = (),
    left_out: Mapping[int, str] | None = None,
) -> Selection:
    """Shape and normalise rewards, and leave out groups and rollouts as the filters say.

    A rollout that infrastructure failed is in no baseline; a group in which all failed has fate `failed`. Baselines and
    deviations count every scored rollout, also those that are then left out.

    Args:
        groups: of the step.
        algorithm: its settings.
        max_new_tokens: longest answer of one turn, in tokens.
        moments: of the run before this step, for `running` scopes.
        greedy: a greedy answer to each prompt, for the baseline `greedy`; a group without one has failed.
        demonstrations: experts' rollouts of some of the prompts; in no baseline, and filtered by nothing but
            `algorithm.imitation`. A draw whose demonstration is trained has been trained.
        left_out: groups that were stopped before their end, with the reason.
    """
    greedy_rewards = {r.draw_id: _compared(r, algorithm, max_new_tokens) for group in greedy for r in group.scored}
    compares = algorithm.advantage.mean == "greedy"
    lost = {g.draw.draw_id for g in groups if compares and g.draw.draw_id not in greedy_rewards}
    scored = [r for group in groups if group.draw.draw_id not in lost for r in group.scored]
    episodes = [episode_of(r, algorithm, max_new_tokens, greedy_rewards.get(r.draw_id)) for r in scored]
    outcomes, moments = outcomes_of(episodes, algorithm, moments)
    fates = {group.draw.draw_id: _fate(group, algorithm, max_new_tokens) for group in groups}
    fates |= {draw_id: (Fate.FILTERED, why) for draw_id, why in (left_out or {}).items()}
    fates |= dict.fromkeys(lost, (Fate.FAILED, "its greedy answer failed"))
    _keep_top_variance(groups, fates, algorithm, max_new_tokens)
    trained = [group for group in groups if fates[group.draw.draw_id][0] is Fate.TRAINED]
    chosen = [rollout for group in trained for rollout in _kept(group, algorithm, max_new_tokens)]
    place = {rollout.rollout_id: i for i, rollout in enumerate(scored)}
    index = [place[rollout.rollout_id] for rollout in chosen]
    others = sorted(set(range(len(scored))) - set(index))
    shown = _imitated(demonstrations, groups, algorithm, max_new_tokens)
    fates |= {rollout.draw_id: (Fate.TRAINED, "") for rollout, _ in shown}
    return Selection(
        rollouts=(*chosen, *(rollout for rollout, _ in shown)),
        episodes=(*(episodes[i] for i in index), *(episode for _, episode in shown)),
        outcomes=np.array([*outcomes[index], *(episode.reward for _, episode in shown)], dtype=np.float64),
        others=tuple(episodes[i] for i in others),
        other_outcomes=outcomes[others],
        fates=fates,
        accuracies={g.draw.draw_id: _accuracy(g) for g in groups if g.scored},
        moments=moments,
    )


def _compared(rollout: Rollout, algorithm: AlgorithmConfig, max_new_tokens: int) -> float:
    """What a baseline is taken of: the shaped reward, and those of turns where one value counts for all of them."""
    episode = episode_of(rollout, algorithm, max_new_tokens)
    return episode.total if is_whole(algorithm) else episode.reward


def _imitated(
    demonstrations: Sequence[Rollout], groups: Sequence[Group], algorithm: AlgorithmConfig, max_new_tokens: int
) -> list[tuple[Rollout, Episode]]:
    """The demonstrations that earned something and, with `when: unsolved`, more than the policy did by itself."""
    best = {g.draw.draw_id: _given(g).max() for g in groups if g.scored}
    result = []
    for rollout in demonstrations:
        assert rollout.reward is not None, "a demonstration was scored"
        unsolved = rollout.reward.value > best.get(rollout.draw_id, -np.inf)
        episode = episode_of(rollout, algorithm, max_new_tokens)
        if episode.total > 0 and num_written(rollout) and (unsolved or algorithm.imitation.when == "always"):
            result.append((rollout, episode))
    return result


def _given(group: Group) -> Float64Array:
    """[G] rewards as they were given."""
    return np.array([bounded(r.reward.value) for r in group.scored if r.reward], dtype=np.float64)


def _accuracy(group: Group) -> float:
    solved = [float(r.reward.correct) for r in group.scored if r.reward and r.reward.correct is not None]
    return float(np.mean(solved)) if solved else float(np.mean(_given(group)))


def group_reason(group: Group, algorithm: AlgorithmConfig, max_new_tokens: int) -> str:
    """Why a group will not be trained, as far as it alone decides that; empty where it may be."""
    return _fate(group, algorithm, max_new_tokens)[1]


def doom_of(
    algorithm: AlgorithmConfig, reward_range: tuple[float, float], max_new_tokens: int, *, single_turn: bool
) -> Callable[[Sequence[Rollout], int], bool] | None:
    """What says that a group cannot pass its filters any more, whatever its missing rollouts earn; `None` where nothing
    could.

    Args:
        algorithm: its filters, and how rewards are shaped.
        reward_range: lowest and highest reward, as it is given.
        max_new_tokens: longest answer of one turn.
        single_turn: whether no prompt has several turns.
    """
    filters = algorithm.filters
    bounds = {"min_mean": filters.min_mean, "max_mean": filters.max_mean, "min_std": filters.min_std}
    between = judged_range(reward_range, algorithm, single_turn=single_turn)
    if between is None or set(bounds.values()) == {None}:
        return None

    def doomed(finished: Sequence[Rollout], num_missing: int) -> bool:
        rewards = judged_rewards(finished, algorithm, max_new_tokens)
        return is_doomed(rewards.tolist(), num_missing, between, **bounds)

    return doomed


def _fate(group: Group, algorithm: AlgorithmConfig, max_new_tokens: int) -> tuple[Fate, str]:
    filters = algorithm.filters
    trainable = [r for r in group.scored if num_written(r)]
    if not trainable:
        causes = sorted({r.cause for r in group.rollouts if r.cause})
        return Fate.FAILED, "; ".join(causes) or "no rollout has a token"
    reason = reason_to_leave_out(
        judged_rewards(group.scored, algorithm, max_new_tokens),
        skip_zero_variance=filters.skip_zero_variance,
        min_mean=filters.min_mean,
        max_mean=filters.max_mean,
        min_std=filters.min_std,
    )
    if not reason and not _kept(group, algorithm, max_new_tokens):
        reason = f"no rollout is kept (filters.keep {filters.keep}, drop_unfinished {filters.drop_unfinished})"
    return (Fate.FILTERED, reason) if reason else (Fate.TRAINED, "")


def _kept(group: Group, algorithm: AlgorithmConfig, max_new_tokens: int) -> list[Rollout]:
    """The rollouts of a group that are trained, if the group is: chosen by the reward that they are trained with."""
    filters, scored = algorithm.filters, group.scored
    if filters.keep != "all":
        rewards = trained_rewards(scored, algorithm, max_new_tokens)
        scored = tuple(scored[i] for i in kept_rollouts(rewards, filters.keep, filters.keep_num))
    return [r for r in scored if num_written(r) and (r.finished or not filters.drop_unfinished)]


def _keep_top_variance(
    groups: Sequence[Group], fates: dict[int, tuple[Fate, str]], algorithm: AlgorithmConfig, max_new_tokens: int
) -> None:
    share = algorithm.filters.top_variance
    if share == 1.0:
        return
    passed = [group for group in groups if fates[group.draw.draw_id][0] is Fate.TRAINED]
    deviations = [float(np.std(judged_rewards(group.scored, algorithm, max_new_tokens))) for group in passed]
    kept = set(top_variance(deviations, share))
    for i, group in enumerate(passed):
        if i not in kept:
            fates[group.draw.draw_id] = (Fate.FILTERED, f"its reward varies less than that of the top {share:g}")
