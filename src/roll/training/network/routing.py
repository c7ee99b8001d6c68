"""MoE routers: load balancing, and router replay of recorded choices of experts.

    router ─ logits ─ the k best of them ─► experts, and weights by which their results are summed
                       └─ or those of another forward pass, with newly computed weights

Experts are chosen by comparing numbers that differ in their last digits between passes, kernels and precisions, and
another choice is a different function. Replay makes the forward pass of an update use the experts of the pass that its
ratio is taken against (R2 of arXiv 2512.01374), or those that the engine chose during generation (R3, arXiv
2510.11370). Weights, and so gradients, are those of the current router.

Choices are counted as if prefixes were not shared: a token counts once for each sample that has it. So the counts do
not depend on packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roll.errors import ModelError, short
from roll.models import chosen_experts, decoder_of, find_routers
from roll.training.memory.activation_checkpointing import is_recomputing
from roll.training.packing.blocks import Block
from roll.training.packing.layout import Int64Array, iter_entries
from roll.training.parallel.tokens import WHOLE, TokenShare
from roll.types import TrainingBatch, TrainingSample

__all__ = ["Routing", "find_routing", "load_metrics"]

_BIAS = "e_score_correction_bias"
"""The name of a router's buffer that is added to the scores by which experts are chosen."""


class Routing:
    """All routers of one model, first layer first.

    Args:
        model: An HF causal language model.
        routers: The routers of the model; see `roll.models.chosen_experts`.
    """

    def __init__(self, model: Any, routers: Sequence[Any]) -> None:
        self.num_experts = int(routers[0].num_experts)
        self.num_chosen = int(routers[0].top_k)
        self.num_layers = len(routers)
        self.aux_coefficient = 0.0
        """The coefficient of the auxiliary load-balancing loss."""
        self._biased = list(routers) if all(_BIAS in router._buffers for router in routers) else []
        self._slopes: Tensor | None = None
        self._totals: np.ndarray | None = None
        self._plain = [(router, router.forward) for router in routers]
        self._current: Any = None
        self._counts_choices = True
        self.clear()
        for layer in decoder_of(model).layers:
            layer.register_forward_pre_hook(self._remember, with_kwargs=True)
        for i, router in enumerate(routers):
            router.forward = self._router_forward(i, router, router.forward)

    @property
    def biases(self) -> list[Tensor]:
        """The biases [E] that each layer adds to scores before the top-k, if all routers have them.

        They are looked up at every access, because a module that moves to another device gets new buffers.
        """
        return [router._buffers[_BIAS] for router in self._biased]

    @torch.no_grad()
    def check_replay(self) -> None:
        """Check that every router's choice of experts can be replaced.

        Raises:
            ModelError: a router does not choose the top-k of its scores.
        """
        for router, plain in self._plain:
            best = torch.arange(self.num_chosen, device=router.weight.device)[None]
            self._replay_choices(best, plain, router.weight.new_zeros(1, router.weight.shape[1]))

    def check_choices(self, samples: Iterable[TrainingSample]) -> None:
        """Check that the experts recorded in samples are valid choices for this model.

        Raises:
            ModelError: a sample's experts do not fit; the message names the sample.
        """
        for sample in samples:
            if sample.experts is None:
                continue
            wanted, has = (len(sample), self.num_layers, self.num_chosen), sample.experts.shape
            if has != wanted:
                said = f"[tokens, layers, experts] of {list(has)}, not {list(wanted)}"
            else:
                ordered = np.sort(sample.experts, axis=-1)
                unknown = (ordered < 0).all(-1)
                wrong = (ordered[..., 0] < 0) | (ordered[..., -1] >= self.num_experts)
                wrong |= (ordered[..., 1:] == ordered[..., :-1]).any(-1)
                places = np.argwhere(wrong & ~unknown)
                if not len(places):
                    continue
                token, layer = places[0].tolist()
                chosen = sample.experts[token, layer].tolist()
                of_all = f"{self.num_chosen} different ones of {self.num_experts}"
                said = f"{chosen} for token {token} in layer {layer}, not {of_all}"
            raise ModelError(
                f"the experts recorded in sample {short(sample.sample_id)} cannot be replayed: {said}. The engine "
                "that recorded them has another model, or records otherwise: set training.router_replay to old or none"
            )

    def clear(self) -> None:
        """Reset the counts of expert choices."""
        self._chosen: list[Tensor | None] = [None] * self.num_layers
        self._counts: list[Tensor | None] = [None] * self.num_layers
        self._shares: list[Tensor | None] = [None] * self.num_layers

    @contextmanager
    def without_counting(self) -> Iterator[None]:
        """Run the body without counting choices: its passes are of another policy, such as the reference."""
        self._counts_choices = False
        try:
            yield
        finally:
            self._counts_choices = True

    def metrics(self, loads: Sequence[tuple[Int64Array, np.ndarray]]) -> dict[str, float]:
        """Return metrics of load balance over all ranks' `load`; see `load_metrics`.

        `experts/aux_loss` is the auxiliary loss that was added; `experts/bias_range` the difference between a layer's
        largest and smallest bias, averaged over layers.
        """
        found = load_metrics(loads)
        self._totals = np.sum([load[0] for load in loads], axis=0)
        if found and self.aux_coefficient:
            found["experts/aux_loss"] = self.aux_coefficient * self.num_chosen * found["experts/balance_loss"]
        if found and self.biases:
            ranges = [float(bias.max() - bias.min()) for bias in self.biases]
            found["experts/bias_range"] = float(np.mean(ranges))
        return found

    def set_load_balancing_loss(self, loads: Sequence[tuple[Int64Array, np.ndarray]]) -> None:
        """Make later backward passes add the gradient of a batch's auxiliary loss.

        The loss is coefficient E sum_e f_e p_e, averaged over layers: f_e is the number of choices of expert e per
        token of the batch, p_e the mean of its probabilities (arXiv 2101.03961 eq. 4 to 6; f_e counts k choices, as in
        `transformers`). Only p_e has a gradient. It is a sum over tokens, so every token can add its part when it
        passes.

        Args:
            loads: The `load` of the batch on all ranks.
        """
        counts = np.sum([load[0] for load in loads], axis=0).astype(np.float64)
        num_tokens = np.maximum(counts.sum(1, keepdims=True) / self.num_chosen, 1)
        factor = self.aux_coefficient * self.num_experts / self.num_layers
        self._slopes = torch.from_numpy(factor * counts / num_tokens**2)

    @torch.no_grad()
    def update_biases(self, rate: float) -> None:
        """Move every expert's bias by `rate` towards balance after an update (arXiv 2408.15664).

        The direction comes from the choices in the batch of the previous `metrics` call.
        """
        assert self._totals is not None
        for bias, counts in zip(self.biases, self._totals, strict=True):
            bias += rate * torch.from_numpy(np.sign(counts.mean() - counts)).to(bias)

    def load(self, share: TokenShare = WHOLE) -> tuple[Int64Array, np.ndarray]:
        """Return the number of tokens per expert since `clear` [layers, E], and the sums of their probabilities.

        Args:
            share: This rank's share of the tokens; the counts are summed over all ranks of one row.
        """
        empty = torch.zeros(self.num_experts, dtype=torch.float64)
        counts, shares = (
            share.all_reduce_(torch.stack([empty if x is None else x.cpu().double() for x in part])).numpy()
            for part in (self._counts, self._shares)
        )
        return counts.astype(np.int64), shares

    def collect_choices(
        self, found: dict[int, Any], blocks: Iterable[Block], batch: TrainingBatch, share: TokenShare = WHOLE
    ) -> None:
        """Add the experts that a micro-batch's tokens chose in the last forward pass to `found`: [L, layers, k] int16.

        Entries are -1 for tokens that did not go through the network, and for layers of other ranks.
        """
        here = [i for i, x in enumerate(self._chosen) if x is not None]
        local_tokens = torch.stack([x for x in self._chosen if x is not None], dim=1) if here else None
        chosen = None if local_tokens is None else share.gather_tokens(local_tokens).cpu().numpy()
        start = 0
        for block in blocks:
            for member, _, entries in iter_entries(block, start):
                size = len(batch.samples[member.index]), self.num_layers, self.num_chosen
                own = found.setdefault(member.index, np.full(size, -1, dtype=np.int16))
                if chosen is not None:
                    own[: len(entries), here] = chosen[entries]
            start += block.num_tokens

    def _remember(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        plan = kwargs.get("roll_plan")
        if plan is not self._current:  # another pass, perhaps through other layers
            self._chosen = [None] * self.num_layers
        self._current = plan

    def _router_forward(self, i: int, router: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            experts = getattr(self._current, "experts", None)
            output = (
                plain(*args, **kwargs)
                if experts is None
                else self._replay_choices(experts[:, i], plain, *args, **kwargs)
            )
            self._count_choice(i, *chosen_experts(router, output))
            return self._add_load_balancing_loss(i, router, output)

        return forward

    def _replay_choices(self, chosen: Tensor, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return a router's output when the experts [N, k] are the top-k."""
        with _ReplayMode(chosen, self.num_experts) as replay:
            output = plain(*args, **kwargs)
        if not replay.used:
            raise ModelError(
                "this model's router does not select experts by the top-k of its scores, so router replay is not "
                "supported: set training.router_replay to none"
            )
        return output

    def _add_load_balancing_loss(self, i: int, router: Any, output: Any) -> Any:
        """Return a router's output with weights whose backward pass also adds this rank's share of the auxiliary
        gradient.
        """
        if self._slopes is None or not torch.is_grad_enabled():
            return output
        logits, _ = chosen_experts(router, output)
        probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        share = (self._current.uses.to(probabilities)[:, None] * probabilities).sum(0)
        place = len(output) - 2  # the weights that the experts' results are multiplied with
        own = _WithAuxiliaryLoss.apply(output[place], share @ self._slopes[i].to(share))
        return (*output[:place], own, *output[place + 1 :])

    @torch.no_grad()
    def _count_choice(self, i: int, logits: Tensor, chosen: Tensor) -> None:
        if is_recomputing() or not self._counts_choices:  # already counted in the first run, or not to be counted
            return
        self._chosen[i] = chosen
        uses = getattr(self._current, "uses", None)
        if uses is None:
            uses = torch.ones(len(logits), device=logits.device)
        each = uses.double().repeat_interleave(self.num_chosen)
        counts = torch.bincount(chosen.reshape(-1), each, minlength=self.num_experts)
        shares = (logits.float().softmax(-1) * uses[:, None]).sum(0)
        before, sums = self._counts[i], self._shares[i]
        self._counts[i] = counts if before is None else before + counts
        self._shares[i] = shares if sums is None else sums + shares


class _WithAuxiliaryLoss(torch.autograd.Function):
    """Returns a tensor unchanged; its backward pass also backpropagates through a scalar that is part of the loss."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.like


class _ReplayMode(TorchFunctionMode):
    """Replaces the result of a router's top-k by given experts [N, k]; -1 keeps a token's own choice."""

    def __init__(self, chosen: Tensor, num_experts: int) -> None:
        super().__init__()
        self._chosen = chosen
        self._num_experts = num_experts
        self._unmasked: Tensor | None = None
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func in (torch.masked_fill, torch.Tensor.masked_fill):  # groups masked now may not have been then
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
    """Return the routers of a model, or `None` if it has none that report their choices."""
    routers = find_routers(model)
    return Routing(model, routers) if routers else None


def load_metrics(loads: Sequence[tuple[Int64Array, np.ndarray]]) -> dict[str, float]:
    """Compute metrics of load balance over all ranks' tokens, averaged over layers.

    `experts/load_ratio` is the largest load divided by the mean load, 1 where all loads are equal;
    `experts/load_ratio_worst` is that of the worst layer. `experts/largest_share` is the share of choices of the most
    loaded expert. `experts/entropy` of the loads is 1 where all are equal, 0 where one expert is always chosen;
    `experts/idle` is the share of experts that no token chose. `experts/balance_loss` is E sum_e f_e p_e of the Switch
    Transformer (arXiv 2101.03961 eq. 4), with the softmax of the router's logits.
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
