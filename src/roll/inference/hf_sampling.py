"""Sampling of the next tokens of many rows at once, each row with its own settings and its own random numbers.

A token is drawn by inverting the cumulative distribution at one uniform number. So a row needs one random number per
token, and its k-th token depends only on its seed, k, and its own logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from roll.inference.inversion import BLOCK, invert, running_totals
from roll.types import SamplingParams

__all__ = ["Draw", "Sampler"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The next token of every row; the arrays have shape [rows]."""

    tokens: np.ndarray
    logprobs: np.ndarray
    """The float32 log-probs under the distribution that was sampled from; at temperature 1 for a greedy row."""
    choices: dict[int, np.ndarray] = field(default_factory=dict)
    """The float32 log-prob of each choice, by row, for rows restricted to a few tokens."""


class Sampler:
    """Samples tokens, with work buffers that are reused from step to step."""

    def __init__(self) -> None:
        self._scaled = torch.empty(0)
        self._weights = torch.empty(0)

    def sample(self, logits: Tensor, params: Sequence[SamplingParams], uniforms: np.ndarray) -> Draw:
        """Draw one token per row.

        Args:
            logits: [R, V] with R ≥ len(params); rows beyond are padding and are computed, but not returned.
            params: of each row.
            uniforms: [len(params)] float64 in [0, 1).

        Raises:
            FloatingPointError: the logits of a row are not finite.
        """
        rows = len(params)
        scaled = self._scale(logits, params)
        for row, param in enumerate(params):
            if param.choices:
                _keep_only(scaled[row], param.choices)
            if param.temperature > 0 and (param.top_k > 0 or param.top_p < 1):
                _keep_likely(scaled[row, : logits.shape[1]], param.top_k, param.top_p)
        highest = scaled.amax(-1, keepdim=True)
        weights = torch.sub(scaled, highest, out=self._weights[: len(logits)]).exp_()
        totals = running_totals(weights)
        if not torch.isfinite(totals[:rows, -1]).all():
            raise FloatingPointError("the model's logits are not finite (NaN or infinite)")
        tokens = invert(weights[:rows], totals[:rows], torch.from_numpy(uniforms).to(logits.device))
        greedy = [row for row, param in enumerate(params) if param.temperature <= 0]
        if greedy:
            tokens[greedy] = scaled[greedy].argmax(-1)
        chosen = scaled[:rows].gather(-1, tokens[:, None])
        logprobs = (chosen - highest[:rows])[:, 0].double() - totals[:rows, -1].log()
        choices = {
            row: (scaled[row, list(param.choices)] - highest[row]).double() - totals[row, -1].log()
            for row, param in enumerate(params)
            if param.choices
        }
        return Draw(
            tokens=tokens.cpu().numpy(),
            logprobs=logprobs.float().cpu().numpy(),
            choices={row: weights.float().cpu().numpy() for row, weights in choices.items()},
        )

    def _scale(self, logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
        """Return logits over temperature in float32, [R, V rounded up to whole blocks], padded with -inf."""
        rows, vocab = logits.shape
        padded = -(-vocab // BLOCK) * BLOCK
        if self._scaled.shape[0] < rows or self._scaled.shape[1:] != (padded,):
            self._scaled = torch.full((rows, padded), float("-inf"), device=logits.device)
            self._weights = torch.empty_like(self._scaled)
        scaled = self._scaled[:rows]
        scaled[:, :vocab].copy_(logits)
        temperatures = [param.temperature if param.temperature > 0 else 1.0 for param in params]
        if any(temperature != 1.0 for temperature in temperatures):
            temperatures += [1.0] * (rows - len(params))
            scaled /= torch.tensor(temperatures, device=logits.device)[:, None]
        return scaled


def _keep_only(scaled: Tensor, choices: Sequence[int]) -> None:
    """Set all but the given tokens of one row [V] to -inf, in place."""
    kept = scaled[list(choices)]
    scaled.fill_(float("-inf"))
    scaled[list(choices)] = kept


def _keep_likely(scaled: Tensor, top_k: int, top_p: float) -> None:
    """Apply top-k and top-p to one row [V], in place: all other tokens are set to -inf.

    First the `top_k` highest stay, including ties with the last of them. Of those, the smallest set of most likely
    tokens whose probability reaches `top_p` stays, at least one token.
    """
    if 0 < top_k < len(scaled):
        scaled.masked_fill_(scaled < scaled.topk(top_k).values[-1], float("-inf"))
    if top_p < 1:
        ordered, order = scaled.sort(descending=True, stable=True)
        probabilities = ordered.double().softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        outside = before >= top_p
        outside[0] = False
        scaled[order[outside]] = float("-inf")
