"""Router replay: records the experts that the routers of an MoE model choose in the `hf` engine."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from roll.errors import ModelError
from roll.inference.spec import EngineSpec, get_expert_dtype
from roll.models import find_routers, read_router_output

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RoutingRecorder", "reuse_first_pass"]


class RoutingRecorder:
    """Records the experts that the routers of a model chose in the latest forward pass.

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
                f"training.router_replay 'engine' requires a mixture-of-experts model, but '{spec.model_path}' has no "
                "routers: set training.router_replay to none"
            )
        self._dtype = get_expert_dtype(int(routers[0].num_experts))
        self._latest: list[Tensor | None] = [None] * len(routers)
        for i, router in enumerate(routers):
            router.register_forward_hook(self._make_hook(i))

    def get_chosen_experts(self) -> np.ndarray:
        """Return the experts [N, layers, k] chosen in the latest forward pass; N includes padding."""
        layers = [layer for layer in self._latest if layer is not None]
        assert len(layers) == len(self._latest), "a forward pass left a router out"
        self._latest = [None] * len(layers)
        return torch.stack(layers, dim=1).cpu().numpy().astype(self._dtype)

    def _make_hook(self, i: int) -> Any:
        def hook(router: Any, args: Any, output: Any) -> None:
            chosen = read_router_output(router, output)[1]
            self._latest[i] = chosen.reshape(-1, chosen.shape[-1])

        return hook


@contextmanager
def reuse_first_pass(model: PreTrainedModel) -> Generator[None]:
    """Reuse the router outputs of the first forward pass in all later passes within the `with` block.

    The first pass must compute a whole sequence, and later passes must compute parts of this sequence in order. All
    passes then use the same experts, even if rounding would change a choice.
    """
    rest: dict[Any, tuple[Tensor, ...]] = {}

    def hook(router: Any, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if router not in rest:
            rest[router] = output
            return None
        count = len(output[0])
        part, rest[router] = (tuple(x[rows] for x in rest[router]) for rows in (slice(count), slice(count, None)))
        return part

    hooks = [router.register_forward_hook(hook) for router in find_routers(model)]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()
