"""Anchors within successful episodes: IPA's chunk-level initialized resampling (ROME, arXiv 2512.24873).

A successful episode of K turns has a boundary before each turn. At anchor k, the first k turns are replayed, and all
rollouts of a group continue from there:

    sequential rollback            a₁ ─ a₂ ─ a₃ ─ a₄ ✓     k = 3 until it is passed, then 2, 1, 0
    parallelized initialization    a₁ ─ a₂ ─ a₃ ─ a₄ ✓     k = 1, 2, 3 in parallel, each until it is passed

With sparse rewards at the end of an episode, nearly all rollouts from the prompt fail and give no signal. Close to a
success, rewards differ, and training there makes earlier turns learnable. An anchor is passed once most of the recent
rollouts that began there succeeded. The paper gives no constants; the defaults of `AnchorsConfig` are our choice.

All functions are pure functions of the configuration and the state at a step's boundary, so a resumed run makes the
same choices.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from roll.config.pipelines.agentic import AnchorsConfig
from roll.errors import ReplayError
from roll.pipelines.episodes.state import AgenticState, AnchorEpisode
from roll.rollout.episode_replay import build_trajectory
from roll.types import Anchor, Group, PromptDraw, Rollout

__all__ = [
    "MAX_REPLAY_FAILURES",
    "choose_anchor",
    "compute_anchor_metrics",
    "list_anchors",
    "list_remaining_anchors",
    "update_anchors",
    "update_episodes",
]

logger = logging.getLogger(__name__)

MAX_REPLAY_FAILURES = 3
"""Number of failed replays after which anchors of an environment are disabled."""


def list_anchors(config: AnchorsConfig, num_turns: int) -> list[int]:
    """Return the anchors of an episode of `num_turns` turns in the order of use, as numbers of turns to replay.

    >>> list_anchors(AnchorsConfig(type="rollback"), 4)
    [3, 2, 1, 0]
    >>> list_anchors(AnchorsConfig(type="parallel", num_anchors=3), 8)
    [2, 4, 6]
    """
    if config.type == "rollback":
        return list(range(num_turns - 1, -1, -1))
    count = num_turns - 1 if config.placement == "random" else min(config.num_anchors, num_turns - 1)
    parts = count + 1
    return [(2 * j * num_turns + parts) // (2 * parts) for j in range(1, parts)]


def list_remaining_anchors(config: AnchorsConfig, episode: AnchorEpisode) -> list[int]:
    """Return the anchors of an episode at which a group may begin now; empty if the policy has passed all anchors."""
    left = [k for k in list_anchors(config, len(episode.trajectory.turns)) if k not in episode.passed_anchors]
    return left[:1] if config.type == "rollback" else left


def choose_anchor(
    config: AnchorsConfig | None,
    episodes: Iterable[AnchorEpisode],
    replay_failures: Mapping[str, int],
    *,
    domain: str,
    seed: int,
    number: int,
) -> tuple[AnchorEpisode, Anchor] | None:
    """Choose the anchor at which a draw begins; return `None` if the draw begins at a new prompt.

    Args:
        config: Configuration of anchors; `None` without anchors.
        episodes: Successful episodes.
        replay_failures: Number of episodes per environment that could not be replayed.
        domain: Environment of the draw.
        seed: Seed of the run.
        number: Number of the draw.
    """
    if config is None or replay_failures.get(domain, 0) >= MAX_REPLAY_FAILURES:
        return None
    found = [(one, left) for one in episodes if one.domain == domain and (left := list_remaining_anchors(config, one))]
    if not found or _draw_uniform(seed, number, "whether") >= config.share:
        return None
    episode, left = found[int(_draw_uniform(seed, number, "which") * len(found))]
    num_turns = left[int(_draw_uniform(seed, number, "where") * len(left))]
    return episode, Anchor(trajectory=episode.trajectory, num_turns=num_turns)


def _draw_uniform(seed: int, draw_id: int, purpose: str) -> float:
    """Return a pseudorandom number in [0, 1) that depends only on the seed, the draw ID and the purpose."""
    digest = hashlib.blake2b(f"{seed}/anchors/{purpose}/{draw_id}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def has_succeeded(rollout: Rollout) -> bool:
    """Return whether the rollout's reward is marked as correct or, without such a mark, is positive."""
    reward = rollout.reward
    return reward is not None and (reward.value > 0 if reward.correct is None else reward.correct)


def collect_replay_errors(groups: Iterable[Group]) -> dict[str, str]:
    """Return the replay error of each episode that could not be replayed, by UID."""
    prefix = f"{ReplayError.__name__}: "
    return {
        group.draw.anchor.trajectory.uid: rollout.cause.removeprefix(prefix)
        for group in groups
        if group.draw.anchor is not None
        for rollout in group.rollouts
        if rollout.cause.startswith(prefix)
    }


def update_episodes(
    config: AnchorsConfig, episodes: Sequence[AnchorEpisode], groups: Sequence[Group], in_flight: Collection[str]
) -> tuple[AnchorEpisode, ...]:
    """Return the episodes with anchors after a step.

    The results of rollouts that began at anchors are counted. Episodes are dropped if they could not be replayed, or if
    the policy has passed all of their anchors. If success is rare in a group and its prompt has no episode yet, the
    successful rollout with the fewest turns is added. If an environment has more than `num_kept` episodes, the oldest
    ones are dropped.

    Args:
        config: Configuration of anchors.
        episodes: Episodes before the step, the oldest first.
        groups: Groups of the step.
        in_flight: UIDs of episodes that draws in flight use; these episodes are not dropped.
    """
    lost = collect_replay_errors(groups).keys()
    results: dict[str, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for group in groups:
        if (anchor := group.draw.anchor) is not None:
            results[anchor.trajectory.uid][anchor.num_turns] += map(has_succeeded, group.scored_rollouts)
    going = [
        _add_results(config, one, results[one.trajectory.uid]) for one in episodes if one.trajectory.uid not in lost
    ]
    known = {one.trajectory.uid for one in episodes}
    for group in groups:
        new = _find_rare_success(config, group)
        if new is not None and new.trajectory.uid not in known:
            known.add(new.trajectory.uid)
            going.append(new)
    going = [one for one in going if one.trajectory.uid in in_flight or list_remaining_anchors(config, one)]
    too_many = Counter(one.domain for one in going)
    too_many.subtract(dict.fromkeys(too_many, config.num_kept))
    result = []
    for one in going:
        if too_many[one.domain] > 0 and not one.is_demonstration and one.trajectory.uid not in in_flight:
            too_many[one.domain] -= 1
        else:
            result.append(one)
    return tuple(result)


def _add_results(config: AnchorsConfig, episode: AnchorEpisode, results: Mapping[int, Sequence[bool]]) -> AnchorEpisode:
    recent, passed = dict(episode.recent_results), set(episode.passed_anchors)
    for anchor, found in results.items():
        last = recent[anchor] = (*recent.get(anchor, ()), *found)[-config.num_rollouts :]
        if len(last) == config.num_rollouts and sum(last) >= config.passed_at * len(last):
            passed.add(anchor)
            del recent[anchor]
    return replace(episode, recent_results=recent, passed_anchors=frozenset(passed))


def _find_rare_success(config: AnchorsConfig, group: Group) -> AnchorEpisode | None:
    """Return the shortest successful episode that can be replayed, if success is rare in the group; otherwise
    `None`.
    """
    won = [rollout for rollout in group.scored_rollouts if has_succeeded(rollout)]
    if group.draw.anchor is not None or len(won) > config.rare_below * len(group.scored_rollouts):
        return None
    usable = [r for r in won if r.is_finished and len(r.turns) > 1 and not r.counts.get("summaries")]
    if not usable or group.draw.prompt.environment is None:
        return None
    best = min(usable, key=lambda rollout: (len(rollout.turns), rollout.index))
    return AnchorEpisode(domain=best.prompt.domain, position=group.draw.position, trajectory=build_trajectory(best))


def update_anchors(
    config: AnchorsConfig, state: AgenticState, groups: Sequence[Group], in_flight: Iterable[PromptDraw]
) -> None:
    """Update the episodes and the anchors in flight after a step; log a warning for each failed replay."""
    anchors = {draw.draw_id: draw.anchor for draw in in_flight if draw.anchor is not None}
    state.anchors_in_flight = {
        str(i): [anchor.trajectory.uid, anchor.num_turns] for i, anchor in sorted(anchors.items())
    }
    domains = {one.trajectory.uid: one.domain for one in state.episodes}
    for uid, why in collect_replay_errors(groups).items():
        if uid not in domains:  # a group that was in flight when the episode was dropped
            continue
        number = state.replay_failures[domains[uid]] = state.replay_failures.get(domains[uid], 0) + 1
        last = f" Groups of '{domains[uid]}' no longer begin at anchors." if number == MAX_REPLAY_FAILURES else ""
        logger.warning("%s%s", why, last)
    in_use = {uid for uid, _ in state.anchors_in_flight.values()}
    state.episodes = update_episodes(config, state.episodes, groups, in_use)


def compute_anchor_metrics(episodes: Sequence[AnchorEpisode], groups: Sequence[Group]) -> dict[str, float]:
    """Compute the anchor metrics of a step: the groups that began at anchors, and success rates by the fraction of
    replayed turns."""
    began = [(group, group.draw.anchor) for group in groups if group.draw.anchor is not None]
    metrics = {
        "anchors/kept": float(len(episodes)),
        "anchors/groups": float(len(began)),
        "anchors/not_repeated": float(len(collect_replay_errors(groups))),
    }
    quarters: dict[int, list[bool]] = defaultdict(list)
    shares = []
    for group, anchor in began:
        share = anchor.num_turns / len(anchor.trajectory.turns)
        shares.append(share)
        quarters[int(4 * share) + 1] += map(has_succeeded, group.scored_rollouts)
    results = [won for found in quarters.values() for won in found]
    if shares:
        metrics["anchors/replayed_share"] = sum(shares) / len(shares)
    if results:
        metrics["anchors/accuracy"] = sum(results) / len(results)
    for quarter, found in sorted(quarters.items()):
        if found:
            metrics[f"anchors/accuracy_quarter_{quarter}"] = sum(found) / len(found)
    return metrics
