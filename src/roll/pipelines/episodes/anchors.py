"""Anchors within successful episodes: IPA's chunk-level initialized resampling (ROME, arXiv 2512.24873).

A successful episode of K turns has a boundary before each turn. At an anchor k, its first k turns are replayed, and all
rollouts of a group continue from there:

    sequential rollback            a₁ ─ a₂ ─ a₃ ─ a₄ ✓     k = 3 until it is passed, then 2, 1, 0
    parallelized initialization    a₁ ─ a₂ ─ a₃ ─ a₄ ✓     k = 1, 2, 3 in parallel, each until it is passed

If rewards are sparse and come only at the end, nearly all plain rollouts fail and give no signal; close to a success
their rewards differ, and training there brings earlier turns within reach. An anchor is passed once most of the recent
rollouts that began there succeeded. The paper gives no constants: those of `AnchorsConfig` are ours.

Pure functions of the configuration and of the state at a step's boundary, so that a resumed run makes the same choices.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from roll.config.pipelines.agentic import AnchorsConfig
from roll.errors import ReplayError
from roll.pipelines.episodes.state import AgenticState, KeptEpisode
from roll.rollout.episode_replay import build_trajectory
from roll.types import Anchor, Group, PromptDraw, Rollout

__all__ = [
    "MAX_UNREPEATED",
    "choose_anchor",
    "compute_anchor_metrics",
    "list_anchors",
    "list_remaining_anchors",
    "update_anchors",
    "update_kept_episodes",
]

logger = logging.getLogger(__name__)

MAX_UNREPEATED = 3
"""Maximum number of episodes that an environment may fail to repeat; from then on, it has no anchors."""


def list_anchors(config: AnchorsConfig, num_turns: int) -> list[int]:
    """Return the anchors of an episode of `num_turns` turns, as numbers of replayed turns, in the order of use.

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


def list_remaining_anchors(config: AnchorsConfig, kept: KeptEpisode) -> list[int]:
    """Return the anchors of a kept episode at which a group may begin now; empty if the policy passed all of them."""
    left = [k for k in list_anchors(config, len(kept.trajectory.turns)) if k not in kept.passed]
    return left[:1] if config.type == "rollback" else left


def choose_anchor(
    config: AnchorsConfig | None,
    kept: Iterable[KeptEpisode],
    unrepeated: Mapping[str, int],
    *,
    domain: str,
    seed: int,
    number: int,
) -> tuple[KeptEpisode, Anchor] | None:
    """Choose the anchor at which a draw begins; return `None` if the draw begins at a new prompt.

    Args:
        config: Configuration of anchors; `None` without anchors.
        kept: Successful episodes.
        unrepeated: Number of episodes that each environment failed to repeat.
        domain: Environment of the draw.
        seed: Seed of the run.
        number: Number of the draw.
    """
    if config is None or unrepeated.get(domain, 0) >= MAX_UNREPEATED:
        return None
    found = [(one, left) for one in kept if one.domain == domain and (left := list_remaining_anchors(config, one))]
    if not found or _draw_uniform(seed, number, "whether") >= config.share:
        return None
    episode, left = found[int(_draw_uniform(seed, number, "which") * len(found))]
    num_turns = left[int(_draw_uniform(seed, number, "where") * len(left))]
    return episode, Anchor(trajectory=episode.trajectory, num_turns=num_turns)


def _draw_uniform(seed: int, number: int, purpose: str) -> float:
    """Return a pseudorandom number in [0, 1), determined by the seed, the number of a draw, and the purpose."""
    digest = hashlib.blake2b(f"{seed}/anchors/{purpose}/{number}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def has_succeeded(rollout: Rollout) -> bool:
    """Return whether the rollout solved its task or, if the reward does not decide that, has a positive reward."""
    reward = rollout.reward
    return reward is not None and (reward.value > 0 if reward.correct is None else reward.correct)


def collect_replay_errors(groups: Iterable[Group]) -> dict[str, str]:
    """Return, by UID of the episode, why an environment did not repeat it; empty if all episodes were repeated."""
    prefix = f"{ReplayError.__name__}: "
    return {
        group.draw.anchor.trajectory.uid: rollout.cause.removeprefix(prefix)
        for group in groups
        if group.draw.anchor is not None
        for rollout in group.rollouts
        if rollout.cause.startswith(prefix)
    }


def update_kept_episodes(
    config: AnchorsConfig, kept: Sequence[KeptEpisode], groups: Sequence[Group], in_flight: Collection[str]
) -> tuple[KeptEpisode, ...]:
    """Return the kept episodes after a step.

    Results of rollouts that began at anchors are counted, and episodes that were not repeated are dropped. Rare
    successes of prompts without a kept episode are added, the one with the fewest turns of each group. An episode whose
    anchors are all passed is dropped, and so is the oldest one if an environment has more than `num_kept`.

    Args:
        config: Configuration of anchors.
        kept: Kept episodes before the step, the oldest first.
        groups: Groups of the step.
        in_flight: UIDs of episodes at whose anchors draws in flight begin; these episodes are not dropped.
    """
    lost = collect_replay_errors(groups).keys()
    results: dict[str, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for group in groups:
        if (anchor := group.draw.anchor) is not None:
            results[anchor.trajectory.uid][anchor.num_turns] += map(has_succeeded, group.scored_rollouts)
    going = [_add_result(config, one, results[one.trajectory.uid]) for one in kept if one.trajectory.uid not in lost]
    known = {one.trajectory.uid for one in kept}
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
        if too_many[one.domain] > 0 and not one.shown and one.trajectory.uid not in in_flight:
            too_many[one.domain] -= 1
        else:
            result.append(one)
    return tuple(result)


def _add_result(config: AnchorsConfig, kept: KeptEpisode, results: Mapping[int, Sequence[bool]]) -> KeptEpisode:
    recent, passed = dict(kept.recent), set(kept.passed)
    for anchor, found in results.items():
        last = recent[anchor] = (*recent.get(anchor, ()), *found)[-config.num_rollouts :]
        if len(last) == config.num_rollouts and sum(last) >= config.passed_at * len(last):
            passed.add(anchor)
            del recent[anchor]
    return replace(kept, recent=recent, passed=frozenset(passed))


def _find_rare_success(config: AnchorsConfig, group: Group) -> KeptEpisode | None:
    """Return the shortest success of a group in which success is rare; `None` if no success can be replayed."""
    won = [rollout for rollout in group.scored_rollouts if has_succeeded(rollout)]
    if group.draw.anchor is not None or len(won) > config.rare_below * len(group.scored_rollouts):
        return None
    usable = [r for r in won if r.is_finished and len(r.turns) > 1 and not r.counts.get("summaries")]
    if not usable or group.draw.prompt.environment is None:
        return None
    best = min(usable, key=lambda rollout: (len(rollout.turns), rollout.index))
    return KeptEpisode(domain=best.prompt.domain, position=group.draw.position, trajectory=build_trajectory(best))


def update_anchors(
    config: AnchorsConfig, state: AgenticState, groups: Sequence[Group], in_flight: Iterable[PromptDraw]
) -> None:
    """Update the kept episodes, and the anchors of draws in flight, after a step; warn about unrepeated episodes."""
    begun = {draw.draw_id: draw.anchor for draw in in_flight if draw.anchor is not None}
    state.begun = {str(i): [anchor.trajectory.uid, anchor.num_turns] for i, anchor in sorted(begun.items())}
    domains = {one.trajectory.uid: one.domain for one in state.kept}
    for uid, why in collect_replay_errors(groups).items():
        if uid not in domains:  # a group that was in flight when the episode was dropped
            continue
        number = state.unrepeated[domains[uid]] = state.unrepeated.get(domains[uid], 0) + 1
        last = f" Groups of '{domains[uid]}' no longer begin at anchors." if number == MAX_UNREPEATED else ""
        logger.warning("%s%s", why, last)
    state.kept = update_kept_episodes(config, state.kept, groups, {uid for uid, _ in state.begun.values()})


def compute_anchor_metrics(kept: Sequence[KeptEpisode], groups: Sequence[Group]) -> dict[str, float]:
    """Compute the anchor metrics of a step: the groups that began at anchors, and their success by replayed share."""
    began = [(group, group.draw.anchor) for group in groups if group.draw.anchor is not None]
    metrics = {
        "anchors/kept": float(len(kept)),
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
