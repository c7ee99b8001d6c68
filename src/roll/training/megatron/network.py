"""A decoder of Megatron layers with the interface of an HF model, which the trainer's networks wrap.

    ids [1, N] ─ embedding ─► [1, n, H] ─ layers with the trainer's attention ─► norm ─► [1, n, H]

Of N tokens of a row, each tp rank has n = N / tp between attention and MLP (sequence parallel). With context
parallelism, N are the tokens of the rank's slice of a row, and the trainer's attention exchanges slices for heads
(`roll.training.parallel.tokens`). Rotary angles are computed as in the HF model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from roll.config.training import TrainingConfig
from roll.errors import ModelError, UnsupportedError
from roll.training.attention.packed import packed_attention
from roll.training.attention.plan import AttentionPlan
from roll.training.megatron.experts import ExpertBlock
from roll.training.megatron.supported import check_model
from roll.training.memory.activation_checkpointing import create_recompute_contexts

__all__ = ["MegatronModel", "build_transformer_config"]


@dataclass(frozen=True, slots=True)
class _PackedParams:
    """The argument that a layer passes to its attention, instead of Megatron's `PackedSeqParams`."""

    plan: AttentionPlan
    qkv_format: str = "sbhd"
    """Megatron's name of the format [N, 1, heads, width] of queries, keys and values."""


class _PackedCoreAttention(nn.Module):
    """The attention of one layer, computed with the attention plan of the packed row."""

    def __init__(self, config: Any, layer_number: int, windows: list[int | None], **kwargs: Any) -> None:
        super().__init__()
        self._window = windows[layer_number - 1]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *unused: Any, packed_seq_params: _PackedParams, **kwargs: Any
    ) -> Tensor:
        """Compute attention [N, 1, H * w] from queries [N, 1, H, d], keys [N, 1, K, d] and values [N, 1, K, w]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        plan = packed_seq_params.plan
        result, _ = packed_attention(self, q, k, v, None, roll_plan=plan, sliding_window=self._window)
        return result[0].flatten(1)[:, None]


class _Norm(nn.RMSNorm):
    """An RMS norm with a marked weight: Megatron sums the gradients of marked weights over the tp ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _Layer(nn.Module):
    """Wraps a Megatron layer, which expects hidden states [n, 1, H], so that it accepts hidden states [1, n, H]."""

    def __init__(self, config: Any, spec: Any, number: int, experts: ExpertBlock | None) -> None:
        super().__init__()
        from megatron.core.transformer.spec_utils import build_module

        self.recomputes = config.recompute_granularity == "full"
        self.has_dropout = False
        """True if the layer's adapters have dropout, which recomputation must reproduce."""
        self.inside = build_module(spec, config=config, layer_number=number)
        if experts is not None:
            self.inside.mlp = experts

    def forward(self, states: Tensor, angles: Tensor, *, roll_plan: AttentionPlan) -> Tensor:
        """Run the layer on states [1, n, H], with the rotary angles [N, 1, 1, d] of all tokens of the row; return [1,
        n, H].
        """
        if self.recomputes and self.training and torch.is_grad_enabled():
            return checkpoint(
                self._run,
                states,
                angles,
                roll_plan,
                use_reentrant=False,
                context_fn=create_recompute_contexts,
                preserve_rng_state=self.has_dropout,
            )
        return self._run(states, angles, roll_plan)

    def _run(self, states: Tensor, angles: Tensor, plan: AttentionPlan) -> Tensor:
        outputs, _ = self.inside(
            hidden_states=states.transpose(0, 1),
            attention_mask=None,
            rotary_pos_emb=angles,
            packed_seq_params=_PackedParams(plan),
        )
        return outputs.transpose(0, 1)


class _Backbone(nn.Module):
    """The decoder of a Megatron model: embeddings, layers, and the last norm."""

    def __init__(self, config: Any, hf_config: Any, experts: Mapping[int, nn.Module], ep: ProcessGroup | None) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import VocabParallelEmbedding

        self.config = hf_config
        self.embedding = VocabParallelEmbedding(
            hf_config.vocab_size,
            hf_config.hidden_size,
            init_method=config.init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
        )
        if config.sequence_parallel:
            embed = self.embedding.forward
            # The reduce-scatter of sequence parallelism divides dimension 0, and returns [n, 1, H].
            self.embedding.forward = lambda ids: embed(ids).transpose(0, 1)
        windows = _read_attention_windows(hf_config)
        self.layers = nn.ModuleList()
        for i in range(config.num_layers):
            block = ExpertBlock(experts[i], hf_config, config.params_dtype, ep) if i in experts else None
            self.layers.append(_Layer(config, _build_layer_spec(config, windows, block is None), i + 1, block))
        self.norm = _Norm(config, config.hidden_size, config.layernorm_epsilon)
        self.frequencies = torch.empty(0)
        """The frequencies of the rotary positions."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the embeddings of the vocabulary."""
        return self.embedding

    def forward(self, *, input_ids: Tensor, position_ids: Tensor, roll_plan: AttentionPlan, **unused: Any) -> Any:
        """Return the hidden states [1, n, H] of this rank's tokens, in the format of a `transformers` decoder."""
        if position_ids.ndim > 2:
            raise UnsupportedError(
                "training.backend 'megatron' does not support multimodal RoPE (M-RoPE): set training.backend to 'torch'"
            )
        angles = position_ids[0].float()[:, None] * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, None, None]
        states = self.embedding(input_ids)
        for layer in self.layers:
            states = layer(states, angles, roll_plan=roll_plan)
        return SimpleNamespace(last_hidden_state=self.norm(states))


class _Projection(nn.Module):
    """The projection to this rank's vocabulary shard. The trainer uses hidden states and the weight [V / tp, H]
    directly.
    """

    bias = None

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class MegatronModel(nn.Module):
    """A Megatron model that provides the attributes of HF models used by the trainer's networks.

    Args:
        config: Megatron's configuration.
        hf_config: The configuration of the corresponding HF model.
        experts: The HF model's MoE blocks, by layer index.
        ep: The ranks over which experts are sharded.
        has_separate_projection: Whether the vocabulary projection is separate from the embeddings.
        score: The head of an HF classifier; only the shape of the head is used. `None` if the model has no head.
    """

    base_model_prefix = "model"

    def __init__(
        self,
        config: Any,
        hf_config: Any,
        experts: Mapping[int, nn.Module],
        ep: ProcessGroup | None,
        *,
        has_separate_projection: bool,
        score: nn.Linear | None,
    ) -> None:
        super().__init__()
        self.config = hf_config
        self.dtype = config.params_dtype
        self.model = _Backbone(config, hf_config, experts, ep)
        weight: nn.Parameter = self.model.embedding.weight
        self.lm_head = _Projection(nn.Parameter(torch.empty_like(weight)) if has_separate_projection else weight)
        if score is not None:
            self.score = nn.Linear(score.in_features, score.out_features, bias=False, dtype=self.dtype)

    @property
    def base_model(self) -> nn.Module:
        """The model without a head."""
        return self.model

    def get_decoder(self) -> nn.Module:
        """Return the backbone."""
        return self.model

    def get_output_embeddings(self) -> nn.Module:
        """Return the module whose weight is the vocabulary projection."""
        return self.lm_head


def build_transformer_config(decoder: Any, training: TrainingConfig, dtype: torch.dtype) -> Any:
    """Return Megatron's configuration of the layers of an HF model's decoder.

    Raises:
        ModelError: The model has a feature that ROLL's Megatron layers do not support.
    """
    from megatron.core.transformer import TransformerConfig

    own, rotary, tp = decoder.config, decoder.rotary_emb, training.parallel.tp
    check_model(own.to_dict(), training.parallel)
    if rotary.attention_scaling != 1.0 or rotary.rope_type in ("dynamic", "longrope"):
        raise ModelError(
            "training.backend 'megatron' supports RoPE that does not depend on the sequence length, but this model has "
            f"the RoPE type '{rotary.rope_type}': set training.backend to 'torch'"
        )
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=own.num_hidden_layers,
        hidden_size=own.hidden_size,
        num_attention_heads=own.num_attention_heads,
        num_query_groups=own.num_key_value_heads,
        kv_channels=getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads,
        ffn_hidden_size=own.intermediate_size,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=own.model_type == "qwen2" or bool(getattr(own, "attention_bias", getattr(own, "qkv_bias", False))),
        normalization="RMSNorm",
        layernorm_epsilon=own.rms_norm_eps,
        qk_layernorm=own.model_type in ("qwen3", "qwen3_moe"),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights come from the HF model, so Megatron initializes none.
        use_cpu_initialization=True,
        perform_initialization=False,
        # This fusion needs an extension that Apex compiles.
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        calculate_per_token_loss=True,  # losses are normalized already: gradients are summed over data ranks
        **(recomputed if training.activation_checkpointing else {}),
    )


def _read_attention_windows(config: Any) -> list[int | None]:
    """Return the attention window of each layer, `None` for full attention."""
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def _build_layer_spec(config: Any, windows: list[int | None], has_mlp: bool) -> Any:
    """Return the spec of a Megatron layer whose modules need neither Apex nor Transformer Engine.

    Args:
        config: Megatron's configuration.
        windows: The attention window of each layer.
        has_mlp: Whether the layer has a dense MLP.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    inner_norm = _Norm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=ModuleSpec(module=_PackedCoreAttention, params={"windows": windows}),
        linear_proj=RowParallelLinear,
        q_layernorm=inner_norm,
        k_layernorm=inner_norm,
    )
    layer = TransformerLayerSubmodules(
        input_layernorm=_Norm,
        self_attention=ModuleSpec(
            module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=_Norm,
        mlp=ModuleSpec(
            module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        )
        if has_mlp
        else IdentityOp,
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=layer)
