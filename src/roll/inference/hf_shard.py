"""One rank's part of a model in the `hf` engine, and the collectives between the ranks.

q, k, v, gate, up      sharded by outputs: each rank computes some heads and some columns of the MLP
o, down                sharded by inputs; the outputs are summed over the ranks
everything else        on every rank; rank 0 samples, and the others receive its tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roll.errors import ModelError
from roll.inference.hf_sampling import SampledTokens, Sampler
from roll.models import get_decoder, has_renamed_weights
from roll.models.multimodal import has_media_tower
from roll.models.tensor_parallel import ROW_STYLES, choose_styles, list_sharded_sizes
from roll.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ModelShard", "SharedSampler"]


@dataclass(slots=True)
class ModelShard:
    """The part of a model that one rank computes."""

    rank: int
    size: int
    group: Any
    """The process group of the ranks."""
    dims: dict[str, int] = field(default_factory=dict)
    """The dimension along which each sharded weight is split, by name; filled by `apply`."""

    def apply(self, model: PreTrainedModel) -> None:
        """Keep this rank's part of the model's weights, and insert the collectives.

        Raises:
            ModelError: The model cannot be sharded over this number of ranks.
        """
        decoder, instead = get_decoder(model), "set inference.tensor_parallel to 1, or use inference.engine=vllm"
        styles = choose_styles(decoder)
        sizes = list_sharded_sizes(decoder, styles)
        if "num_attention_heads" not in sizes or has_media_tower(model) or has_renamed_weights(model):
            raise ModelError(
                f"model type '{model.config.model_type}' cannot be sharded by the hf engine over {self.size} ranks: "
                f"{instead}."
            )
        if wrong := [f"{name} {count}" for name, count in sizes.items() if count % self.size]:
            raise ModelError(
                f"inference.tensor_parallel {self.size} does not divide {', '.join(wrong)} of the model: {instead}."
            )
        names = {module: name for name, module in model.named_modules()}
        for path, style in styles.items():
            module = decoder.get_submodule(path)
            if not isinstance(module, nn.Linear) or style not in ("colwise", "rowwise"):
                raise ModelError(
                    f"the hf engine cannot shard the module {path} ({type(module).__name__}, {style}): {instead}."
                )
            is_row = style in ROW_STYLES
            self._split(module, "weight", names[module], dim=1 if is_row else 0)
            if is_row:
                module.forward = self._build_row_forward(module)
            elif module.bias is not None:
                self._split(module, "bias", names[module], dim=0)

    def select(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a whole weight."""
        return tensor if name not in self.dims else tensor.chunk(self.size, self.dims[name])[self.rank]

    def get_whole_shape(self, name: str, part: Tensor) -> tuple[int, ...]:
        """Return the shape of the weight of which `part` is this rank's part."""
        dim = self.dims.get(name)
        return tuple(length * self.size if i == dim else length for i, length in enumerate(part.shape))

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Send a contiguous tensor from rank 0 to the other ranks, which receive it in place."""
        self.group.broadcast(tensor, root=0).wait()
        return tensor

    def _split(self, module: nn.Module, name: str, path: str, *, dim: int) -> None:
        whole = getattr(module, name)
        self.dims[f"{path}.{name}"] = dim
        part = whole.detach().chunk(self.size, dim)[self.rank].clone(memory_format=torch.contiguous_format)
        setattr(module, name, nn.Parameter(part, requires_grad=False))

    def _build_row_forward(self, module: nn.Linear) -> Any:
        def forward(x: Tensor) -> Tensor:
            output = F.linear(x, module.weight).contiguous()
            self.group.allreduce(output).wait()
            return output if module.bias is None else output + module.bias

        return forward


class SharedSampler:
    """A sampler whose rank 0 samples; the other ranks receive the tokens, so that all ranks continue the same rows.

    Args:
        sampler: The sampler of rank 0.
        shard: The ranks.
    """

    def __init__(self, sampler: Sampler, shard: ModelShard) -> None:
        self._sampler = sampler
        self._shard = shard

    def release(self) -> None:
        """Free the work buffers."""
        self._sampler.release()

    def sample(self, logits: Tensor, params: Sequence[SamplingParams], uniforms: np.ndarray) -> SampledTokens:
        """See `Sampler.sample`; log-probs are 0 on all ranks except rank 0."""
        if self._shard.rank == 0:
            drawn = self._sampler.sample(logits, params, uniforms)
            self._shard.broadcast(torch.from_numpy(drawn.tokens.astype(np.int64)).to(logits.device))
            return drawn
        tokens = self._shard.broadcast(torch.zeros(len(params), dtype=torch.int64, device=logits.device))
        return SampledTokens(tokens=tokens.cpu().numpy(), logprobs=np.zeros(len(params), np.float32))
