"""Temperature, top-k and top-p sampling for many rows at once; each row has its own settings and random numbers.

A token is sampled by inverting the cumulative distribution at a uniform random number. A row needs one random number
per token, and its k-th token depends only on its seed, k, and its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from roll.inference.inversion import BLOCK_SIZE, compute_running_totals, sample_by_inversion
from roll.types import SamplingParams

__all__ = ["SampledTokens", "Sampler"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """The sampled token of every row; arrays have shape [rows]."""

    tokens: np.ndarray
    logprobs: np.ndarray
    """Log-probs under the distribution that was sampled from, float32; at temperature 1 for a greedy row."""
    choices: dict[int, np.ndarray] = field(default_factory=dict)
    """For each row whose sampling is restricted to a few tokens: the log-probs of these tokens, float32, by row index.
    """


class Sampler:
    """Samples tokens, and reuses its work buffers across steps.

    Args:
        excluded: Tokens that are never sampled.
    """

    def __init__(self, excluded: Sequence[int] = ()) -> None:
        self._excluded = list(excluded)
        self.release()

    def release(self) -> None:
        """Free the work buffers."""
        self._scaled = torch.empty(0)
        self._weights = torch.empty(0)

    def sample(self, logits: Tensor, params: Sequence[SamplingParams], uniforms: np.ndarray) -> SampledTokens:
        """Sample one token per row.

        Args:
            logits: Logits [R, V]. Rows beyond `len(params)` are padding: they are computed, but not returned.
            params: Sampling parameters of each row.
            uniforms: Random numbers, float64 [len(params)] in [0, 1).

        Raises:
            FloatingPointError: the logits of a row are not finite.
        """
        rows = len(params)
        scaled = self._scale(logits, params)
        if self._excluded:
            scaled[:, self._excluded] = float("-inf")
        for row, param in enumerate(params):
            if param.choices:
                _restrict_to_choices(scaled[row], param.choices)
            if param.temperature > 0 and (param.top_k > 0 or param.top_p < 1):
                _apply_top_k_top_p(scaled[row, : logits.shape[1]], param.top_k, param.top_p)
        highest = scaled.amax(-1, keepdim=True)
        # Weights are not normalized: instead of dividing [R, V] numbers, `sample_by_inversion` multiplies the uniform
        # by the total.
        weights = torch.sub(scaled, highest, out=self._weights[: len(logits)]).exp_()
        totals = compute_running_totals(weights)
        if not torch.isfinite(totals[:rows, -1]).all():
            raise FloatingPointError("the model's logits are not finite (NaN or infinite)")
        tokens = sample_by_inversion(weights[:rows], totals[:rows], torch.from_numpy(uniforms).to(logits.device))
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
        return SampledTokens(
            tokens=tokens.cpu().numpy(),
            logprobs=logprobs.float().cpu().numpy(),
            choices={row: weights.float().cpu().numpy() for row, weights in choices.items()},
        )

    def _scale(self, logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
        """Return logits divided by temperature, float32 [R, W], padded with -inf; W is V rounded up to full blocks."""
        rows, vocab = logits.shape
        padded = -(-vocab // BLOCK_SIZE) * BLOCK_SIZE
        # The buffers are reused, because allocating [R, V] numbers in every step costs more than the arithmetic.
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


def _restrict_to_choices(logits: Tensor, choices: Sequence[int]) -> None:
    """Set all tokens of one row [V] except `choices` to -inf, in place."""
    kept = logits[list(choices)]
    logits.fill_(float("-inf"))
    logits[list(choices)] = kept


def _apply_top_k_top_p(logits: Tensor, top_k: int, top_p: float) -> None:
    """Apply top-k and top-p to one row [V], in place: all other tokens are set to -inf.

    First, the `top_k` most likely tokens are kept, including ties. Then, the smallest set of most likely tokens whose
    probability reaches `top_p` is kept; it has at least one token.
    """
    if 0 < top_k < len(logits):
        logits.masked_fill_(logits < logits.topk(top_k).values[-1], float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(descending=True, stable=True)
        probabilities = ordered.double().softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        # A token is kept if the more likely tokens have not reached `top_p`, so the token that reaches it is kept too.
        outside = before >= top_p
        outside[0] = False
        logits[order[outside]] = float("-inf")
