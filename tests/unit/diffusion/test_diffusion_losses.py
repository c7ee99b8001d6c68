"""Losses of diffusion models against the published code, float64 references, and hand-computed values."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.diffusion.advantages import compute_advantages, compute_reward_weights, compute_step_rewards
from roll.diffusion.losses import DPOLoss, FlowMatchingLoss, NFTLoss, PolicyGradientLoss, Terms
from roll.diffusion.records import DenoisingSettings, DiffusionSample
from roll.diffusion.steps import compute_logprob, compute_sde_step, compute_sigmas

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
SETTINGS = DenoisingSettings(num_steps=4, noise_level=0.7)


def read(kind: str) -> dict[str, Any]:
    return {name: torch.tensor(value) if isinstance(value, list) else value for name, value in PUBLISHED[kind].items()}


def make_terms(latents: Tensor, sigma: Tensor, data: dict[str, Tensor], **others: Tensor) -> Terms:
    weights = torch.full_like(sigma, 1 / len(sigma))
    return Terms(latents=latents, sigma=sigma, loss_weights=weights, data=data, other_velocities=others)


def test_flow_grpo_step_and_loss_equal_those_of_the_published_code() -> None:
    given = read("flow_grpo")
    steps, sigmas = given["steps"], given["sigmas"]
    now, then, second = sigmas[steps], sigmas[steps + 1], sigmas[1]
    step = compute_sde_step(given["latents"], given["velocity"], now, then, float(second), 0.7)
    torch.testing.assert_close(step.mean, given["mean"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compute_logprob(step, given["next_latents"]), given["logprob"], rtol=1e-5, atol=1e-5)
    loss = PolicyGradientLoss(
        clip_range=given["clip_range"], kl_coefficient=given["beta"], kl_variant="published", noise_level=0.7
    )
    data = {
        "next_latents": given["next_latents"],
        "next_sigma": then,
        "second_sigma": second.expand(3),
        "advantage": given["advantages"],
        "old_logprob": given["old_logprob"],
    }
    terms = make_terms(given["latents"], now, data, reference=given["reference"])
    each, metrics = loss.compute(given["velocity"], terms)
    assert float(each.mean()) == pytest.approx(given["loss"], rel=1e-5)
    assert float(metrics["kl/mean"].mean()) == pytest.approx(given["kl_loss"], rel=1e-5)
    unpenalized = PolicyGradientLoss(clip_range=given["clip_range"], noise_level=0.7)
    assert float(unpenalized.compute(given["velocity"], terms)[0].mean()) == pytest.approx(
        given["policy_loss"], rel=1e-5
    )


def test_flow_grpo_exact_kl_is_the_divergence_of_the_two_gaussians() -> None:
    given = read("flow_grpo")
    now, then = (given["sigmas"][given["steps"] + k] for k in (0, 1))
    data = {
        "next_latents": given["next_latents"],
        "next_sigma": then,
        "second_sigma": given["sigmas"][1].expand(3),
        "advantage": torch.zeros(3),
        "old_logprob": given["old_logprob"],
    }
    terms = make_terms(given["latents"], now, data, reference=given["reference"])
    _, metrics = PolicyGradientLoss(kl_coefficient=1.0, kl_variant="exact", noise_level=0.7).compute(
        given["velocity"], terms
    )
    own, other = (
        compute_sde_step(given["latents"], given[name], now, then, float(given["sigmas"][1]), 0.7)
        for name in ("velocity", "reference")
    )
    gaussians = [torch.distributions.Normal(step.mean, step.deviation.expand_as(step.mean)) for step in (own, other)]
    expected = torch.distributions.kl_divergence(*gaussians).mean(dim=(1, 2, 3))
    torch.testing.assert_close(metrics["kl/mean"], expected, rtol=1e-5, atol=1e-6)


def test_diffusion_nft_loss_equals_that_of_the_published_code() -> None:
    given = read("nft")
    sigma = given["sigma"]
    mixed = (1 - sigma.view(-1, 1, 1, 1)) * given["clean"] + sigma.view(-1, 1, 1, 1) * given["noise"]
    data = {"clean": given["clean"], "noise": given["noise"], "advantage": given["advantages"]}
    terms = make_terms(mixed, sigma, data, old=given["old"], reference=given["reference"])
    each, _ = NFTLoss(beta=given["beta"], kl_coefficient=0.0).compute(given["current"], terms)
    assert float(each.mean()) == pytest.approx(given["policy_loss"], rel=1e-5)
    penalized, _ = NFTLoss(beta=given["beta"], kl_coefficient=given["kl"]).compute(given["current"], terms)
    assert float(penalized.mean()) == pytest.approx(given["loss"], rel=1e-5)


def test_diffusion_nft_velocity_form_moves_towards_good_samples_and_away_from_bad_ones() -> None:
    # At v_theta = v_old, the gradient is m (2 r - 1) times that of the squared error (arXiv 2509.16117, section 3.2).
    clean, noise = torch.randn(2, 1, 2, 2, dtype=torch.float64), torch.randn(2, 1, 2, 2, dtype=torch.float64)
    old = torch.randn(2, 1, 2, 2, dtype=torch.float64)
    velocity = old.clone().requires_grad_()
    advantages = torch.tensor([5.0, -2.0], dtype=torch.float64)
    data = {"clean": clean, "noise": noise, "advantage": advantages}
    terms = make_terms(noise, torch.ones(2, dtype=torch.float64), data, old=old)
    each, _ = NFTLoss(beta=0.5, kl_coefficient=0.0, distance="velocity").compute(velocity, terms)
    (found,) = torch.autograd.grad(each.sum(), velocity)
    expected = 2 * (old - (noise - clean)) / 4 * advantages.view(-1, 1, 1, 1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_diffusion_sde_at_noise_0_is_the_ode(shift: float) -> None:
    sigmas = torch.from_numpy(compute_sigmas(5, shift))
    assert sigmas[0] == 1 and sigmas[-1] == 0 and bool((sigmas[:-1] > sigmas[1:]).all())
    latents, velocity = torch.randn(5, 3, 2), torch.randn(5, 3, 2)
    step = compute_sde_step(latents, velocity, sigmas[:-1], sigmas[1:], float(sigmas[1]), 0.0)
    expected = latents + velocity * (sigmas[1:] - sigmas[:-1])[:, None, None]
    torch.testing.assert_close(step.mean, expected)
    assert bool((step.deviation == 0).all())


def test_diffusion_sde_keeps_the_marginals_of_the_ode() -> None:
    # x_0 ~ N(0, s^2): x_sigma is Gaussian, and the velocity E[eps - x_0 | x] is linear in x, so variances are exact.
    # It begins at sigma = 0.9: near 1, where the coefficient grows without bound, a step of any size is too large.
    s2 = 0.25
    sigmas = compute_sigmas(2000).astype(np.float64)
    sigmas = sigmas[sigmas <= 0.9]
    variance = (1 - sigmas[0]) ** 2 * s2 + sigmas[0] ** 2
    for now, then in itertools.pairwise(sigmas):
        slope = (now - (1 - now) * s2) / ((1 - now) ** 2 * s2 + now**2)
        one = torch.ones(1, 1, dtype=torch.float64)
        step = compute_sde_step(one, one * slope, torch.tensor([now]), torch.tensor([then]), 0.99, 0.7)
        variance = float(step.mean) ** 2 * variance + float(step.deviation) ** 2
        assert variance == pytest.approx((1 - then) ** 2 * s2 + then**2, rel=5e-3)


def test_diffusion_dpo_loss_by_hand() -> None:
    target = torch.zeros(4, 1, dtype=torch.float64)
    velocity = torch.tensor([[1.0], [2.0], [3.0], [1.0]], dtype=torch.float64)
    reference = torch.tensor([[2.0], [1.0], [3.0], [2.0]], dtype=torch.float64)
    terms = make_terms(target, torch.full((4,), 0.5), {"target": target}, reference=reference)
    each, metrics = DPOLoss(beta=0.2).compute(velocity, terms)
    # Errors 1, 4, 9, 1 against 4, 1, 9, 4: margins -3 + -3 = 6 better for the first pair, 3 worse for the second.
    first, second = 0.1 * ((4 - 1) - (1 - 4)), 0.1 * ((9 - 9) - (4 - 1))
    expected = [math.log(1 + math.exp(-first)), 0, math.log(1 + math.exp(-second)), 0]
    assert each.tolist() == pytest.approx(expected)
    assert metrics["preference/accuracy"].tolist() == [1, 0, 0, 0]


def test_diffusion_dpo_pairs_have_the_same_noise_and_levels() -> None:
    samples = [DiffusionSample(sample_id=name, prompt="", seed=7, unit=1) for name in "wl"]
    built = [DPOLoss(num_draws=3).build_terms(s, torch.full((2,), float(i)), SETTINGS) for i, s in enumerate(samples)]
    for won, lost in zip(*built, strict=True):
        assert won.sigma == lost.sigma
        torch.testing.assert_close(won.data["target"] + 0.0, lost.data["target"] + 1.0)


def test_flow_matching_terms_are_on_the_line_from_data_to_noise() -> None:
    clean = torch.randn(2, 3)
    sample = DiffusionSample(sample_id="a", prompt="x", seed=3)
    terms = FlowMatchingLoss(num_draws=50, prompt_dropout=0.5).build_terms(sample, clean, SETTINGS)
    for term in terms:
        torch.testing.assert_close(term.latents, clean + term.sigma * term.data["target"])
    assert 10 < sum(term.prompt == "" for term in terms) < 40
    again = FlowMatchingLoss(num_draws=50, prompt_dropout=0.5).build_terms(sample, clean, SETTINGS)
    assert all(torch.equal(a.latents, b.latents) for a, b in zip(terms, again, strict=True))


def test_diffusion_advantages_by_hand() -> None:
    rewards = np.array([[1.0, 3.0], [5.0, 5.0]])
    assert compute_advantages(rewards, "none").tolist() == [[-1, 1], [0, 0]]
    np.testing.assert_allclose(compute_advantages(rewards, "group"), [[-1 / 1.0001, 1 / 1.0001], [0, 0]])
    spread = np.std([1, 3, 5, 5]) + 1e-4
    np.testing.assert_allclose(compute_advantages(rewards, "batch"), [[-1 / spread, 1 / spread], [0, 0]])
    steps = np.stack([rewards, 2 * rewards], axis=2)
    np.testing.assert_allclose(compute_advantages(steps, "none")[..., 1], [[-2, 2], [0, 0]])
    weights = compute_reward_weights(np.array([[0.0, 1.0]]), 0.5)
    assert weights.mean() == pytest.approx(1.0) and weights[0, 1] / weights[0, 0] == pytest.approx(math.exp(2))


@pytest.mark.parametrize("strict", [False, True])
def test_turning_points_by_hand(strict: bool) -> None:
    # R_0 … R_4. First row: total +0.5; steps +0.1, -0.3, +0.4, +0.3. Step 1 has the sign of the whole (a turning point
    # if loose; strict: R_T - R_1 = +0.4 agrees as well); step 3 is one: s_2 < 0 < s_3, and R_T - R_3 = +0.3 agrees.
    # Second row, total -0.4: steps +0.2, -0.6, +0.1, -0.1. Step 2 is one: R_T - R_2 = 0.0, so it is not if strict.
    # Step 4: s_3 < 0 < s_4; R_T - R_4 = 0, so it is not one if strict.
    rewards = np.array([[0.0, 0.1, -0.2, 0.2, 0.5], [0.4, 0.6, 0.0, 0.1, 0.0]])
    found = compute_step_rewards(rewards, strict=strict)
    if strict:  # two positive turning points, no negative one: none is kept
        np.testing.assert_allclose(found, np.diff(rewards, axis=1))
        return
    # Two positive ones (+0.5 at step 1, +0.7 at step 3), two negative ones (-0.6 at step 2, -0.1 at step 4): all stay.
    np.testing.assert_allclose(found, [[0.5, -0.3, 0.7, 0.3], [0.2, -0.6, 0.1, -0.1]], atol=1e-12)


def test_turning_points_are_balanced_by_magnitude() -> None:
    rewards = np.array([[0.0, 0.1, -0.2, 0.5], [0.0, -0.1, -0.4, -0.5]])
    # Positive: steps 1 (+0.5) and 3 (+0.7) of the first row; negative: step 1 of the second (-0.5). One of each stays.
    found = compute_step_rewards(rewards, strict=False)
    np.testing.assert_allclose(found, [[0.1, -0.3, 0.7], [-0.5, -0.3, -0.1]], atol=1e-12)
