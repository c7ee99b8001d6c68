"""Finds the routers of a mixture of experts, and reads the experts that they chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll.models.mixers import get_decoder

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["find_routers", "read_router_output"]


def find_routers(model: Any) -> list[Any]:
    """Return the routers of an HF model that output the chosen experts, in layer order; empty if there are none."""
    return [module for module in get_decoder(model).modules() if _is_router(module)]


def _is_router(module: Any) -> bool:
    numbers = [getattr(module, name, None) for name in ("top_k", "num_experts")]
    weight = getattr(module, "weight", None)
    if not all(isinstance(n, int) for n in numbers) or weight is None or weight.ndim != 2:
        return False
    return len(weight) == numbers[1]


def read_router_output(router: Any, output: Any) -> tuple[Tensor, Tensor]:
    """Return (logits [N, E], chosen experts [N, k]) from a router's output.

    Most routers return logits, weights and experts. The routers of Llama 4 return scores, which are 0 except for the
    chosen experts, and logits.
    """
    if len(output) == 2:
        scores, logits = output
        return logits, scores.detach().topk(router.top_k, dim=-1).indices
    logits, _, chosen = output
    return logits, chosen
