"""A record of the experts that a mixture's routers choose while the `hf` engine computes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from roll.errors import ModelError
from roll.inference.spec import EngineSpec, expert_dtype
from roll.models import chosen_experts, find_routers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RoutingRecord", "reuse_first_pass"]


class RoutingRecord:
    """Stores the experts that the routers of a model chose in the latest forward pass.

    Args:
        model: The model.
        spec: The spec of the engine.

    Raises:
        ModelError: the model has no routers that report their choices.
    """

    def __init__(self, model: PreTrainedModel, spec: EngineSpec) -> None:
        routers = find_routers(model)
        if not routers:
            raise ModelError(
                f"training.router_replay is 'engine', and '{spec.model_path}' has no router that chooses experts: set "
                "it to none"
            )
        self._dtype = expert_dtype(int(routers[0].num_experts))
        self._latest: list[Tensor | None] = [None] * len(routers)
        for i, router in enumerate(routers):
            router.register_forward_hook(self._remember(i))

    def chosen(self) -> np.ndarray:
        """Return the experts [N, layers, k] chosen in the latest forward pass, including those of padding."""
        layers = [layer for layer in self._latest if layer is not None]
        assert len(layers) == len(self._latest), "a forward pass left a router out"
        self._latest = [None] * len(layers)
        return torch.stack(layers, dim=1).cpu().numpy().astype(self._dtype)

    def _remember(self, i: int) -> Any:
        def hook(router: Any, args: Any, output: Any) -> None:
            chosen = chosen_experts(router, output)[1]
            self._latest[i] = chosen.reshape(-1, chosen.shape[-1])

        return hook


@contextmanager
def reuse_first_pass(model: PreTrainedModel) -> Generator[None]:
    """Reuse the routers' outputs of the body's first pass, over a text, in its later passes over the text's parts in
    order.

    So passes whose numbers differ in their last digits choose the same experts.
    """
    rest: dict[Any, tuple[Tensor, ...]] = {}

    def hook(router: Any, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if router not in rest:
            rest[router] = output
            return None
        count = len(output[0])
        own, rest[router] = (tuple(x[part] for x in rest[router]) for part in (slice(count), slice(count, None)))
        return own

    hooks = [router.register_forward_hook(hook) for router in find_routers(model)]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()
