"""The trainer of diffusion models: sampling, updates, other weights, checkpoints and exports, with a small model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from worlds.diffusion_models import SmallModel, make_spec
from worlds.diffusion_ranks import (
    LOSSES,
    REWARD,
    SDE,
    collect_gradients,
    make_batch,
    make_requests,
    read_weights,
    run_rank,
    run_updates,
)
from worlds.ranks import run_ranks

from roll.config.model import LoRAConfig
from roll.diffusion.losses import (
    RewardGradientLoss,
)
from roll.diffusion.models.loading import load_weights
from roll.diffusion.sampling import draw_noise
from roll.diffusion.trainer import DiffusionTrainer
from roll.errors import LossError


def test_diffusion_samples_depend_only_on_their_seeds() -> None:
    trainer = DiffusionTrainer(make_spec())
    together = trainer.sample(make_requests(), SDE)
    alone = [trainer.sample([request], SDE)[0] for request in reversed(make_requests())][::-1]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one.latents, other.latents, atol=1e-6)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    first = together[0]
    assert first.latents.shape == (5, 1, 2, 2) and first.logprobs.shape == (4,)
    assert first.images is not None and first.images.shape == (2, 2, 1) and first.images.dtype == np.uint8
    torch.testing.assert_close(torch.from_numpy(first.latents[0]), draw_noise(100, 5, (1, 2, 2))[0])


def test_diffusion_sampling_can_begin_at_any_step_of_a_path() -> None:
    trainer = DiffusionTrainer(make_spec())
    ode = dataclasses.replace(SDE, noise_level=0.0)
    (whole,) = trainer.sample(make_requests(1), ode)
    (rest,) = trainer.sample(make_requests(1, start=whole.latents[2], start_step=2), ode)
    np.testing.assert_array_equal(rest.latents, whole.latents[2:])
    assert not whole.logprobs.any()
    (last,) = trainer.sample(make_requests(1, start=whole.latents[4], start_step=4), ode)
    np.testing.assert_array_equal(last.images, whole.images)


def test_flow_grpo_ratio_is_1_before_the_first_update_also_with_guidance() -> None:
    trainer = DiffusionTrainer(make_spec())
    result = trainer.measure(make_batch(trainer), LOSSES["flow_grpo"])
    assert result.metrics["ratio/mean"] == pytest.approx(1.05 + 0.2, abs=1e-5)  # the mean of the samples' weights
    assert result.metrics["ratio/approx_kl"] == pytest.approx(0.0, abs=1e-8)
    assert result.metrics["kl/mean"] == 0.0
    assert result.num_tokens == 6 * 4


@pytest.mark.parametrize("name", list(LOSSES))
def test_diffusion_gradient_does_not_depend_on_micro_batches(name: str) -> None:
    found = []
    for size in (2, 4, 64):
        trainer = DiffusionTrainer(make_spec(activation_checkpointing=size == 4))
        trainer.start_old_policy()
        batch = dataclasses.replace(make_batch(trainer), micro_batch_size=size)
        trainer.train_step(batch, LOSSES["flow_matching"])  # so that current, old and reference differ
        trainer.discard_gradients()
        result = trainer.forward_backward(batch, LOSSES[name])
        found.append((result.loss, collect_gradients(trainer)))
    for loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, found[0][1][key], rtol=1e-4, atol=1e-6)


def test_flow_grpo_gradient_equals_a_float64_reference() -> None:
    trainer = DiffusionTrainer(make_spec())
    batch = make_batch(trainer)
    trainer.train_step(batch, LOSSES["flow_matching"])
    trainer.discard_gradients()
    result = trainer.forward_backward(batch, LOSSES["flow_grpo"])
    initial = DiffusionTrainer(make_spec()).network.double()
    network = DiffusionTrainer(make_spec()).network
    network.load_state_dict(trainer.network.state_dict())
    network.double()
    total = torch.zeros((), dtype=torch.float64)
    for sample in batch.samples:
        path = sample.path
        assert path is not None and sample.advantages is not None
        for j in range(4):
            x, following = (torch.from_numpy(path.latents[j + k])[None].double() for k in (0, 1))
            now, then = float(path.sigmas[j]), float(path.sigmas[j + 1])
            std = 0.7 * (now / (1 - (now if now < 1 else float(path.sigmas[1])))) ** 0.5
            means = []
            for each in (network, initial):
                word = torch.tensor([len(sample.prompt)])
                sigma = torch.tensor([now], dtype=torch.float64)
                prompted, empty = each(x, sigma, word), each(x, sigma, torch.tensor([0]))
                v = empty + 1.5 * (prompted - empty)
                d = then - now
                means.append(x * (1 + std**2 / (2 * now) * d) + v * (1 + std**2 * (1 - now) / (2 * now)) * d)
            deviation = std * (now - then) ** 0.5
            logprob = torch.distributions.Normal(means[0], deviation).log_prob(following).mean()
            ratio = torch.exp(logprob - float(path.logprobs[j]))
            advantage = min(max(float(sample.advantages[j]), -5.0), 5.0)
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            kl = ((means[0] - means[1].detach()) ** 2).mean() / (2 * deviation**2)
            total = total + sample.weight * (loss + 0.5 * kl) / (6 * 4)
    total.backward()
    assert result.loss == pytest.approx(float(total), rel=1e-4)
    expected = {name: p.grad for name, p in network.named_parameters()}
    for name, gradient in collect_gradients(trainer).items():
        torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-3, atol=1e-5)


def test_reward_gradient_equals_finite_differences() -> None:
    trainer = DiffusionTrainer(make_spec())
    batch = make_batch(trainer)
    trainer.train_step(batch, LOSSES["flow_matching"])  # away from the reference, so that the divergence has a gradient
    trainer.discard_gradients()
    loss = RewardGradientLoss(reward=REWARD, num_gradient_steps=4, scale=10.0, kl_coefficient=0.0)
    trainer.forward_backward(batch, loss)
    bias = trainer.network.blocks[1].bias
    assert bias.grad is not None
    for i in range(4):
        values = []
        for change in (1e-2, -1e-2):
            with torch.no_grad():
                bias[i] += change
                values.append(trainer.measure(batch, loss).loss)
                bias[i] -= change
        assert float(bias.grad[i]) == pytest.approx((values[0] - values[1]) / 2e-2, rel=2e-2, abs=1e-4)


def test_reward_gradient_uses_only_the_last_steps() -> None:
    trainer = DiffusionTrainer(make_spec())
    batch = make_batch(trainer)
    norms = []
    for steps in (1, 4):
        trainer.discard_gradients()
        loss = RewardGradientLoss(reward=REWARD, num_gradient_steps=steps, scale=10.0, kl_coefficient=0.0)
        result = trainer.forward_backward(batch, loss)
        norms.append((result.metrics["reward/mean"], float(trainer.network.blocks[1].bias.grad.norm())))
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-5) and norms[0][1] < 0.6 * norms[1][1]


def test_reward_gradient_names_a_reward_without_a_gradient(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def score(images, prompts):\n    return images.detach().mean(dim=(1, 2, 3))\n")
    trainer = DiffusionTrainer(make_spec())
    with pytest.raises(LossError, match="does not depend on the images"):
        trainer.train_step(make_batch(trainer), RewardGradientLoss(reward=f"{file}:score"))


def test_nft_old_policy_is_an_average_and_current_weights_stay_bit_for_bit() -> None:
    trainer = DiffusionTrainer(make_spec())
    trainer.start_old_policy()
    start, batch = read_weights(trainer), make_batch(trainer)
    before = trainer.sample(make_requests(), SDE)
    for _ in range(2):
        trainer.train_step(batch, LOSSES["nft"])
    now = read_weights(trainer)
    old = trainer.sample(make_requests(), SDE, weights="old")
    np.testing.assert_array_equal(old[0].latents, before[0].latents)
    assert all(torch.equal(value, read_weights(trainer)[name]) for name, value in now.items())
    trainer.update_old_policy(0.25)
    with trainer._use_weights("old"):
        for name, value in read_weights(trainer).items():
            torch.testing.assert_close(value, 0.25 * start[name] + 0.75 * now[name])


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2, target_modules=["0", "1"])], ids=["full", "lora"])
def test_diffusion_checkpoint_resumes_bit_for_bit_with_the_old_policy(lora: LoRAConfig | None, tmp_path: Path) -> None:
    def build() -> DiffusionTrainer:
        trainer = DiffusionTrainer(make_spec(lora=lora))
        trainer.start_old_policy()
        return trainer

    straight = build()
    batch = make_batch(straight)
    straight.train_step(batch, LOSSES["nft"])
    straight.update_old_policy(0.5)
    straight.save(tmp_path / "state")
    resumed = build()
    resumed.load(tmp_path / "state")
    results = [each.train_step(batch, LOSSES["nft"]) for each in (straight, resumed)]
    assert results[0].loss == results[1].loss and results[0].grad_norm == results[1].grad_norm
    one, other = read_weights(straight), read_weights(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert resumed.num_steps == 2


def test_diffusion_lora_trains_only_adapters_and_the_export_has_them_merged(tmp_path: Path) -> None:
    trainer = DiffusionTrainer(make_spec(lora=LoRAConfig(rank=2)))
    batch = make_batch(trainer)
    before = read_weights(trainer)
    trainer.train_step(batch, LOSSES["flow_grpo"])
    trainer.train_step(batch, LOSSES["flow_matching"])
    changed = {name for name, value in read_weights(trainer).items() if not torch.equal(value, before[name])}
    assert changed and all("lora_" in name for name in changed)
    trainer.export(tmp_path / "model")
    again = SmallModel()
    load_weights(again, tmp_path / "model")
    latents, sigma, word = torch.randn(3, 1, 2, 2), torch.tensor([0.9, 0.5, 0.1]), torch.tensor([0, 1, 2])
    torch.testing.assert_close(again.denoiser(latents, sigma, word), trainer.network(latents, sigma, word))


@pytest.mark.slow
def test_diffusion_two_ranks_do_what_one_does(tmp_path: Path) -> None:
    run_ranks(run_rank, (tmp_path, list(LOSSES)), 2)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    for name in LOSSES:
        alone = run_updates(DiffusionTrainer(make_spec()), name)
        np.testing.assert_allclose(found[name]["latents"], alone["latents"], atol=1e-5)
        assert found[name]["losses"] == pytest.approx(alone["losses"], rel=1e-4, abs=1e-6)
        for key, value in alone["weights"].items():
            torch.testing.assert_close(found[name]["weights"][key], value, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(found["buffers"], found["loaded"], strict=True))
    again = SmallModel()
    load_weights(again, tmp_path / "model")
    for key, value in again.denoiser.state_dict().items():
        torch.testing.assert_close(value, found["nft"]["weights"][key])
