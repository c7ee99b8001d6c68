"""MoE routers: load balancing, and router replay of recorded expert choices.

    router ─ logits ─ top-k ─► experts, and weights by which their results are summed
                       └─ or recorded experts, with newly computed weights

Router scores differ in the last digits between passes, kernels and precisions, so two passes may choose different
experts and thus compute different functions. With replay, the forward pass of an update uses the experts of the pass
that computed the denominator of its ratio (R2 of arXiv 2512.01374), or those that the engine chose during generation
(R3, arXiv 2510.11370). The experts' weights, and thus the gradients, come from the current router.

Choices are counted as if prefixes were not shared: a token is counted once for each sample that contains it. Therefore
the counts do not depend on packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roll.errors import ModelError, shorten
from roll.models import find_routers, get_decoder, read_router_output
from roll.training.memory.activation_checkpointing import is_recomputing
from roll.training.packing.blocks import Block
from roll.training.packing.layout import Int64Array, iter_entries
from roll.training.parallel.tokens import WHOLE_ROW, TokenShard
from roll.types import TrainingBatch, TrainingSample

__all__ = ["Routing", "compute_load_metrics", "find_routing"]

_BIAS_NAME = "e_score_correction_bias"
"""The name of a router's buffer that is added to the scores by which experts are chosen."""


class Routing:
    """Records, replays and balances the expert choices of all routers of a model.

    Args:
        model: An HF causal language model.
        routers: The routers of the model, in the order of layers; see `roll.models.read_router_output`.
    """

    def __init__(self, model: Any, routers: Sequence[Any]) -> None:
        self.num_experts = int(routers[0].num_experts)
        self.num_chosen = int(routers[0].top_k)
        self.num_layers = len(routers)
        self.aux_coefficient = 0.0
        """The coefficient of the auxiliary load-balancing loss."""
        self._biased = list(routers) if all(_BIAS_NAME in router._buffers for router in routers) else []
        self._slopes: Tensor | None = None
        self._totals: np.ndarray | None = None
        self._original_forwards = [(router, router.forward) for router in routers]
        self._current: Any = None
        self._counts_choices = True
        self.clear()
        for layer in get_decoder(model).layers:
            # Routers do not receive the keyword arguments of a layer, so the plan is stored when the layer begins.
            layer.register_forward_pre_hook(self._store_attention_plan, with_kwargs=True)
        for i, router in enumerate(routers):
            router.forward = self._build_router_forward(i, router, router.forward)

    @property
    def biases(self) -> list[Tensor]:
        """The bias [E] that each router adds to its scores before the top-k; empty unless all routers have one.

        Biases are looked up at every access, because a module that moves to another device gets new buffers.
        """
        return [router._buffers[_BIAS_NAME] for router in self._biased]

    @torch.no_grad()
    def check_replay(self) -> None:
        """Check that every router's choice of experts can be replaced.

        Raises:
            ModelError: A router does not choose the top-k of its scores.
        """
        for router, original_forward in self._original_forwards:
            best = torch.arange(self.num_chosen, device=router.weight.device)[None]
            self._replay_choices(best, original_forward, router.weight.new_zeros(1, router.weight.shape[1]))

    def check_choices(self, samples: Iterable[TrainingSample]) -> None:
        """Check that the experts recorded in samples are valid choices for this model.

        Raises:
            ModelError: A sample's experts have an invalid shape or invalid values; the message names the sample.
        """
        for sample in samples:
            if sample.experts is None:
                continue
            wanted, has = (len(sample), self.num_layers, self.num_chosen), sample.experts.shape
            if has != wanted:
                reason = f"their shape [tokens, layers, experts] must be {list(wanted)}, got {list(has)}"
            else:
                ordered = np.sort(sample.experts, axis=-1)
                # -1 for all experts of a token means that the router chooses.
                unknown = (ordered < 0).all(-1)
                wrong = (ordered[..., 0] < 0) | (ordered[..., -1] >= self.num_experts)
                wrong |= (ordered[..., 1:] == ordered[..., :-1]).any(-1)
                places = np.argwhere(wrong & ~unknown)
                if not len(places):
                    continue
                token, layer = places[0].tolist()
                chosen = sample.experts[token, layer].tolist()
                expected = f"{self.num_chosen} different experts out of {self.num_experts}"
                reason = f"token {token} has {chosen} in layer {layer}, expected {expected}"
            raise ModelError(
                f"the experts recorded in sample {shorten(sample.sample_id)} cannot be replayed: {reason}. The engine "
                "serves another model, or records experts in another format: set training.router_replay to old or none"
            )

    def clear(self) -> None:
        """Discard the recorded expert choices, their counts, and the sums of probabilities."""
        self._chosen: list[Tensor | None] = [None] * self.num_layers
        self._counts: list[Tensor | None] = [None] * self.num_layers
        self._shares: list[Tensor | None] = [None] * self.num_layers

    @contextmanager
    def pause_recording(self) -> Iterator[None]:
        """Disable recording of expert choices in a `with` block, for example while the reference model runs."""
        self._counts_choices = False
        try:
            yield
        finally:
            self._counts_choices = True

    def compute_metrics(self, loads: Sequence[tuple[Int64Array, np.ndarray]]) -> dict[str, float]:
        """Compute load-balance metrics from the loads of all ranks, and store the summed loads for `update_biases`.

        The result has the metrics of `compute_load_metrics` and two more: `experts/aux_loss` is the auxiliary loss that
        was added, and `experts/bias_range` is the difference between a layer's largest and smallest bias, averaged over
        layers.
        """
        metrics = compute_load_metrics(loads)
        self._totals = np.sum([load[0] for load in loads], axis=0)
        if metrics and self.aux_coefficient:
            metrics["experts/aux_loss"] = self.aux_coefficient * self.num_chosen * metrics["experts/balance_loss"]
        if metrics and self.biases:
            ranges = [float(bias.max() - bias.min()) for bias in self.biases]
            metrics["experts/bias_range"] = float(np.mean(ranges))
        return metrics

    def set_load_balancing_loss(self, loads: Sequence[tuple[Int64Array, np.ndarray]]) -> None:
        """Make later backward passes add the gradient of a batch's auxiliary loss.

        The loss is coefficient E sum_e f_e p_e, averaged over layers: f_e is the number of choices of expert e per
        token of the batch, p_e the mean of its probabilities (arXiv 2101.03961 eq. 4 to 6; f_e counts k choices, as in
        `transformers`). Only p_e has a gradient. The loss is a sum over tokens, so each micro-batch adds the part
        of its own tokens.

        Args:
            loads: The results of `gather_load` for the batch, from all ranks.
        """
        counts = np.sum([load[0] for load in loads], axis=0).astype(np.float64)
        num_tokens = np.maximum(counts.sum(1, keepdims=True) / self.num_chosen, 1)
        # With T tokens, f_e = counts_e / T and p_e = sum_t p_te / T: d loss / d p_te = factor counts_e / T^2.
        factor = self.aux_coefficient * self.num_experts / self.num_layers
        self._slopes = torch.from_numpy(factor * counts / num_tokens**2)

    @torch.no_grad()
    def update_biases(self, rate: float) -> None:
        """Raise the bias of each expert whose load is below the mean by `rate`; lower the bias of the experts above the
        mean.

        The loads are those of the last call to `compute_metrics` (arXiv 2408.15664).
        """
        assert self._totals is not None
        for bias, counts in zip(self.biases, self._totals, strict=True):
            bias += rate * torch.from_numpy(np.sign(counts.mean() - counts)).to(bias)

    def gather_load(self, token_shard: TokenShard = WHOLE_ROW) -> tuple[Int64Array, np.ndarray]:
        """Return the number of tokens per expert [layers, E] since `clear`, and the sums of the experts' router
        probabilities.

        Args:
            token_shard: This rank's share of the tokens; the results are summed over all ranks that compute one row.
        """
        empty = torch.zeros(self.num_experts, dtype=torch.float64)
        counts, shares = (
            token_shard.all_reduce_(torch.stack([empty if x is None else x.cpu().double() for x in part])).numpy()
            for part in (self._counts, self._shares)
        )
        return counts.astype(np.int64), shares

    def collect_choices(
        self,
        collected: dict[int, Any],
        blocks: Iterable[Block],
        batch: TrainingBatch,
        token_shard: TokenShard = WHOLE_ROW,
    ) -> None:
        """Add the experts chosen in a micro-batch's last forward pass to `collected`: one int16 array [L, layers, k]
        per sample index.

        Entries are -1 for tokens that did not go through the network, and for layers of other ranks.
        """
        here = [i for i, x in enumerate(self._chosen) if x is not None]
        local_tokens = torch.stack([x for x in self._chosen if x is not None], dim=1) if here else None
        chosen = None if local_tokens is None else token_shard.gather_tokens(local_tokens).cpu().numpy()
        start = 0
        for block in blocks:
            for member, _, entries in iter_entries(block, start):
                size = len(batch.samples[member.index]), self.num_layers, self.num_chosen
                own = collected.setdefault(member.index, np.full(size, -1, dtype=np.int16))
                if chosen is not None:
                    own[: len(entries), here] = chosen[entries]
            start += block.num_tokens

    def _store_attention_plan(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        plan = kwargs.get("roll_plan")
        if plan is not self._current:  # another pass, perhaps through other layers
            self._chosen = [None] * self.num_layers
        self._current = plan

    def _build_router_forward(
        self, layer: int, router: Any, original_forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            experts = getattr(self._current, "experts", None)
            output = (
                original_forward(*args, **kwargs)
                if experts is None
                else self._replay_choices(experts[:, layer], original_forward, *args, **kwargs)
            )
            self._record_routing(layer, *read_router_output(router, output))
            return self._add_load_balancing_loss(layer, router, output)

        return forward

    def _replay_choices(self, chosen: Tensor, original_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a router with its top-k replaced by the experts `chosen` [N, k], and return its output."""
        # The router's own code runs, so each family's normalization of weights applies to the replayed experts.
        with _ReplayMode(chosen, self.num_experts) as replay:
            output = original_forward(*args, **kwargs)
        if not replay.used:
            raise ModelError(
                "this model's router does not select experts by the top-k of its scores, so router replay is not "
                "supported: set training.router_replay to none"
            )
        return output

    def _add_load_balancing_loss(self, layer: int, router: Any, output: Any) -> Any:
        """Return a router's output unchanged in value, but with a backward pass that adds the gradient of this rank's
        share of the auxiliary loss.
        """
        if self._slopes is None or not torch.is_grad_enabled():
            return output
        logits, _ = read_router_output(router, output)
        probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        share = (self._current.uses.to(probabilities)[:, None] * probabilities).sum(0)
        place = len(output) - 2  # the weights that the experts' results are multiplied with
        # The gradient enters through the graph of this layer, so no loss function needs to add it.
        own = _AuxiliaryLoss.apply(output[place], share @ self._slopes[layer].to(share))
        return (*output[:place], own, *output[place + 1 :])

    @torch.no_grad()
    def _record_routing(self, layer: int, logits: Tensor, chosen: Tensor) -> None:
        """Store the experts chosen in this layer, and add to the layer's counts and sums of probabilities."""
        if is_recomputing() or not self._counts_choices:  # already counted in the first run, or not to be counted
            return
        self._chosen[layer] = chosen
        uses = getattr(self._current, "uses", None)
        if uses is None:
            uses = torch.ones(len(logits), device=logits.device)
        each = uses.double().repeat_interleave(self.num_chosen)
        counts = torch.bincount(chosen.reshape(-1), each, minlength=self.num_experts)
        shares = (logits.float().softmax(-1) * uses[:, None]).sum(0)
        before, sums = self._counts[layer], self._shares[layer]
        self._counts[layer] = counts if before is None else before + counts
        self._shares[layer] = shares if sums is None else sums + shares


class _AuxiliaryLoss(torch.autograd.Function):
    """Returns a tensor unchanged; its backward pass also backpropagates through a scalar that is part of the loss."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.like


class _ReplayMode(TorchFunctionMode):
    """Replaces a router's top-k result by recorded experts [N, k]; entries of -1 keep the router's choice."""

    def __init__(self, chosen: Tensor, num_experts: int) -> None:
        super().__init__()
        self._chosen = chosen
        self._num_experts = num_experts
        self._unmasked: Tensor | None = None
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func in (torch.masked_fill, torch.Tensor.masked_fill):  # the recorded pass may have masked other groups
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
    """Return the `Routing` of a model, or `None` if the model has no routers that report their choices."""
    routers = find_routers(model)
    return Routing(model, routers) if routers else None


def compute_load_metrics(loads: Sequence[tuple[Int64Array, np.ndarray]]) -> dict[str, float]:
    """Compute metrics of load balance from the `Routing.gather_load` results of all ranks, averaged over layers.

    The result is empty if no tokens were routed.

    `experts/load_ratio` is the largest load divided by the mean load (1 if all loads are equal);
    `experts/load_ratio_worst` is the same ratio in the worst layer. `experts/largest_share` is the fraction of choices
    of the most loaded expert. `experts/entropy` is the normalized entropy of the loads: 1 if all loads are equal, 0 if
    one expert is always chosen. `experts/idle` is the fraction of experts that no token chose. `experts/balance_loss`
    is E sum_e f_e p_e of the Switch Transformer (arXiv 2101.03961 eq. 4), with the softmax of the router's logits.
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
