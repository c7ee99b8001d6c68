"""From scored groups to what a step learns from: shaped and normalised rewards, and which rollouts are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from roll.algorithms.choosing import why_failed
from roll.algorithms.episodes import Float64Array, bounded
from roll.algorithms.filters import is_doomed, kept_rollouts, reason_to_leave_out, top_variance
from roll.algorithms.normalise import Moments
from roll.algorithms.rewards import ShapedRollout, compared_reward, judged_range, outcomes_of, shaped_rollout
from roll.config.algorithm import AlgorithmConfig
from roll.config.algorithm_parts import FilterConfig
from roll.types import Fate, Group, Rollout

__all__ = ["Selection", "doom_of", "group_reason", "select"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What a step learns from, and what became of every group."""

    trained: tuple[ShapedRollout, ...]
    """The policy's own, in the order of their groups."""
    others: tuple[ShapedRollout, ...] = ()
    """Scored ones that are not trained: they count in baselines, deviations and whitening."""
    outcomes: Float64Array
    """[n + m] normalised rewards of `trained`, then of `others`."""
    demonstrations: tuple[ShapedRollout, ...] = ()
    """Experts' rollouts that are trained as well, in no baseline."""
    fates: dict[int, tuple[Fate, str]]
    """By draw id, with the reason where it is not trained."""
    accuracies: dict[int, float] = field(default_factory=dict)
    """Of every group, by draw id: share of solved rollouts, or the mean reward where solving has no meaning."""
    moments: dict[str, Moments] = field(default_factory=dict)
    """Of all rewards of the run, this step's included."""

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All that is trained: the policy's own, then demonstrations."""
        return tuple(shaped.rollout for shaped in (*self.trained, *self.demonstrations))


def select(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    *,
    max_new_tokens: int,
    moments: Mapping[str, Moments] | None = None,
    greedy: Sequence[Group] = (),
    demonstrations: Sequence[Rollout] = (),
    decided: Mapping[int, tuple[Fate, str]] | None = None,
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
        decided: by draw id, fates of groups that were stopped before their end, and of draws that were given up.
    """
    shape = partial(shaped_rollout, algorithm=algorithm, max_new_tokens=max_new_tokens)
    answers = (shape(rollout) for group in greedy for rollout in group.scored)
    compared = {s.rollout.draw_id: compared_reward(s.episode, algorithm) for s in answers}
    shaped = {
        group.draw.draw_id: [shape(rollout, greedy_reward=compared.get(rollout.draw_id)) for rollout in group.scored]
        for group in groups
    }
    fates = {group.draw.draw_id: _fate(group, shaped[group.draw.draw_id], algorithm.filters) for group in groups}
    fates |= decided or {}
    lost = shaped.keys() - compared.keys() if algorithm.advantage.mean == "greedy" else set()
    fates |= dict.fromkeys(lost, (Fate.FAILED, "its greedy answer failed"))
    _keep_top_variance(shaped, fates, algorithm.filters.top_variance)
    scored = [s for draw_id, own in shaped.items() if draw_id not in lost for s in own]
    going = [own for draw_id, own in shaped.items() if fates[draw_id][0] is Fate.TRAINED]
    trained = {s.rollout.rollout_id for own in going for s in _kept(own, algorithm.filters)}
    order = sorted(range(len(scored)), key=lambda i: scored[i].rollout.rollout_id not in trained)
    outcomes, moments = outcomes_of([s.episode for s in scored], algorithm, moments)
    shown = _imitated(map(shape, demonstrations), groups, algorithm.imitation.when)
    fates |= {s.rollout.draw_id: (Fate.TRAINED, "") for s in shown}
    return Selection(
        trained=tuple(scored[i] for i in order[: len(trained)]),
        others=tuple(scored[i] for i in order[len(trained) :]),
        outcomes=outcomes[order],
        demonstrations=shown,
        fates=fates,
        accuracies={g.draw.draw_id: _accuracy(g) for g in groups if g.scored},
        moments=moments,
    )


def _imitated(demonstrations: Iterable[ShapedRollout], groups: Sequence[Group], when: str) -> tuple[ShapedRollout, ...]:
    """Those that earned something and, with `when: unsolved`, more than the policy did by itself."""
    best = {g.draw.draw_id: _given(g).max() for g in groups if g.scored}

    def is_imitated(shown: ShapedRollout) -> bool:
        assert shown.rollout.reward is not None, "a demonstration was scored"
        unsolved = shown.rollout.reward.value > best.get(shown.rollout.draw_id, -np.inf)
        return shown.episode.total > 0 and shown.episode.num_written > 0 and (unsolved or when == "always")

    return tuple(filter(is_imitated, demonstrations))


def _given(group: Group) -> Float64Array:
    """[G] rewards as they were given."""
    return np.array([bounded(r.reward.value) for r in group.scored if r.reward], dtype=np.float64)


def _accuracy(group: Group) -> float:
    solved = [float(r.reward.correct) for r in group.scored if r.reward and r.reward.correct is not None]
    return float(np.mean(solved)) if solved else float(np.mean(_given(group)))


def group_reason(group: Group, algorithm: AlgorithmConfig, max_new_tokens: int) -> str:
    """Why a group will not be trained, as far as it alone decides that; empty where it may be."""
    shaped = [shaped_rollout(rollout, algorithm, max_new_tokens) for rollout in group.scored]
    return _fate(group, shaped, algorithm.filters)[1]


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
        judged = [shaped_rollout(rollout, algorithm, max_new_tokens).judged for rollout in finished]
        return is_doomed(judged, num_missing, between, **bounds)

    return doomed


def _fate(group: Group, shaped: Sequence[ShapedRollout], filters: FilterConfig) -> tuple[Fate, str]:
    if not any(s.episode.num_written for s in shaped):
        return Fate.FAILED, why_failed(group)
    reason = reason_to_leave_out(
        np.array([s.judged for s in shaped], dtype=np.float64),
        skip_zero_variance=filters.skip_zero_variance,
        min_mean=filters.min_mean,
        max_mean=filters.max_mean,
        min_std=filters.min_std,
    )
    if not reason and not _kept(shaped, filters):
        reason = f"no rollout is kept (filters.keep {filters.keep}, drop_unfinished {filters.drop_unfinished})"
    return (Fate.FILTERED, reason) if reason else (Fate.TRAINED, "")


def _kept(group: Sequence[ShapedRollout], filters: FilterConfig) -> list[ShapedRollout]:
    """The rollouts of a group that are trained, if the group is: chosen by the reward that they are trained with."""
    index = kept_rollouts(np.array([s.trained for s in group], dtype=np.float64), filters.keep, filters.keep_num)
    kept = [group[i] for i in index if group[i].episode.num_written]
    return [s for s in kept if s.rollout.finished or not filters.drop_unfinished]


def _keep_top_variance(
    shaped: Mapping[int, Sequence[ShapedRollout]], fates: dict[int, tuple[Fate, str]], share: float
) -> None:
    if share == 1.0:
        return
    passed = [draw_id for draw_id in shaped if fates[draw_id][0] is Fate.TRAINED]
    deviations = [float(np.std([s.judged for s in shaped[draw_id]])) for draw_id in passed]
    for i in set(range(len(passed))) - set(top_variance(deviations, share)):
        fates[passed[i]] = (Fate.FILTERED, f"its reward varies less than that of the top {share:g}")
