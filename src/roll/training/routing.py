"""The routers of a mixture of experts: how evenly they choose, and choices that are replayed.

    router ─ logits ─ the k best of them ─► experts, and weights by which their results are added up
                       └─ or those of another forward pass, whose weights are computed anew

Experts are chosen by comparing numbers that differ in their last digits between passes, kernels and precisions; another
choice is another function. Replay lets the forward pass of an update use the experts of the pass that its ratio is
taken against (R2 of arXiv 2512.01374), or those that the engine chose while it generated (R3, arXiv 2510.11370).
Weights, and so gradients, are those of the current router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roll.errors import ModelError
from roll.models import chosen_experts, decoder_of, find_routers
from roll.training.blocks import Block
from roll.training.layout import Int64Array, placed
from roll.training.parallel.tokens import WHOLE, TokenShare
from roll.types import TrainingBatch

__all__ = ["Routing", "find_routing", "load_metrics"]


class Routing:
    """All routers of one model, first layer first.

    Args:
        model: an HF causal language model.
        routers: of it; see `roll.models.chosen_experts`.
    """

    def __init__(self, model: Any, routers: Sequence[Any]) -> None:
        self.num_experts = int(routers[0].num_experts)
        self.num_chosen = int(routers[0].top_k)
        self.num_layers = len(routers)
        self._plain = [(router, router.forward) for router in routers]
        self._current: Any = None
        self.clear()
        for layer in decoder_of(model).layers:
            layer.register_forward_pre_hook(self._remember, with_kwargs=True)
        for i, router in enumerate(routers):
            router.forward = self._observed(i, router, router.forward)

    @torch.no_grad()
    def check_replay(self) -> None:
        """Make sure that every router can be given its experts.

        Raises:
            ModelError: one does not choose the best few of its scores.
        """
        for router, plain in self._plain:
            best = torch.arange(self.num_chosen, device=router.weight.device)[None]
            self._given(best, plain, router.weight.new_zeros(1, router.weight.shape[1]))

    def clear(self) -> None:
        """Forget how often experts were chosen."""
        self._chosen: list[Tensor | None] = [None] * self.num_layers
        self._counts: list[Tensor | None] = [None] * self.num_layers
        self._shares: list[Tensor | None] = [None] * self.num_layers

    def load(self, share: TokenShare = WHOLE) -> tuple[Int64Array, np.ndarray]:
        """[layers, E] how many tokens chose each expert since `clear`, and sums of their probabilities.

        Args:
            share: which tokens are this rank's; all that `share`s rows add up what they counted.
        """
        empty = torch.zeros(self.num_experts, dtype=torch.float64)
        counts, shares = (
            share.added_up(torch.stack([empty if x is None else x.cpu().double() for x in part])).numpy()
            for part in (self._counts, self._shares)
        )
        return counts.astype(np.int64), shares

    def by_sample(
        self, found: dict[int, Any], blocks: Iterable[Block], batch: TrainingBatch, share: TokenShare = WHOLE
    ) -> None:
        """Of the forward pass before, what the tokens of a micro-batch chose: [L, layers, k] int16, -1 where they did
        not go through the network, or through that layer here."""
        here = [i for i, x in enumerate(self._chosen) if x is not None]
        own_tokens = torch.stack([x for x in self._chosen if x is not None], dim=1) if here else None
        chosen = None if own_tokens is None else share.all_tokens(own_tokens).cpu().numpy()
        start = 0
        for block in blocks:
            for member, _, entries in placed(block, start):
                size = len(batch.samples[member.index]), self.num_layers, self.num_chosen
                own = np.full(size, -1, dtype=np.int16)
                if chosen is not None:
                    own[: len(entries), here] = chosen[entries]
                found[member.index] = own
            start += block.num_tokens

    def _remember(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._current = kwargs.get("roll_plan")

    def _observed(self, i: int, router: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            experts = getattr(self._current, "experts", None)
            output = plain(*args, **kwargs) if experts is None else self._given(experts[:, i], plain, *args, **kwargs)
            self._take(i, *chosen_experts(router, output))
            return output

        return forward

    def _given(self, chosen: Tensor, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a router answers when these experts [N, k] are the best."""
        with _Replay(chosen, self.num_experts) as replay:
            output = plain(*args, **kwargs)
        if not replay.used:
            raise ModelError(
                "this model's router does not choose the best few of its scores: its choices cannot be replayed, so "
                "set training.router_replay to none"
            )
        return output

    @torch.no_grad()
    def _take(self, i: int, logits: Tensor, chosen: Tensor) -> None:
        self._chosen[i] = chosen
        real = getattr(self._current, "real", None)
        if real is not None:
            logits, chosen = logits[real], chosen[real]
        counts = torch.bincount(chosen.reshape(-1), minlength=self.num_experts)
        shares = logits.float().softmax(-1).sum(0)
        before, sums = self._counts[i], self._shares[i]
        self._counts[i] = counts if before is None else before + counts
        self._shares[i] = shares if sums is None else sums + shares


class _Replay(TorchFunctionMode):
    """Answers a router's choice of its k best experts with given ones [N, k]; -1 leaves a token its own."""

    def __init__(self, chosen: Tensor, num_experts: int) -> None:
        super().__init__()
        self._chosen = chosen
        self._num_experts = num_experts
        self._unmasked: Tensor | None = None
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func in (torch.masked_fill, torch.Tensor.masked_fill):  # groups that are out now were not, perhaps
            self._unmasked = args[0]
        if func not in (torch.topk, torch.Tensor.topk) or found[1].shape != self._chosen.shape:
            return found
        scores = args[0]
        if scores.shape[-1] != self._num_experts:
            return found
        self.used = True
        known = self._chosen >= 0
        chosen = torch.where(known, self._chosen, found[1])
        if self._unmasked is not None and self._unmasked.shape == scores.shape:
            scores = self._unmasked
        return torch.return_types.topk((torch.where(known, scores.gather(-1, chosen), found[0]), chosen))


def find_routing(model: Any) -> Routing | None:
    """The routers of a model, or `None` where nothing chooses between experts, or says what it chose."""
    routers = find_routers(model)
    return Routing(model, routers) if routers else None


def load_metrics(loads: Sequence[tuple[Int64Array, np.ndarray]]) -> dict[str, float]:
    """How evenly experts were chosen over all ranks' tokens, means over layers.

    `experts/load_ratio` is the busiest expert's load by the mean load, 1 where all are equal;
    `experts/load_ratio_worst` that of the worst layer. `experts/largest_share` of the choices went to one expert.
    `experts/entropy` of the loads is 1 where all are equal, 0 where one is always chosen; `experts/idle` is the share
    of experts that no token chose. `experts/balance_loss` is E sum_e f_e p_e of the Switch Transformer (arXiv
    2101.03961 eq. 4), by the softmax of the router's logits.
    """
    counts = np.sum([load[0] for load in loads], axis=0).astype(np.float64)
    shares = np.sum([load[1] for load in loads], axis=0)
    if not counts.sum():
        return {}
    num_experts = counts.shape[1]
    f = counts / counts.sum(1, keepdims=True)
    p = shares / shares.sum(1, keepdims=True)
    ratios = f.max(1) * num_experts
    entropy = -(f * np.log(np.where(f > 0, f, 1.0))).sum(1) / np.log(num_experts) if num_experts > 1 else np.ones(1)
    return {
        "experts/load_ratio": float(ratios.mean()),
        "experts/load_ratio_worst": float(ratios.max()),
        "experts/largest_share": float(f.max(1).mean()),
        "experts/entropy": float(entropy.mean()),
        "experts/idle": float((counts == 0).mean()),
        "experts/balance_loss": float((num_experts * (f * p).sum(1)).mean()),
    }
