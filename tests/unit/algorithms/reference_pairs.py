"""Losses of texts, pairs and scores as the papers write them, on padded matrices in float64: for small numbers only.

Nothing of `roll.algorithms` is used. Rows of a matrix are sequences, columns tokens; `mask` says which count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Sequences as rows; those of a pair are rows of equal `pair`."""

    logprobs: Tensor
    """[B, L]"""
    ref: Tensor
    mask: Tensor
    preferred: list[bool]
    pair: list[int]
    target: list[float] | None = None
    values: Tensor | None = None
    """[B]"""

    def rows(self) -> tuple[list[int], list[int]]:
        """Of chosen and of rejected answers, pair after pair."""
        pairs = sorted(set(self.pair))
        both = list(zip(self.pair, self.preferred, strict=True))
        return [both.index((p, True)) for p in pairs], [both.index((p, False)) for p in pairs]


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def summed(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum(1)


def averaged(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum(1) / mask.sum(1)


def of_ratios(score: Callable[[Tensor, Tensor], Tensor], form: Callable[[Tensor, Tensor, Tensor], Tensor]):
    """A loss of the log-ratios of both answers; the form gets them and the pair's margin."""

    def loss(batch: Padded) -> Tensor:
        chosen, rejected = batch.rows()
        s = score(batch.logprobs - batch.ref, batch.mask)
        return form(s[chosen], s[rejected], margins(batch)).mean()

    return loss


def margins(batch: Padded) -> Tensor:
    chosen, _ = batch.rows()
    if batch.target is None:
        return torch.zeros(len(chosen), dtype=torch.float64)
    return torch.tensor([batch.target[row] for row in chosen], dtype=torch.float64)


def dpo(w: Tensor, r: Tensor, m: Tensor, beta: float = 0.1) -> Tensor:
    return -torch.log(sigmoid(beta * (w - r) - m))


def cdpo(w: Tensor, r: Tensor, m: Tensor, beta: float = 0.1, e: float = 0.1) -> Tensor:
    return (1 - e) * dpo(w, r, m, beta) + e * dpo(r, w, -m, beta)


def robust(w: Tensor, r: Tensor, m: Tensor, beta: float = 0.1, e: float = 0.1) -> Tensor:
    return ((1 - e) * dpo(w, r, m, beta) - e * dpo(r, w, -m, beta)) / (1 - 2 * e)


def ipo(w: Tensor, r: Tensor, m: Tensor, tau: float = 0.1) -> Tensor:
    return (w - r - m / tau - 1 / (2 * tau)) ** 2


def hinge(w: Tensor, r: Tensor, m: Tensor, beta: float = 0.1) -> Tensor:
    slack = 1 - (beta * (w - r) - m)
    return torch.where(slack > 0, slack, 0.0)


def exo(w: Tensor, r: Tensor, m: Tensor, beta: float = 0.1, e: float = 1e-3) -> Tensor:
    p = sigmoid(beta * (w - r) - m)
    return p * torch.log(p / (1 - e)) + (1 - p) * torch.log((1 - p) / e)


def nca(w: Tensor, r: Tensor, m: Tensor, beta: float = 0.1) -> Tensor:
    first = torch.log(sigmoid(beta * w)) + 0.5 * torch.log(sigmoid(-beta * w))
    return -first - 0.5 * torch.log(sigmoid(-beta * r))


def sppo(w: Tensor, r: Tensor, m: Tensor, beta: float = 0.1) -> Tensor:
    return (w - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2


def apo_zero(w: Tensor, r: Tensor, m: Tensor, beta: float = 0.1) -> Tensor:
    return (1 - sigmoid(beta * w)) + sigmoid(beta * r)


def apo_down(w: Tensor, r: Tensor, m: Tensor, beta: float = 0.1) -> Tensor:
    return sigmoid(beta * w) + 1 - sigmoid(beta * (w - r))


def discopop(w: Tensor, r: Tensor, m: Tensor, beta: float = 0.1, tau: float = 0.05) -> Tensor:
    rho = beta * (w - r) - m
    mix = sigmoid(rho / tau)
    return (1 - mix) * -torch.log(sigmoid(rho)) + mix * torch.exp(-rho)


def chosen_likelihood(batch: Padded) -> Tensor:
    """Mean over all tokens of all chosen answers."""
    chosen, _ = batch.rows()
    return -(batch.logprobs * batch.mask)[chosen].sum() / batch.mask[chosen].sum()


def rpo(batch: Padded, beta: float = 0.1, alpha: float = 1.0) -> Tensor:
    chosen, _ = batch.rows()
    nll = -averaged(batch.logprobs, batch.mask)[chosen].mean()
    return of_ratios(summed, lambda w, r, m: dpo(w, r, m, beta))(batch) + alpha * nll


def simpo(batch: Padded, beta: float = 2.0, gamma: float = 0.5) -> Tensor:
    chosen, rejected = batch.rows()
    s = averaged(batch.logprobs, batch.mask)
    return -torch.log(sigmoid(beta * s[chosen] - beta * s[rejected] - gamma - margins(batch))).mean()


def cpo(batch: Padded, beta: float = 0.1, alpha: float = 1.0) -> Tensor:
    chosen, rejected = batch.rows()
    s = summed(batch.logprobs, batch.mask)
    prefer = -torch.log(sigmoid(beta * s[chosen] - beta * s[rejected] - margins(batch))).mean()
    return prefer + alpha * chosen_likelihood(batch)


def orpo(batch: Padded, weight: float = 0.1) -> Tensor:
    chosen, rejected = batch.rows()
    p = torch.exp(averaged(batch.logprobs, batch.mask))
    odds = p / (1 - p)
    return chosen_likelihood(batch) - weight * torch.log(sigmoid(torch.log(odds[chosen] / odds[rejected]))).mean()


def kto(batch: Padded, z0: float, beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0) -> Tensor:
    r = summed(batch.logprobs - batch.ref, batch.mask)
    terms = []
    for row, wanted in enumerate(batch.preferred):
        if wanted:
            terms.append(desirable - desirable * sigmoid(beta * (r[row] - z0)))
        else:
            terms.append(undesirable - undesirable * sigmoid(beta * (z0 - r[row])))
    return torch.stack(terms).mean()


def likelihood(batch: Padded, aggregation: str) -> Tensor:
    if aggregation == "token_mean":
        return -(batch.logprobs * batch.mask).sum() / batch.mask.sum()
    return -averaged(batch.logprobs, batch.mask).mean()


def bradley_terry(batch: Padded, centering: float = 0.0) -> Tensor:
    assert batch.values is not None
    chosen, rejected = batch.rows()
    w, r = batch.values[chosen], batch.values[rejected]
    return (-torch.log(sigmoid(w - r - margins(batch))) + centering * (w + r) ** 2).mean()


def regression(batch: Padded) -> Tensor:
    assert batch.values is not None and batch.target is not None
    return ((batch.values - torch.tensor(batch.target, dtype=torch.float64)) ** 2).mean()
