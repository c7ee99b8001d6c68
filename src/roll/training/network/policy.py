"""The policy's network, which computes the log-probs of the tokens of a packed row.

On request, it also computes the entropy of the distributions, their divergence from the initial policy or a teacher,
and the log-probs of other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from roll.errors import ModelError
from roll.models import get_decoder
from roll.models.multimodal import check_media
from roll.training.attention.packed import ATTENTION_NAME
from roll.training.attention.plan import AttentionObserver
from roll.training.network.distributions import Predictions, Projection, compute_token_statistics
from roll.training.network.divergence import compute_teacher_divergence
from roll.training.network.hidden_states import compute_hidden_states, run_decoder
from roll.training.network.logprobs import softcap_
from roll.training.network.lora import disable_adapters
from roll.training.network.media import build_media_sample, get_model_media
from roll.training.network.packing_check import check_packing
from roll.training.network.pipeline_split import PipelineSplit
from roll.training.network.routing import find_routing
from roll.training.network.row_inputs import RowInputs, build_row_inputs
from roll.training.network.top_logprobs import compute_logprobs, compute_topk_logprobs
from roll.training.network.value import compute_values, create_value_head
from roll.training.packing.layout import Int64Array, PackedLayout, build_layout
from roll.training.packing.micro_batches import pack
from roll.training.parallel.fsdp import gather_projection, get_projection_dtype, regather_on_backward
from roll.training.parallel.tensor import get_local_part
from roll.training.parallel.tokens import WHOLE_ROW, TokenShard
from roll.training.parallel.vocab_parallel import VocabShard
from roll.types import IntArray, LossRequirements, MediaSpan, OutputName

__all__ = ["PolicyNetwork", "check_images"]

_LOGIT_FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""Settings with which some models multiply (1) or divide (-1) their logits."""


class PolicyNetwork(nn.Module):
    """Wraps an HF causal language model, so that one `forward` uses all parameters, as FSDP requires.

    Args:
        model: An HF model loaded with the attention `roll_packed`; with LoRA, the model inside the peft wrapper.
        reference: A frozen copy of the initial model, for the divergence from it; not needed with LoRA.
        teachers: Frozen models over the same vocabulary, for the divergence from one of them.
        value_head: Whether to add a value head, which predicts the value of the state before a token. It reads the
            hidden state that predicts the token, so the value cannot depend on the token.

    Raises:
        ModelError: A model computes its logits in a way that the chunked projection does not support.
    """

    def __init__(
        self, model: Any, reference: Any = None, teachers: Sequence[Any] = (), *, value_head: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.reference = reference
        self.teachers = nn.ModuleList(teachers)
        _check_head(model, "be trained")
        self.routing = find_routing(model)
        if reference is not None:
            check_images(reference)
        for teacher in teachers:
            _check_head(teacher, "be a teacher")
        self.value_head = create_value_head(model.get_output_embeddings().weight) if value_head else None
        self.share: TokenShard = WHOLE_ROW
        """This rank's share of every row's tokens."""
        self.pipeline_split: PipelineSplit | None = None
        """The split of the model into pipeline stages, if there are several."""

    def forward(
        self,
        layout: PackedLayout,
        temperature: float,
        needs: LossRequirements,
        observer: AttentionObserver | None = None,
        topk: Int64Array | int | None = None,
    ) -> Predictions:
        """Compute the log-probs [M] of the layout's predictions, float32 or better, and the other outputs that are
        needed.

        Args:
            layout: The micro-batch.
            temperature: The temperature of the distributions.
            needs: The outputs that a loss needs.
            observer: An observer that receives queries and keys of some layers.
            topk: Token IDs [M, k] whose log-probs are computed too, or the k of the top-k log-probs, which have no
                gradient.

        Raises:
            ValueError: The required teacher, reference or adapter is missing, or `topk` exceeds the vocabulary.
        """
        if self.pipeline_split is not None and not self.pipeline_split.stage.active_chunk.is_last:
            return self._run_stage(self.pipeline_split, layout, needs)
        found = self._compute_local_predictions(layout, temperature, needs, observer, topk)
        return found.map_tensors(
            lambda tensor: regather_on_backward(self.projection, self.share.gather_predictions(tensor, layout))
        )

    def _compute_local_predictions(
        self,
        layout: PackedLayout,
        temperature: float,
        needs: LossRequirements,
        observer: AttentionObserver | None,
        topk: Int64Array | int | None,
    ) -> Predictions:
        """Compute the outputs at the predictions of this rank."""
        other = None if isinstance(topk, int) else topk
        inputs = _build_inputs(self.model, layout, observer, self.share, other)
        targets, policy = inputs.tensors.targets, _build_projection(self.model, inputs)
        found = Predictions()
        if needs.divergence is not None:
            of_teacher, other = needs.divergence.temperature or temperature, self._build_teacher_projection(layout)
            # A divergence needs both distributions of a token at once, so vocabulary shards are gathered.
            full, teacher = policy.gather_vocab(), other.gather_vocab()
            rows = min(len(full.weight), len(teacher.weight))  # the rest is padding: tokenizers agree
            logprobs, distance = compute_teacher_divergence(
                full._replace(weight=full.weight[:rows]),
                teacher._replace(weight=teacher.weight[:rows]),
                targets.clamp(max=rows - 1),
                needs.divergence,
                temperature=of_teacher,
            )
            same = of_teacher == temperature and rows == len(full.weight)
            alike = Predictions(logprobs=logprobs if same else None, divergence=distance)
            found = alike.map_tensors(policy.divide_gradient)
        if isinstance(topk, int):
            ids, top_logprobs = compute_topk_logprobs(policy.gather_vocab(), topk, temperature=temperature)
            found = found._replace(top_ids=ids, top_logprobs=top_logprobs)
        elif topk is not None:  # the targets' log-probs come from the same logits
            full = policy.gather_vocab()
            _check_tokens(topk, len(full.weight))
            assert inputs.tensors.top_ids is not None
            ids = torch.cat([inputs.tensors.top_ids, targets[:, None]], dim=1)
            several = policy.divide_gradient(compute_logprobs(full, ids, temperature=temperature))
            found = found._replace(logprobs=several[:, -1], top_logprobs=several[:, :-1])
        if found.logprobs is None or needs.entropy or needs.full_kl:
            plain = compute_token_statistics(
                policy,
                targets,
                temperature=temperature,
                entropy=needs.entropy,
                reference=self._build_reference_projection(inputs) if needs.full_kl else None,
            )
            found = found._replace(logprobs=plain.logprobs, entropy=plain.entropy, full_kl=plain.full_kl)
        if not needs.values:
            return found
        assert self.value_head is not None, "the policy has no value head"
        return found._replace(values=policy.divide_gradient(compute_values(self.value_head, policy.hidden)))

    def _run_stage(self, split: PipelineSplit, layout: PackedLayout, needs: LossRequirements) -> Predictions:
        """Run this stage's layers of all models whose outputs `needs` requests, in the same order as the last stage.
        Return the policy's hidden states.
        """

        def states(model: Any, packed: PackedLayout) -> Tensor:
            decoder, device, dtype = get_decoder(model), split.stage.device, split.dtype
            return run_decoder(decoder, build_row_inputs(decoder, packed, device, dtype, token_shard=self.share))

        # Each model sends hidden states to the next stage, which receives them in the order of its own calls.
        hidden = states(self.model, layout)
        # Router replay is for the policy: a frozen model chooses its own experts.
        frozen = replace(layout, experts=None)
        with torch.no_grad():
            if needs.divergence is not None:
                states(self._get_teacher(layout), frozen)
            if needs.full_kl and self.reference is not None:
                states(self.reference, frozen)
            elif needs.full_kl:
                with self._run_as_reference():
                    states(self.model, frozen)
        return Predictions(hidden=hidden)

    def _get_teacher(self, layout: PackedLayout) -> Any:
        if not 0 <= layout.teacher < len(self.teachers):
            raise ValueError(
                f"a sample has teacher index {layout.teacher} (counted from 0), but the number of teachers is "
                f"{len(self.teachers)}"
            )
        return self.teachers[layout.teacher]

    @torch.no_grad()
    def _build_teacher_projection(self, layout: PackedLayout) -> Projection:
        teacher = self._get_teacher(layout)
        return _build_projection(teacher, _build_inputs(teacher, replace(layout, experts=None), token_shard=self.share))

    @torch.no_grad()
    def _build_reference_projection(self, inputs: RowInputs) -> Projection:
        """Return the reference's hidden states for the policy's inputs, and its projection."""
        frozen = inputs.drop_experts()
        if self.reference is not None:
            return _build_projection(self.reference, frozen)
        with self._run_as_reference():
            return _build_projection(self.model, frozen)

    @contextmanager
    def _run_as_reference(self) -> Iterator[None]:
        """Disable adapters and the recording of expert choices within a `with` block."""
        uncounted = nullcontext() if self.routing is None else self.routing.pause_recording()
        with disable_adapters(self.model, allow_missing=self.pipeline_split is not None), uncounted:
            yield

    @property
    def _head(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._head.device

    @property
    def heads(self) -> dict[str, nn.Parameter]:
        """The trained parameters outside the model, by name; engines and exports do not include these parameters."""
        return {} if self.value_head is None else dict(self.value_head.named_parameters("value_head"))

    @property
    def outputs(self) -> frozenset[OutputName]:
        """The outputs that the network supports."""
        head: tuple[OutputName, ...] = () if self.value_head is None else ("values",)
        routers: tuple[OutputName, ...] = () if self.routing is None else ("experts",)
        return frozenset(("logprobs", "attention", "top_logprobs", *head, *routers))

    @property
    def frozen_models(self) -> list[Any]:
        """The frozen models: reference and teachers."""
        return [*([] if self.reference is None else [self.reference]), *self.teachers]

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary."""
        return self.model.config.get_text_config().vocab_size

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return self.model.config.get_text_config().num_hidden_layers

    @property
    def projection(self) -> Any:
        """The projection to the vocabulary."""
        return self.model.get_output_embeddings()

    @property
    def decoder(self) -> Any:
        """The backbone, whose layers are sharded one by one."""
        return get_decoder(self.model)

    @property
    def root(self) -> Any:
        """The module whose parameter names are those of the HF checkpoint."""
        return self.model

    @property
    def architecture(self) -> str:
        """The `transformers` class that loads an export."""
        return type(self.model).__name__


def _check_head(model: Any, use: str) -> None:
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ModelError(f"{type(model).__name__} cannot {use}: it must have a vocabulary projection without bias")
    check_packing(model, _compute_logits)
    check_images(model)


def check_images(model: Any) -> None:
    """Check that packed rows with images give the same results as the model's own forward pass.

    Raises:
        ModelError: The results differ.
    """
    media = get_model_media(get_decoder(model))
    if media is None:
        return

    def run(token_ids: IntArray, spans: Sequence[MediaSpan]) -> Tensor:
        sample = build_media_sample(media, token_ids, spans)
        ((blocks,),) = pack([sample], max_tokens=len(token_ids), share_prefix=False, every_token=True)
        layout = build_layout(blocks, every_token=True)
        decoder = get_decoder(model)
        return compute_hidden_states(decoder, build_row_inputs(decoder, layout, model.device, model.dtype))

    check_media(model, media, ATTENTION_NAME, run)


def _check_tokens(ids: Int64Array, num_tokens: int) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < num_tokens:
        raise ValueError(
            f"teacher_top contains token {ids.max() if ids.min() >= 0 else ids.min()}, but the vocabulary size is "
            f"{num_tokens}: the teacher has a different vocabulary"
        )


def _build_inputs(
    model: Any,
    layout: PackedLayout,
    observer: AttentionObserver | None = None,
    token_shard: TokenShard = WHOLE_ROW,
    top_ids: Int64Array | None = None,
) -> RowInputs:
    """Return the inputs of a causal language model."""
    head = model.get_output_embeddings()
    device, dtype = head.weight.device, get_projection_dtype(head)
    return build_row_inputs(get_decoder(model), layout, device, dtype, observer, token_shard, top_ids)


def _build_projection(model: Any, inputs: RowInputs) -> Projection:
    """Return the hidden states at this rank's predictions, and the projection to the vocabulary."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    token_shard, hidden = inputs.token_shard, compute_hidden_states(get_decoder(model), inputs)
    for name, power in _LOGIT_FACTORS.items():
        # Logits are linear in the hidden states, so a factor on one is a factor on the other.
        factor = getattr(config, name, None)
        if factor not in (None, 1):
            hidden = hidden * factor**power
    vocab_shard = None if token_shard.tp is None else VocabShard(token_shard.tp)
    hidden = gather_projection(head, hidden)
    return Projection(
        hidden, get_local_part(head.weight), getattr(config, "final_logit_softcapping", None), vocab_shard
    )


def _compute_logits(model: Any, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    inputs = _build_inputs(model, layout)
    projected = _build_projection(model, inputs)
    own = compute_hidden_states(get_decoder(model), inputs)
    return own, softcap_(projected.hidden @ projected.weight.t(), projected.softcap)
