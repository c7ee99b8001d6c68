"""The routers of a mixture of experts, and the experts that they chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll.models.mixers import decoder_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["chosen_experts", "find_routers"]


def find_routers(model: Any) -> list[Any]:
    """Return the routers of an HF model that report their choices, first layer first; empty if there are none."""
    return [module for module in decoder_of(model).modules() if _is_router(module)]


def _is_router(module: Any) -> bool:
    numbers = [getattr(module, name, None) for name in ("top_k", "num_experts")]
    weight = getattr(module, "weight", None)
    if not all(isinstance(n, int) for n in numbers) or weight is None or weight.ndim != 2:
        return False
    return len(weight) == numbers[1]


def chosen_experts(router: Any, output: Any) -> tuple[Tensor, Tensor]:
    """Return the logits [N, E] and the chosen experts [N, k] from a router's output.

    Most routers return logits, weights and experts. Llama 4's return scores, which are 0 except for the chosen experts,
    and logits.
    """
    if len(output) == 2:
        scores, logits = output
        return logits, scores.detach().topk(router.top_k, dim=-1).indices
    logits, _, chosen = output
    return logits, chosen
