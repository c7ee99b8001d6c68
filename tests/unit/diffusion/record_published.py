"""Record what the published code of Flow-GRPO and DiffusionNFT computes, for `test_diffusion_losses`.

    python tests/unit/diffusion/record_published.py FLOW_GRPO_CHECKOUT DIFFUSION_NFT_CHECKOUT

Checkouts of github.com/yifan123/flow_grpo and github.com/NVlabs/DiffusionNFT are executed on small random inputs; the
inputs and the results are written to `published.json`. Nothing of their code is kept here.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SHAPE = (3, 2, 4, 4)


def to_lists(values: dict[str, torch.Tensor | float]) -> dict[str, Any]:
    return {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in values.items()}


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def record_flow_grpo(checkout: Path) -> dict[str, Any]:
    """Run the SDE step and the loss of Flow-GRPO."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    path = checkout / "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py"
    spec = importlib.util.spec_from_file_location("published_sde", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    steps = [0, 2, 5]
    timesteps = scheduler.timesteps[steps]
    latents, velocity, reference = draw(*SHAPE, seed=1), draw(*SHAPE, seed=2), draw(*SHAPE, seed=3)
    moved = draw(*SHAPE, seed=4) * 0.1 + latents
    old, advantages = draw(3, seed=5) * 1e-4, draw(3, seed=6) * 4
    _, logprob, mean, std = module.sde_step_with_logprob(scheduler, velocity, timesteps, latents, 0.7, moved)
    _, _, mean_ref, _ = module.sde_step_with_logprob(scheduler, reference, timesteps, latents, 0.7, moved)
    clip_range, beta, most = 1e-4, 0.04, 5.0
    source = (checkout / "scripts/train_sd3.py").read_text()
    text = _cut(source, "advantages = torch.clamp(", "loss = policy_loss + config.train.beta * kl_loss")
    train = SimpleNamespace(adv_clip_max=most, clip_range=clip_range, beta=beta)
    old_logprob = logprob + old
    names: dict[str, Any] = {
        "torch": torch,
        "config": SimpleNamespace(train=train),
        "sample": {"advantages": advantages[:, None], "log_probs": old_logprob[:, None]},
        "j": 0,
        "log_prob": logprob,
        "prev_sample_mean": mean,
        "prev_sample_mean_ref": mean_ref,
        "std_dev_t": std,
    }
    exec(compile(text, str(path), "exec"), names)
    inputs = {"latents": latents, "velocity": velocity, "reference": reference, "next_latents": moved}
    return to_lists(
        {
            **inputs,
            "sigmas": scheduler.sigmas,
            "steps": torch.tensor(steps),
            "advantages": advantages,
            "old_logprob": old_logprob,
            "clip_range": clip_range,
            "beta": beta,
            "mean": mean,
            "logprob": logprob,
            "policy_loss": names["policy_loss"],
            "kl_loss": names["kl_loss"],
            "loss": names["loss"],
        }
    )


def record_nft(checkout: Path) -> dict[str, Any]:
    """Run the loss of DiffusionNFT."""
    source = (checkout / "scripts/train_nft_sd3.py").read_text()
    text = _cut(source, "loss_terms = {}", "kl_div_loss = torch.mean(kl_div_loss)")
    clean, noise = draw(*SHAPE, seed=11), draw(*SHAPE, seed=12)
    current, old, reference = draw(*SHAPE, seed=13), draw(*SHAPE, seed=14), draw(*SHAPE, seed=15)
    sigma, advantages = torch.tensor([0.9, 0.5, 0.1]), draw(3, seed=16) * 4
    expanded = sigma.view(-1, 1, 1, 1)
    beta, most, kl = 0.3, 5.0, 0.01
    names: dict[str, Any] = {
        "torch": torch,
        "config": SimpleNamespace(beta=beta, train=SimpleNamespace(adv_clip_max=most, beta=kl)),
        "train_sample_batch": {"advantages": advantages[:, None]},
        "j_idx": 0,
        "x0": clean,
        "xt": (1 - expanded) * clean + expanded * noise,
        "t_expanded": expanded,
        "forward_prediction": current,
        "old_prediction": old,
        "ref_forward_prediction": reference,
    }
    exec(compile(text, "train_nft_sd3.py", "exec"), names)
    return to_lists(
        {
            "clean": clean,
            "noise": noise,
            "current": current,
            "old": old,
            "reference": reference,
            "sigma": sigma,
            "advantages": advantages,
            "beta": beta,
            "kl": kl,
            # `policy_loss` itself is overwritten in place when the penalty is added.
            "policy_loss": names["loss_terms"]["unweighted_policy_loss"] * most,
            "loss": names["loss"],
        }
    )


def _cut(source: str, first: str, last: str) -> str:
    """Return the statements from the one that begins with `first` to the one that begins with `last`."""
    lines = source.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    stop = next(i for i, line in enumerate(lines[start:], start) if line.strip().startswith(last))
    text = textwrap.dedent("\n".join(lines[start : stop + 1]))
    ast.parse(text if not text.rstrip().endswith(":") else text + "\n    pass")
    return text


if __name__ == "__main__":
    found = {"flow_grpo": record_flow_grpo(Path(sys.argv[1])), "nft": record_nft(Path(sys.argv[2]))}
    Path(__file__).with_name("published.json").write_text(json.dumps(found) + "\n")
