"""A `roll.config.activation_memory.ModelSizes` whose numbers a test chooses."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Sizes"]


@dataclass(frozen=True)
class Sizes:
    """A small Llama: 2 layers, hidden 192, 3 heads of 64, one of keys and values."""

    num_parameters: int = 1_000_000
    num_layers: int = 2
    hidden_size: int = 192
    intermediate_size: int = 512
    num_heads: int = 3
    num_kv_heads: int = 1
    head_dim: int = 64
    vocab_size: int = 256
    experts_per_token: int = 0
    num_experts: int = 0
    expert_parameters: int = 0
    has_untied_lm_head: bool = False
    has_fusable_norms: bool = True
    has_fusable_gates: bool = True
    tower: None = None

    @property
    def norm_width(self) -> int:
        return 2 * self.hidden_size
