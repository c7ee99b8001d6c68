"""Methods by name, beside their papers' formulas; random sequences for both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import reference_pairs as paper
import torch
from reference_pairs import Padded, averaged, of_ratios, summed
from torch import Tensor

from roll.algorithms.losses import LikelihoodLoss
from roll.algorithms.losses.preference import KTOLoss, PreferenceLoss, pairwise
from roll.protocols import LossFn
from roll.types import LossInputs

PAIRS: dict[str, tuple[PreferenceLoss, Callable[[Padded], Tensor]]] = {
    "dpo": (PreferenceLoss(), of_ratios(summed, paper.dpo)),
    "dpo, large beta": (PreferenceLoss(beta=1.7), of_ratios(summed, lambda w, r, m: paper.dpo(w, r, m, 1.7))),
    "normalised dpo": (PreferenceLoss(scores="mean"), of_ratios(averaged, paper.dpo)),
    "cdpo": (PreferenceLoss(pairwise_loss=pairwise.SigmoidLoss(label_smoothing=0.1)), of_ratios(summed, paper.cdpo)),
    "robust": (
        PreferenceLoss(pairwise_loss=pairwise.SigmoidLoss(label_smoothing=0.1, robust=True)),
        of_ratios(summed, paper.robust),
    ),
    "ipo": (PreferenceLoss(pairwise_loss=pairwise.SquaredLoss(), scores="mean"), of_ratios(averaged, paper.ipo)),
    "ipo of sums": (
        PreferenceLoss(pairwise_loss=pairwise.SquaredLoss(), beta=0.3),
        of_ratios(summed, lambda w, r, m: paper.ipo(w, r, m, 0.3)),
    ),
    "hinge": (PreferenceLoss(pairwise_loss=pairwise.HingeLoss()), of_ratios(summed, paper.hinge)),
    "hinge, large beta": (
        PreferenceLoss(pairwise_loss=pairwise.HingeLoss(), beta=3.0),
        of_ratios(summed, lambda w, r, m: paper.hinge(w, r, m, 3.0)),
    ),
    "exo": (PreferenceLoss(pairwise_loss=pairwise.ExoPairLoss()), of_ratios(summed, paper.exo)),
    "discopop": (PreferenceLoss(pairwise_loss=pairwise.DiscopopLoss()), of_ratios(summed, paper.discopop)),
    "simpo": (
        PreferenceLoss(beta=2.0, scores="mean", against_reference=False, margin=0.5),
        paper.simpo,
    ),
    "cpo": (PreferenceLoss(against_reference=False, likelihood=1.0), paper.cpo),
    "rpo": (PreferenceLoss(likelihood=0.7, likelihood_mean="answers"), lambda batch: paper.rpo(batch, 0.1, 0.7)),
    "nca": (PreferenceLoss(pairwise_loss=pairwise.NcaPairLoss()), of_ratios(summed, paper.nca)),
    "sppo": (PreferenceLoss(pairwise_loss=pairwise.SppoHardLoss()), of_ratios(summed, paper.sppo)),
    "apo_zero": (PreferenceLoss(pairwise_loss=pairwise.ApoZeroLoss()), of_ratios(summed, paper.apo_zero)),
    "apo_down": (PreferenceLoss(pairwise_loss=pairwise.ApoDownLoss()), of_ratios(summed, paper.apo_down)),
    "orpo": (
        PreferenceLoss(pairwise_loss=pairwise.OddsRatioLoss(), scores="mean", against_reference=False, likelihood=1.0),
        paper.orpo,
    ),
}
SINGLE: dict[str, tuple[LossFn, Callable[[Padded], Tensor]]] = {
    "likelihood of tokens": (LikelihoodLoss(), lambda b: paper.likelihood(b, "token_mean")),
    "likelihood of texts": (
        LikelihoodLoss(aggregation="sequence_mean"),
        lambda b: paper.likelihood(b, "sequence_mean"),
    ),
    "kto": (KTOLoss(reference_point=0.4), lambda b: paper.kto(b, 0.4)),
    "kto, weighted": (
        KTOLoss(reference_point=0.0, beta=0.8, desirable_weight=1.3, undesirable_weight=0.6),
        lambda b: paper.kto(b, 0.0, 0.8, 1.3, 0.6),
    ),
}
REFERENCE_FREE = ("simpo", "cpo", "orpo")


def random_pairs(seed: int, num_pairs: int = 5, *, targets: bool = False, noise: float = 0.7) -> Padded:
    """Answers of 1 to 7 tokens, pairs apart from each other, either answer first."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(2 * num_pairs)
    lengths = rng.integers(1, 8, 2 * num_pairs)
    logprobs = -np.abs(rng.normal(size=(2 * num_pairs, 7))) - 0.05
    return Padded(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        ref=torch.tensor(logprobs + noise * rng.normal(size=logprobs.shape)),
        mask=torch.tensor(np.arange(7) < lengths[:, None]).double(),
        preferred=[bool(i % 2) for i in order],
        pair=[int(i // 2) for i in order],
        target=np.abs(rng.normal(size=2 * num_pairs)).tolist() if targets else None,
        values=torch.tensor(rng.normal(size=2 * num_pairs), requires_grad=True),
    )


def inputs_of(batch: Padded, rows: Sequence[int] | None = None) -> LossInputs:
    """What a loss sees of some rows of the batch, in this order; the counts are the whole batch's."""
    rows = range(len(batch.pair)) if rows is None else rows
    kept = [batch.mask[row].bool() for row in rows]
    lengths = torch.tensor([int(own.sum()) for own in kept])
    chosen, _ = batch.rows() if len(set(batch.pair)) * 2 == len(batch.pair) else ([], [])
    return LossInputs(
        sequence_ids=torch.arange(len(lengths)).repeat_interleave(lengths),
        sequence_lengths=lengths.double(),
        num_tokens=float(batch.mask.sum()),
        num_sequences=float(len(batch.pair)),
        num_units=float(len(set(batch.pair))),
        num_preferred=float(sum(batch.preferred)),
        num_preferred_tokens=float(batch.mask[chosen].sum()),
        max_lengths=torch.full((len(lengths),), 7.0).double(),
        unit_ids=torch.from_numpy(np.unique([batch.pair[row] for row in rows], return_inverse=True)[1]),
        logprobs=torch.cat([batch.logprobs[row][own] for row, own in zip(rows, kept, strict=True)]),
        ref_logprobs=torch.cat([batch.ref[row][own] for row, own in zip(rows, kept, strict=True)]),
        preferred=torch.tensor([batch.preferred[row] for row in rows]),
        targets=None
        if batch.target is None
        else torch.tensor([batch.target[row] for row in rows], dtype=torch.float64),
        values=None if batch.values is None else batch.values[list(rows)],
    )


def without_reference(inputs: LossInputs) -> LossInputs:
    return replace(inputs, ref_logprobs=None)
