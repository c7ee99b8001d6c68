"""From scored groups to what a step learns from: shaped and normalised rewards, and which rollouts are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from roll.algorithms.episodes import Episode, Float64Array, bounded
from roll.algorithms.filters import kept_rollouts, reason_to_leave_out, top_variance
from roll.algorithms.normalise import Moments, normalised
from roll.algorithms.shaping import shaped_reward
from roll.config.algorithm import AlgorithmConfig
from roll.rollout import DataLedger, Fate
from roll.types import Group, Rollout

__all__ = ["Selection", "episode_of", "group_reason", "select", "settle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What a step learns from, and what became of every group."""

    rollouts: tuple[Rollout, ...]
    """In the order of their groups; then demonstrations."""
    episodes: tuple[Episode, ...]
    """The same as advantages see them; rewards shaped."""
    outcomes: Float64Array
    """[n] their normalised rewards; a demonstration's as it is."""
    fates: dict[int, tuple[Fate, str]]
    """By draw id, with the reason where it is not trained."""
    accuracies: dict[int, float] = field(default_factory=dict)
    """Of every group, by draw id: share of solved rollouts, or the mean reward where solving has no meaning."""
    moments: dict[str, Moments] = field(default_factory=dict)
    """Of all rewards of the run, this step's included."""

    def count(self, fate: Fate) -> int:
        """Groups with this fate."""
        return sum(found is fate for found, _ in self.fates.values())


def episode_of(rollout: Rollout, reward: float, greedy_reward: float | None = None, scale: float = 1.0) -> Episode:
    """A rollout as numbers; `reward` is the shaped one, without those of turns, which are multiplied by `scale`."""
    spans = rollout.spans
    return Episode(
        group=rollout.draw_id,
        domain=rollout.prompt.domain,
        reward=reward,
        num_tokens=len(rollout.token_ids),
        turns=tuple((turn.start, turn.end) for turn in spans),
        turn_rewards=tuple(bounded(scale * turn.reward) for turn in spans),
        states=tuple(turn.state for turn in spans),
        greedy_reward=greedy_reward,
    )


def select(
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    *,
    max_length: int,
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
        max_length: longest possible answer in tokens.
        moments: of the run before this step, for `running` scopes.
        greedy: a greedy answer to each prompt, for the baseline `greedy`; a group without one has failed.
        demonstrations: experts' rollouts of some of the prompts; in no baseline, and filtered by nothing but
            `algorithm.imitation`. A draw whose demonstration is trained has been trained.
        left_out: groups that were stopped before their end, with the reason.
    """
    greedy_rewards = {r.draw_id: _compared(r, algorithm, max_length) for group in greedy for r in group.scored}
    compares = algorithm.advantage.mean == "greedy"
    lost = {g.draw.draw_id for g in groups if compares and g.draw.draw_id not in greedy_rewards}
    scored = [() if group.draw.draw_id in lost else group.scored for group in groups]
    shaped = [np.array([_shaped(r, algorithm, max_length) for r in rollouts]) for rollouts in scored]
    episodes = [
        episode_of(rollout, float(reward), greedy_rewards.get(rollout.draw_id), algorithm.reward.scale)
        for rollouts, rewards in zip(scored, shaped, strict=True)
        for rollout, reward in zip(rollouts, rewards, strict=True)
    ]
    outcomes, moments = _outcomes(episodes, algorithm, moments)
    fates = {group.draw.draw_id: _fate(group, algorithm) for group in groups}
    fates |= {draw_id: (Fate.FILTERED, why) for draw_id, why in (left_out or {}).items()}
    fates |= dict.fromkeys(lost, (Fate.FAILED, "its greedy answer failed"))
    _keep_top_variance(groups, fates, algorithm)
    chosen = _chosen(groups, fates, algorithm)
    place = {r.rollout_id: i for i, r in enumerate(r for rollouts in scored for r in rollouts)}
    index = [place[rollout.rollout_id] for rollout in chosen]
    shown = _imitated(demonstrations, groups, algorithm, max_length)
    fates |= {rollout.draw_id: (Fate.TRAINED, "") for rollout, _ in shown}
    return Selection(
        rollouts=(*chosen, *(rollout for rollout, _ in shown)),
        episodes=(*(episodes[i] for i in index), *(episode for _, episode in shown)),
        outcomes=np.array([*outcomes[index], *(episode.reward for _, episode in shown)], dtype=np.float64),
        fates=fates,
        accuracies={g.draw.draw_id: _accuracy(g) for g in groups if g.scored},
        moments=moments,
    )


def _imitated(
    demonstrations: Sequence[Rollout], groups: Sequence[Group], algorithm: AlgorithmConfig, max_length: int
) -> list[tuple[Rollout, Episode]]:
    """The demonstrations that earned something and, with `when: unsolved`, more than the policy did by itself."""
    best = {g.draw.draw_id: _values(g).max() for g in groups if g.scored}
    result = []
    for rollout in demonstrations:
        assert rollout.reward is not None, "a demonstration was scored"
        unsolved = rollout.reward.value > best.get(rollout.draw_id, -np.inf)
        episode = episode_of(rollout, _shaped(rollout, algorithm, max_length), scale=algorithm.reward.scale)
        if episode.total > 0 and _num_written(rollout) and (unsolved or algorithm.imitation.when == "always"):
            result.append((rollout, episode))
    return result


def _shaped(rollout: Rollout, algorithm: AlgorithmConfig, max_length: int) -> float:
    assert rollout.reward is not None
    well_formed = rollout.finished and rollout.reward.verdict != "no answer"
    settings = algorithm.reward.model_dump()
    return shaped_reward(
        rollout.reward.value - sum(turn.reward for turn in rollout.turns),
        length=sum(turn.end - turn.start for turn in rollout.spans),
        max_length=max_length,
        well_formed=well_formed,
        **settings,
    )


def _compared(rollout: Rollout, algorithm: AlgorithmConfig, max_length: int) -> float:
    """What a baseline is taken of: the shaped reward, and those of turns where one value counts for all of them."""
    episode = episode_of(rollout, _shaped(rollout, algorithm, max_length), scale=algorithm.reward.scale)
    return episode.total if _is_whole(algorithm) else episode.reward


def _is_whole(algorithm: AlgorithmConfig) -> bool:
    return algorithm.advantage.estimator in ("outcome", "chunk", "anchor_state")


def _outcomes(
    episodes: list[Episode], algorithm: AlgorithmConfig, moments: Mapping[str, Moments] | None
) -> tuple[Float64Array, dict[str, Moments]]:
    settings = algorithm.advantage
    whole = _is_whole(algorithm)
    rewards = np.array([e.total if whole else e.reward for e in episodes], dtype=np.float64)
    if settings.function is not None:
        return rewards, dict(moments or {})
    return normalised(
        episodes, rewards, mean=settings.mean, std=settings.std, per_domain=settings.per_domain, running=moments
    )


def _values(group: Group) -> Float64Array:
    """[G] rewards as they were given."""
    return np.array([bounded(r.reward.value) for r in group.scored if r.reward], dtype=np.float64)


def _accuracy(group: Group) -> float:
    solved = [float(r.reward.correct) for r in group.scored if r.reward and r.reward.correct is not None]
    return float(np.mean(solved)) if solved else float(np.mean(_values(group)))


def group_reason(group: Group, algorithm: AlgorithmConfig) -> str:
    """Why a group will not be trained, as far as it alone decides that; empty where it may be."""
    return _fate(group, algorithm)[1]


def _fate(group: Group, algorithm: AlgorithmConfig) -> tuple[Fate, str]:
    filters = algorithm.filters
    trainable = [r for r in group.scored if _num_written(r)]
    if not trainable:
        causes = sorted({r.cause for r in group.rollouts if r.cause})
        return Fate.FAILED, "; ".join(causes) or "no rollout has a token"
    reason = reason_to_leave_out(
        _values(group),
        skip_zero_variance=filters.skip_zero_variance,
        min_mean=filters.min_mean,
        max_mean=filters.max_mean,
        min_std=filters.min_std,
    )
    if not reason and not _kept(group, algorithm):
        reason = f"no rollout is kept (filters.keep {filters.keep}, drop_unfinished {filters.drop_unfinished})"
    return (Fate.FILTERED, reason) if reason else (Fate.TRAINED, "")


def _kept(group: Group, algorithm: AlgorithmConfig) -> list[Rollout]:
    """The rollouts of a group that are trained, if the group is."""
    filters = algorithm.filters
    kept = [group.scored[i] for i in kept_rollouts(_values(group), filters.keep, filters.keep_num)]
    return [r for r in kept if _num_written(r) and (r.finished or not filters.drop_unfinished)]


def _num_written(rollout: Rollout) -> int:
    """Tokens of the policy's own."""
    return sum(turn.end - turn.start for turn in rollout.spans)


def _keep_top_variance(groups: Sequence[Group], fates: dict[int, tuple[Fate, str]], algorithm: AlgorithmConfig) -> None:
    share = algorithm.filters.top_variance
    if share == 1.0:
        return
    passed = [group for group in groups if fates[group.draw.draw_id][0] is Fate.TRAINED]
    kept = set(top_variance([float(np.std(_values(group))) for group in passed], share))
    for i, group in enumerate(passed):
        if i not in kept:
            fates[group.draw.draw_id] = (Fate.FILTERED, f"its reward varies less than that of the top {share:g}")


def _chosen(groups: Sequence[Group], fates: dict[int, tuple[Fate, str]], algorithm: AlgorithmConfig) -> list[Rollout]:
    return [r for g in groups if fates[g.draw.draw_id][0] is Fate.TRAINED for r in _kept(g, algorithm)]


def settle(ledger: DataLedger, selection: Selection, step: int) -> None:
    """Write every group's fate into the ledger."""
    for draw_id, (fate, why) in selection.fates.items():
        ledger.settle(draw_id, fate, step, why)
