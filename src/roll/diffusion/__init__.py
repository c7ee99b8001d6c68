"""Diffusion and flow models: denoising paths, samplers, losses, and their trainer.

    prompt ─► conditions ─┐
    noise x_1 ────────────┴─► denoiser, step by step along sigmas 1 → 0 ─► latents x_0 ─ decode ─► image or video
                                      │
                                      └─ path: latents and log-probs of every step ─► losses

A path of latents is not a sequence of tokens, so this package has its own records, denoiser and losses. Ranks,
optimizer, LoRA and checkpoints are those of `roll.training`, which work for any network.

Conventions: x_sigma = (1 - sigma) x_0 + sigma eps, with sigma from 1 (noise) to 0 (data); the velocity v = eps - x_0.
"""
