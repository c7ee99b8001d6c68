"""Load a trainer's network: an HF model with its adapters, prepared for the role."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from roll.errors import ModelError
from roll.models import find_routers, load_causal_lm, load_scorer, load_tokenizer
from roll.models.multimodal import open_media
from roll.training.attention.packed import register_attention
from roll.training.experts import use_grouped_gemm
from roll.training.memory.activation_checkpointing import checkpoint_layers
from roll.training.memory.deferred_weights import DeferredWeights
from roll.training.memory.nf4 import quantize_base
from roll.training.network.fp8 import use_fp8
from roll.training.network.fused import use_fused_kernels
from roll.training.network.lora import add_adapters, reset_magnitudes
from roll.training.network.media import attach_media
from roll.training.network.packing_check import make_packable
from roll.training.network.policy import PolicyNetwork, check_images
from roll.training.network.value import ValueNetwork
from roll.training.network.vision_parts import freeze_parts
from roll.training.spec import TrainerSpec, disable_fp8

__all__ = ["build_network"]


def build_network(
    spec: TrainerSpec, dtype: torch.dtype, deferred: DeferredWeights | None = None
) -> PolicyNetwork | ValueNetwork:
    """Build the network of a role in `dtype`, on the host.

    Args:
        spec: The spec of the rank.
        dtype: The compute dtype of the network.
        deferred: If given, the weights are not read but registered here, and the network is on the meta device.

    Raises:
        ModelError: The model cannot be loaded, or cannot be used in this role.
    """
    model = _load_model(spec, dtype, deferred)
    if spec.role in ("critic", "reward_model"):
        if spec.role == "critic":
            with nullcontext() if deferred is None else deferred.materialize_weights():
                check_images(model)
        return ValueNetwork(model)
    copies = spec.holds_reference and spec.model.lora is None
    reference = _load_model(replace(spec, role="reference"), dtype, deferred) if copies else None
    teachers = [_load_teacher(spec, path, dtype, deferred) for path in spec.teachers]
    with nullcontext() if deferred is None else deferred.materialize_weights():  # the network runs once for a check
        network = PolicyNetwork(model, reference, teachers, value_head=spec.value_head_learning_rate is not None)
    if spec.role == "policy" and spec.training.router_replay != "none" and network.routing is None:
        raise ModelError(
            f"training.router_replay '{spec.training.router_replay}' requires a mixture-of-experts model, but "
            f"'{spec.model_path}' has no routers: set training.router_replay to none"
        )
    if spec.role == "policy":
        _set_up_load_balancing(spec, network, model.config)
        if spec.training.router_replay != "none" and network.routing is not None:
            with nullcontext() if deferred is None else deferred.materialize_weights(find_routers(model)):
                network.routing.check_replay()
    return network


def _set_up_load_balancing(spec: TrainerSpec, network: PolicyNetwork, config: Any) -> None:
    """Set up load balancing of a policy's routers as configured.

    Raises:
        ModelError: The model has no routers that support load balancing.
    """
    training, routing = spec.training, network.routing
    if training.router_aux_loss:
        if routing is None or not hasattr(config.get_text_config(), "router_aux_loss_coef"):
            raise ModelError(
                f"training.router_aux_loss must be 0 for '{spec.model_path}', which is not a mixture of experts with "
                f"an auxiliary loss (router_aux_loss_coef in its configuration), got {training.router_aux_loss:g}"
            )
        routing.aux_coefficient = training.router_aux_loss
    if training.router_bias_rate and (routing is None or not routing.biases or spec.model.lora is not None):
        raise ModelError(
            f"training.router_bias_rate must be 0 for '{spec.model_path}', which has no router bias "
            f"(e_score_correction_bias) or has it frozen by model.lora, got {training.router_bias_rate:g}"
        )


def _load_teacher(spec: TrainerSpec, path: str, dtype: torch.dtype, deferred: DeferredWeights | None) -> Any:
    """Load the frozen teacher at `path`, after checking that the model of `spec` has the same vocabulary.

    Raises:
        ModelError: The teacher has a different vocabulary.
    """
    trust = spec.model.trust_remote_code
    student, teacher = (load_tokenizer(p, trust_remote_code=trust).get_vocab() for p in (spec.model_path, path))
    different = sum(teacher.get(token) != number for token, number in student.items())
    if different or len(student) != len(teacher):
        raise ModelError(
            f"teacher '{path}' has a different vocabulary from '{spec.model_path}': {len(teacher)} tokens, expected "
            f"{len(student)}; {different} tokens of the model are missing in the teacher or have a different ID. Use "
            "a teacher with the same tokenizer"
        )
    own_format = disable_fp8(spec.training)
    return _load_model(replace(spec, role="reference", model_path=path, training=own_format), dtype, deferred)


def _load_model(spec: TrainerSpec, dtype: torch.dtype, deferred: DeferredWeights | None) -> Any:
    """Load the HF causal language model of a role; for a reward model, the sequence classifier.

    Dropout of the model is disabled, so that log-probs match those of the sampling policy. Dropout of an adapter stays
    as configured.
    """
    load = load_scorer if spec.role == "reward_model" else load_causal_lm
    trust, meta_init = spec.model.trust_remote_code, None if deferred is None else deferred.add
    options: Any = {"attention": register_attention(), "trust_remote_code": trust, "meta_init": meta_init}
    model: Any = load(spec.model_path, dtype, **options)
    use_grouped_gemm(model)
    if spec.media_dir is not None:
        inputs = open_media(spec.model_path, spec.media_dir, trust_remote_code=trust)
        if inputs is not None:
            attach_media(model, inputs)
    with nullcontext() if deferred is None else deferred.materialize_weights():
        make_packable(model)
        use_fused_kernels(model)
    if deferred is not None:
        # Replacements are compared with their modules, so each layer is processed while it has its weights.
        deferred.apply_by_layer(model, use_fused_kernels)
    # Before adapters, which wrap the linear layers.
    if spec.training.fp8 != "none" and dtype == torch.bfloat16:
        use_fp8(model, spec.training.fp8, spec.training.parallel.tp)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if spec.role == "reference":
        return model.requires_grad_(False)
    if spec.model.lora is not None:
        adapted = model.base_model if spec.role == "reward_model" else model  # the head is trained in full
        add_adapters(adapted, spec.model.lora, spec.seed, spec.model.vision)
        if spec.model.lora.base == "nf4":
            quantize_base(adapted)
            reset_magnitudes(adapted)
    freeze_parts(model, spec.model.vision)
    if spec.training.activation_checkpointing:
        checkpoint_layers(model)
    return model
