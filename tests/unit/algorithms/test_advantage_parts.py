"""Every return, normaliser, whitening, shaping and filter against plain loops, on random ragged batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference_advantages as ref
from cases import KINDS, MAX_LENGTH, random_attempts
from reference_advantages import Attempt

from roll.algorithms.advantages import estimate_advantages, mask_smallest, rescale_weights
from roll.algorithms.episodes import Episode
from roll.algorithms.filters import find_filter_reason, select_rollouts, select_top_variance
from roll.algorithms.kl import adapt_coefficient
from roll.algorithms.normalization import Moments, normalize_rewards, whiten_values
from roll.algorithms.returns import (
    compute_discounted_returns,
    compute_gae,
    compute_step_advantages,
    compute_token_rewards,
    compute_turn_returns,
)
from roll.algorithms.rewards import compute_soft_overlong_penalty, shape_reward

EXACT = {"rtol": 1e-10, "atol": 1e-12}
FLOAT32 = {"rtol": 2e-6, "atol": 2e-6}
SEEDS = range(3)


def episode_of(a: Attempt) -> Episode:
    return Episode(
        group=a.group,
        reward=a.reward,
        num_tokens=a.length,
        turns=tuple((t.start, t.end) for t in a.turns),
        turn_rewards=tuple(t.reward for t in a.turns),
        states=tuple(t.state for t in a.turns),
        domain=a.domain,
        token_rewards=np.array(a.token_rewards, np.float32) if a.token_rewards else None,
        values=np.mean(np.array(a.values, np.float64), axis=0),
        greedy_reward=a.greedy,
    )


def with_token_rewards(attempts: list[Attempt], seed: int) -> list[Attempt]:
    """Random ones, at the environment's tokens as well, where they must not count."""
    rng = np.random.default_rng(seed)
    return [
        replace(a, token_rewards=np.where(_mask(a), 0.1 * rng.normal(size=a.length), 0).astype(np.float32).tolist())
        for a in attempts
    ]


def _mask(a: Attempt) -> np.ndarray:
    mask = np.zeros(a.length, np.bool_)
    mask[a.written] = True
    return mask


def expected_outcomes(attempts: list[Attempt], mean: str, std: str, per_domain: bool) -> list[float]:
    result = []
    for a in attempts:
        group = [b.total for b in ref.group_of(a, attempts)]
        batch = [b.total for b in (ref.domain_of(a, attempts) if per_domain else attempts)]
        scopes = {"group": group, "batch": batch, "running": batch}
        if mean in scopes:
            value = ref.minus_mean(a.total, scopes[mean])
        elif mean == "none":
            value = a.total
        else:
            baselines = {
                "leave_one_out": ref.leave_one_out,
                "length_weighted": ref.length_weighted,
                "greedy": ref.against_greedy,
            }
            value = baselines[mean](attempts)[a.name]
        result.append(value if std == "none" else ref.over_std(value, scopes[std]))
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("std", ["none", "group", "batch", "running"])
@pytest.mark.parametrize("mean", ["none", "group", "batch", "running", "leave_one_out", "length_weighted", "greedy"])
def test_advantage_normalised_rewards(mean: Any, std: Any, kind: str) -> None:
    for seed in SEEDS:
        for per_domain in (True, False):
            attempts = random_attempts(seed, kind)
            episodes = [episode_of(a) for a in attempts]
            rewards = np.array([a.total for a in attempts])
            found, _ = normalize_rewards(episodes, rewards, mean=mean, std=std, per_domain=per_domain)
            np.testing.assert_allclose(found, expected_outcomes(attempts, mean, std, per_domain), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_advantage_running_moments_are_those_of_all_rewards_so_far(kind: str) -> None:
    steps = [random_attempts(seed, kind) for seed in range(4)]
    running: dict[str, Moments] = {}
    seen: dict[str, list[float]] = {}
    for attempts in steps:
        rewards = np.array([a.total for a in attempts])
        for a in attempts:
            seen.setdefault(a.domain, []).append(a.total)
        episodes = [episode_of(a) for a in attempts]
        found, running = normalize_rewards(episodes, rewards, mean="running", std="running", running=running)
        for a, value in zip(attempts, found, strict=True):
            so_far = seen[a.domain]
            assert value == pytest.approx(ref.over_std(a.total - ref.mean(so_far), so_far), rel=1e-9, abs=1e-9)
    for domain, moments in running.items():
        assert moments.count == len(seen[domain])
        assert Moments.from_json(moments.to_json()) == moments


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_advantage_returns_of_turns_and_tokens(gamma: float, kind: str) -> None:
    for seed in SEEDS:
        attempts = with_token_rewards(random_attempts(seed, kind), seed)
        outcomes = {a.name: 0.5 * a.reward for a in attempts}
        turns = ref.turn_returns(outcomes, attempts, gamma)
        tokens = ref.token_returns(outcomes, attempts, gamma)
        for a in attempts:
            episode = episode_of(a)
            outcome = outcomes[a.name]
            np.testing.assert_allclose(compute_turn_returns(episode, outcome, gamma), turns[a.name], **EXACT)
            np.testing.assert_allclose(compute_token_rewards(episode, outcome), ref.token_rewards(a, outcome), **EXACT)
            np.testing.assert_allclose(
                compute_discounted_returns(compute_token_rewards(episode, outcome), gamma), tokens[a.name], **EXACT
            )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_advantage_generalised_advantage_estimation(gamma: float, lam: float, kind: str) -> None:
    for seed in SEEDS:
        attempts = with_token_rewards(random_attempts(seed, kind), seed)
        outcomes = {a.name: a.reward for a in attempts}
        advantages, returns = ref.gae(outcomes, attempts, gamma, lam)
        episodes = [episode_of(a) for a in attempts]
        found = estimate_advantages(
            episodes, np.array(list(outcomes.values())), estimator="gae", std="none", gamma=gamma, gae_lambda=lam
        )
        for a, e, x, g in zip(attempts, episodes, found.advantages, found.returns, strict=True):
            np.testing.assert_allclose(x[e.mask], advantages[a.name], **FLOAT32)
            np.testing.assert_allclose(g[e.mask], returns[a.name], **FLOAT32)
            assert not x[~e.mask].any()
            assert not g[~e.mask].any()
            assert e.values is not None
            exact = compute_gae(compute_token_rewards(e, a.reward), e.values[e.mask].astype(np.float64), gamma, lam)
            np.testing.assert_allclose(exact, advantages[a.name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("std", ["none", "group"])
def test_advantage_step_advantages_compare_turns_that_began_in_the_same_state(std: Any, kind: str) -> None:
    met = 0
    for seed in range(6):
        attempts = random_attempts(seed, kind)
        expected = ref.anchor_state(attempts, 0.9, divide=std != "none")
        found = compute_step_advantages([episode_of(a) for a in attempts], gamma=0.9, std=std)
        for a, values in zip(attempts, found, strict=True):
            np.testing.assert_allclose(values, expected[a.name], rtol=1e-9, atol=1e-12)
            met += sum(map(bool, expected[a.name]))
    assert (met > 0) == (kind == "multi_turn")


def test_advantage_equal_states_of_different_prompts_are_not_compared() -> None:
    def episode(group: int, reward: float) -> Episode:
        return Episode(group=group, reward=reward, num_tokens=1, turns=((0, 1),), states=("start",))

    apart = compute_step_advantages([episode(0, 1.0), episode(1, 0.0)], gamma=1.0, std="none")
    assert [float(a[0]) for a in apart] == [0.0, 0.0]
    together = compute_step_advantages([episode(0, 1.0), episode(0, 0.0)], gamma=1.0, std="none")
    assert [float(a[0]) for a in together] == [0.5, -0.5]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("estimator", "whiten"),
    [("token", "none"), ("token", "token")]  # it has no turns to whiten
    + [(e, w) for e in ("outcome", "turn", "anchor_state") for w in ("none", "token", "turn")],
)
def test_advantage_estimates_with_rewards_per_token_whitening_and_clip(estimator: Any, whiten: Any, kind: str) -> None:
    for seed in SEEDS:
        attempts = with_token_rewards(random_attempts(seed, kind), seed)
        outcomes = {a.name: a.reward - 0.3 for a in attempts}
        if estimator == "token":
            expected = ref.token_returns(outcomes, attempts, 0.9)
        else:
            turns = {a.name: [outcomes[a.name]] * len(a.turns) for a in attempts}
            if estimator == "turn":
                turns = ref.turn_returns(outcomes, attempts, 0.9)
            if estimator == "anchor_state":
                steps = ref.anchor_state(attempts, 0.9)
                turns = {n: [x + 0.7 * s for x, s in zip(v, steps[n], strict=True)] for n, v in turns.items()}
            turns = ref.whitened(turns) if whiten == "turn" else turns
            expected = ref.spread_over_tokens(turns, attempts, later=estimator != "turn")
        if whiten == "token":
            expected = ref.whitened(expected)
        episodes = [episode_of(a) for a in attempts]
        given = {"estimator": estimator, "gamma": 0.9, "step_weight": 0.7, "whiten": whiten, "clip": 0.8}
        found = estimate_advantages(episodes, np.array(list(outcomes.values())), **given).advantages
        for a, e, x in zip(attempts, episodes, found, strict=True):
            clipped = [min(max(value, -0.8), 0.8) for value in expected[a.name]]
            np.testing.assert_allclose(x[e.mask], clipped, **FLOAT32)
            assert not x[~e.mask].any()


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (0, 4, 1), (0,), ()])
def test_advantage_whitening(sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.normal(3.0, 2.0, size) for size in sizes]
    expected = ref.whitened({str(i): array.tolist() for i, array in enumerate(arrays)})
    for i, found in enumerate(whiten_values(arrays)):
        np.testing.assert_allclose(found, expected[str(i)], **EXACT)
    equal = [np.full(size, 0.1) for size in sizes]
    if sum(sizes) > 1:
        assert all((array == 0).all() for array in whiten_values(equal))


def test_advantage_whitening_leaves_noise_small() -> None:
    noise = np.array([1e-6, -1e-6] * 8)
    # (±1e-6) / sqrt(1e-12 + 1e-8)
    np.testing.assert_allclose(whiten_values([noise])[0], noise / 1.00005e-4, rtol=1e-4)
    far = whiten_values([1e3 * noise])[0]
    np.testing.assert_allclose(np.abs(far), 0.995, rtol=1e-3)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.99])
@pytest.mark.parametrize("kind", KINDS)
def test_advantage_the_tokens_on_which_critics_agree_most(kind: str, share: float) -> None:
    for seed in SEEDS:
        attempts = random_attempts(seed, kind)
        spread = [np.std(np.array(a.values), axis=0) for a in attempts]
        masks = [_mask(a) for a in attempts]
        expected = ref.lowest(ref.critic_deviations(attempts), share)
        found = mask_smallest(spread, masks, share)  # type: ignore[arg-type]
        total = sum(int(mask.sum()) for mask in masks)
        assert sum(int(drop.sum()) for drop in found) == int(share * total)
        for a, drop, mask in zip(attempts, found, masks, strict=True):
            assert drop[mask].tolist() == expected[a.name]
            assert not drop[~mask].any()


def test_advantage_critics_that_agree_everywhere_drop_nothing() -> None:
    values, masks = [np.zeros(4, np.float32)] * 3, [np.ones(4, np.bool_)] * 3
    assert not np.concatenate(mask_smallest(values, masks, 0.5)).any()


@pytest.mark.parametrize("buffer", [0, 1, 4, 16])
def test_advantage_shaped_rewards(buffer: int) -> None:
    for length in range(MAX_LENGTH + 4):
        assert compute_soft_overlong_penalty(length, MAX_LENGTH, buffer) == pytest.approx(
            ref.soft_overlong(length, MAX_LENGTH, buffer)
        )
        for well_formed in (True, False):
            found = shape_reward(
                1.3,
                length=length,
                max_length=MAX_LENGTH,
                well_formed=well_formed,
                scale=2.0,
                shift=-0.5,
                clip=1.5,
                overlong_buffer=buffer,
                overlong_penalty=0.4,
                format_penalty=0.1,
            )
            # 2 x 1.3 - 0.5 = 2.1, clipped to 1.5
            expected = 1.5 - 0.4 * ref.soft_overlong(length, MAX_LENGTH, buffer) - (0.0 if well_formed else 0.1)
            assert found == pytest.approx(expected)


def test_advantage_rewards_of_turns_without_a_token_are_not_lost() -> None:
    def rewards(*turns: tuple[int, int], given: tuple[float, ...]) -> list[float]:
        episode = Episode(group=0, reward=10.0, num_tokens=6, turns=turns, turn_rewards=given)
        return compute_token_rewards(episode, 10.0).tolist()

    assert rewards((0, 2), (4, 4), given=(1.0, 2.0)) == [0.0, 13.0]
    assert rewards((0, 0), (1, 3), given=(1.0, 2.0)) == [1.0, 12.0]
    assert rewards((0, 2), (3, 3), (4, 6), given=(1.0, 2.0, 3.0)) == [0.0, 3.0, 0.0, 13.0]
    assert rewards((0, 0), given=(1.0,)) == []


def test_advantage_groups_are_left_out_for_the_first_reason_that_applies() -> None:
    def why(*rewards: float, **given: Any) -> str:
        return find_filter_reason(np.array(rewards), **given)

    assert why(1, 1) == "zero variance: every reward is 1"
    assert why(1, 1, skip_zero_variance=False) == ""
    assert why(0, 1) == ""
    assert why(0, 0.5, min_mean=0.25) == "mean reward 0.25 is not above 0.25"
    assert why(0, 0.5, min_mean=0.24) == ""
    assert why(1, 0.5, max_mean=0.75) == "mean reward 0.75 is not below 0.75"
    assert why(0, 1, min_std=0.5) == "standard deviation 0.5 is not above 0.5"
    assert why(0, 1, min_std=0.49) == ""
    assert why() == "the group has no rollout"


@pytest.mark.parametrize("seed", range(20))
def test_advantage_kept_rollouts_and_groups(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rewards = rng.choice([-1.0, 0.0, 0.5, 1.0], size=rng.integers(1, 8))
    ranked = sorted(range(len(rewards)), key=lambda i: (rewards[i], i))
    best = sorted(range(len(rewards)), key=lambda i: (-rewards[i], i))
    assert select_rollouts(rewards, "all", 2) == list(range(len(rewards)))
    assert select_rollouts(rewards, "positive", 2) == [i for i in range(len(rewards)) if rewards[i] > 0]
    assert select_rollouts(rewards, "best", 2) == sorted(best[:2])
    assert select_rollouts(rewards, "worst", 2) == sorted(ranked[:2])
    assert select_rollouts(rewards, "extremes", 2) == sorted({*best[:2], *ranked[:2]})
    share = float(rng.uniform(0.1, 1.0))
    count = 0
    while count < share * len(rewards) - 1e-9:
        count += 1
    assert select_top_variance(rewards.tolist(), share) == sorted(best[:count])


def test_advantage_factors_have_mean_one() -> None:
    assert rescale_weights(np.array([1.0, 3.0])).tolist() == [0.5, 1.5]
    assert rescale_weights(np.zeros(2)).tolist() == [1.0, 1.0]
    assert rescale_weights(np.zeros(0)).tolist() == []


def test_advantage_the_adaptive_coefficient_by_hand() -> None:
    # kl is twice the target: error 1, cut to 0.2; 500 of 10,000 rollouts: 1 + 0.2 x 0.05
    assert adapt_coefficient(0.1, 2.0, target=1.0, num_rollouts=500, horizon=10_000) == pytest.approx(0.101)
    assert adapt_coefficient(0.1, 0.9, target=1.0, num_rollouts=500, horizon=10_000) == pytest.approx(0.0995)
    assert adapt_coefficient(0.1, 0.0, target=1.0, num_rollouts=500, horizon=10_000) == pytest.approx(0.099)
    assert adapt_coefficient(0.1, 0.0, target=1.0, num_rollouts=500, horizon=1) == pytest.approx(0.08)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_advantage_rewards_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        normalize_rewards([Episode(group=0, reward=0.0, num_tokens=1)], np.array([bad]), mean="group", std="group")


def test_advantage_baselines_that_are_missing_are_named() -> None:
    alone = [Episode(group=7, reward=1.0, num_tokens=1)]
    with pytest.raises(ValueError, match="greedy answer, which group 7 does not have"):
        normalize_rewards(alone, np.ones(1), mean="greedy", std="none")
    with pytest.raises(ValueError, match="critic"):
        estimate_advantages(alone, np.ones(1), estimator="gae")
