"""The computation of the `hf` engine: a model, its KV cache, and the rows that are being decoded.

All code here is synchronous and runs in the engine's worker thread; it does not depend on asyncio, time or the order of
arrival. A row's state is its tokens: the cache holds all tokens except the last, which the next step processes.

    admit     add rows; a prompt that several rows share is computed once
    step      generate one token for every row; remove rows that ended, and move the last row into each gap
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roll.errors import ModelError
from roll.inference.hf_adapters import AdapterSet
from roll.inference.hf_attention import (
    ATTENTION_NAME,
    WIDTH_MULTIPLE,
    CausalPass,
    DecodePass,
    KVCache,
    patch_mixers,
    register_attention,
    round_up,
)
from roll.inference.hf_cache import plan_cache
from roll.inference.hf_requests import BatchRow, build_prefill_key, check_adapter
from roll.inference.hf_routing import RoutingRecorder, reuse_first_pass
from roll.inference.hf_sampling import Sampler
from roll.inference.hf_shard import ModelShard, SharedSampler
from roll.inference.hf_weights import apply_update, reload_weights
from roll.inference.spec import EngineSpec, reject_media
from roll.models import find_mixers, get_decoder, load_causal_lm, set_attention
from roll.models.multimodal import ModelMedia, check_media, has_media_tower
from roll.openmp import start_spin_control
from roll.types import FloatArray, GenerationRequest, IntArray, MediaSpan, SequenceMedia, WeightUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Decoder"]

logger = logging.getLogger(__name__)

ROW_MULTIPLE = 8
"""The number of rows of a step is rounded up to a multiple of this, so that the CPU's matrix kernels compute the same
bits for a row in any batch."""
LOGITS_CHUNK = 256
"""Number of positions whose float32 log-probs are computed at a time."""


class Decoder:
    """A loaded model, its KV cache, and its running rows."""

    def __init__(self, spec: EngineSpec, device: torch.device, shard: ModelShard | None = None) -> None:
        """Load the model, keep this rank's part if it is sharded, and check that decoding agrees with the model's
        original attention.

        Raises:
            ModelError: the model cannot be loaded, cannot be decoded by this engine, or the cache is too small for one
                request.
        """
        start_spin_control()
        register_attention()
        self.device = device
        self.model: PreTrainedModel = load_causal_lm(
            spec.model_path, spec.dtype, attention=ATTENTION_NAME, trust_remote_code=spec.trust_remote_code
        )
        torch.nn.Module.to(self.model, device)
        self.model.requires_grad_(False)
        self.rows: list[BatchRow] = []
        self.policy_version = 0
        self.vocab_size = len(self.model.get_input_embeddings().weight)  # type: ignore[arg-type]
        self._body = self.model.base_model if self.model.base_model is not self.model else self.model
        self._shapes: list[tuple[torch.nn.Parameter, torch.Size]] = []
        self._cache = KVCache()
        self._sampler: Sampler | SharedSampler = Sampler() if shard is None else SharedSampler(Sampler(), shard)
        self._max_rows = spec.max_num_seqs
        self.capacity_tokens = plan_cache(spec, self.model.dtype, device)
        self._patch_mixers()
        self._shard = shard
        if shard is not None:
            shard.apply(self.model)
        self.adapters = None if spec.lora is None else AdapterSet(self.model, spec.lora, spec.max_adapters)
        self._spec = spec
        self._routing = RoutingRecorder(self.model, spec) if spec.records_experts else None
        self._media = self._load_media(spec)
        check_decoding(self.model, self._compute_logits)
        if self._media is not None:
            self._sampler = Sampler(self._media.inputs.processor.replaced_tokens)
            check_media(self.model, self._media, ATTENTION_NAME, self._compute_hidden_states)

    def _patch_mixers(self) -> None:
        """Patch the model's recurrent modules to store their states in the engine's cache."""
        text, attention = torch.arange(4, 12, device=self.device), CausalPass()
        try:
            mixers = find_mixers(
                self.model,
                lambda: self._forward(self._body, text, torch.arange(len(text)), attention),
                lambda: attention.num_calls,
            )
        except (TypeError, ValueError, AttributeError, RuntimeError):
            return  # this engine cannot run the model; `check_decoding` raises the error
        if mixers:
            patch_mixers(self.model, mixers)

    def check_media(self, request: GenerationRequest) -> None:
        """Read the media of a request in advance, so that an unreadable image fails only this request.

        Raises:
            DataError: An image, audio or video cannot be read, or its tokens are invalid.
            UnsupportedError: The engine does not read media.
        """
        if self._media is None:
            reject_media("hf", request.media)
        else:
            self._media.check(request.token_ids, request.media, f"request {request.request_id}")
            for span in request.media:  # `check` needs only the tokens, which stay known if a file is deleted
                self._media.inputs.get(span.digest)

    def _load_media(self, spec: EngineSpec) -> ModelMedia | None:
        """Return the model's media inputs; `None` if the model does not read media or the run has no media store."""
        if not has_media_tower(self.model):
            return None
        inputs = spec.open_media()
        return None if inputs is None else ModelMedia(self.model, inputs)

    def can_join(self, row: BatchRow, joining: Sequence[BatchRow] = ()) -> bool:
        """Return whether the cache has room for `row` in addition to the running rows and the rows in `joining`."""
        candidates = [*self.rows, *joining, row]
        widest, rows = max(other.capacity for other in candidates), len(candidates)
        # The cache is one rectangle per layer, so every row is as wide as the longest request.
        return rows <= self._max_rows and rows * round_up(widest, WIDTH_MULTIPLE) <= self.capacity_tokens

    @property
    def cache_usage(self) -> float:
        """Fraction of the cache that running rows have reserved."""
        return sum(round_up(row.capacity, WIDTH_MULTIPLE) for row in self.rows) / self.capacity_tokens

    @torch.inference_mode()
    def admit(self, rows: Sequence[BatchRow]) -> None:
        """Add rows, which must fit, and compute the keys and values of all tokens except the last of each row."""
        width = round_up(max(row.capacity for row in [*self.rows, *rows]), WIDTH_MULTIPLE)
        # Growing the cache copies it, so it gets the maximum number of rows for this width at once.
        count = max(len(self.rows) + len(rows), min(self._max_rows, self.capacity_tokens // width))
        self._cache.reserve(count, width, len(self.rows))
        computed: dict[bytes, int] = {}
        for row in rows:
            # In some models all tokens of an image attend to its last token, so the last token is prefilled too; the
            # next step computes it again.
            ends_with_image = self._ends_with_image(row)
            slot, past = len(self.rows), row.tokens[: row.length - (not ends_with_image)]
            self.rows.append(row)
            if len(past) == 0:
                continue
            # The rollouts of a group share their prompt, so all except the first copy its keys and values.
            source = computed.setdefault(build_prefill_key(row, len(past)), slot)
            if source != slot:
                self._cache.copy_row(source, slot, len(past))
                row.position_offset = self.rows[source].position_offset
                known = self.rows[source].experts
                row.store_experts(0, None if known is None else known[: len(past)])
                continue
            media = row.request.media
            with self._use_adapters([row]):
                row.position_offset = self._run(self._body, past, media, CausalPass, self._cache, slot)[1]
            if self._routing is not None:
                row.store_experts(0, self._routing.get_chosen_experts())

    @torch.inference_mode()
    def step(self) -> list[BatchRow]:
        """Generate one token for every row; remove and return the rows that ended."""
        count = len(self.rows)
        ids = torch.zeros(round_up(count, ROW_MULTIPLE), dtype=torch.int64)
        positions = torch.zeros_like(ids)
        for slot, row in enumerate(self.rows):
            ids[slot], positions[slot] = int(row.tokens[row.length - 1]), row.length - 1
        attention = DecodePass(self._cache, positions[:count].to(self.device))
        with self._embed_last_images(), self._use_adapters(self.rows, len(ids)):
            logits = self._compute_logits(ids.to(self.device), self._build_rotary_ids(positions), attention)
        if self._routing is not None:
            for row, chosen in zip(self.rows, self._routing.get_chosen_experts(), strict=False):  # padding comes last
                row.store_experts(row.length - 1, chosen[None])
        uniforms = np.array([row.uniforms[row.num_generated] for row in self.rows])
        draw = self._sampler.sample(logits, [row.request.sampling for row in self.rows], uniforms)
        ended = [
            row
            for slot, (row, token, logprob) in enumerate(zip(self.rows, draw.tokens, draw.logprobs, strict=True))
            if row.append(int(token), float(logprob), self._get_version(row), draw.choices.get(slot))
        ]
        self.remove(ended)
        return ended

    @torch.inference_mode()
    def remove(self, rows: Sequence[BatchRow]) -> None:
        """Remove rows; fill each gap with the last row."""
        # Running rows must be the first rows of the cache, because `DecodePass` reads them as one slice.
        for row in rows:
            slot, last = self.rows.index(row), self.rows.pop()
            if last is not row:
                self.rows[slot] = last
                self._cache.copy_row(len(self.rows), slot, last.length - 1)

    @torch.inference_mode()
    def logprobs(
        self, sequences: Sequence[IntArray], media: SequenceMedia = (), adapter: str | None = None
    ) -> list[FloatArray]:
        """Return the log-probs [L] of each sequence's tokens given their prefix, at temperature 1; entry 0 is 0."""
        check_adapter("logprobs", adapter, self.adapters)
        results = []
        for sequence, spans in zip(sequences, media or [()] * len(sequences), strict=True):
            ids = torch.from_numpy(np.asarray(sequence, np.int64)).to(self.device)
            result = torch.zeros(len(ids))
            if len(ids) > 1:
                with nullcontext() if self.adapters is None else self.adapters.use([adapter]):
                    logits = self._run(self.model, np.asarray(sequence), spans, CausalPass)[0].logits[0, :-1]
                for start in range(0, len(logits), LOGITS_CHUNK):
                    chunk = logits[start : start + LOGITS_CHUNK].float()
                    chosen = ids[1 + start : 1 + start + len(chunk), None]
                    result[1 + start : 1 + start + len(chunk)] = chunk.log_softmax(-1).gather(-1, chosen)[:, 0].cpu()
            results.append(result.numpy())
        return results

    def update_weights(self, update: WeightUpdate) -> Mapping[str, int]:
        """Apply new weights, or a new adapter; running rows keep their KV cache and continue with the new version. See
        `apply_update` and `AdapterSet.update`."""
        if self.adapters is not None:
            return self.adapters.update(update)
        checksums = apply_update(self.model, update, self._shard)
        self.policy_version = update.policy_version
        return checksums

    def _get_version(self, row: BatchRow) -> int:
        """Return the policy version of the weights that a row computes with."""
        return self.policy_version if self.adapters is None else self.adapters.versions.get(row.request.adapter, 0)

    def _use_adapters(self, rows: Sequence[BatchRow], num_tokens: int = 1) -> AbstractContextManager[None]:
        """Return a context in which each token of a flat input uses the adapter of its row; padding uses the last."""
        if self.adapters is None:
            return nullcontext()
        names = [row.request.adapter for row in rows]
        return self.adapters.use(names + names[-1:] * (num_tokens - len(names)))

    def abort_rows(self, rows: Sequence[BatchRow]) -> None:
        """Remove rows whose requests were aborted."""
        self.remove(rows)

    def close(self) -> None:
        """Do nothing; a decoder with several processes ends them."""

    @property
    def is_released(self) -> bool:
        """True if the memory has been released."""
        return bool(self._shapes)

    def release(self) -> list[BatchRow]:
        """Free weights and cache; return the running rows, which must be admitted again later."""
        rows, self.rows = self.rows, []
        self._cache.clear()
        self._sampler.release()
        # Only the storage of parameters is freed, not the parameters, so that weights are still tied after
        # `allocate_weights`.
        self._shapes = [(parameter, parameter.shape) for parameter in self.model.parameters()]
        for parameter, _ in self._shapes:
            parameter.data = parameter.data.new_empty(0)
        if self.device.type != "cpu":  # other processes share the device
            torch.get_device_module(self.device).empty_cache()
        return rows

    def allocate_weights(self) -> None:
        """Allocate memory for the weights again; their values are undefined until the next update.

        With adapters, the frozen weights are read from their files again.
        """
        for parameter, shape in self._shapes:
            parameter.data = parameter.data.new_zeros(shape)
        self._shapes = []
        if self.adapters is not None:  # updates do not contain the frozen weights
            reload_weights(self.model, self._spec)

    def _run(
        self, module: Any, token_ids: NDArray[Any], media: Sequence[MediaSpan], attention: Any, *cache: Any
    ) -> tuple[Any, float]:
        """Run a module on a whole sequence. Return the output, and the offset of the tokens that follow the sequence.

        The offset, a token's position minus its index, is not 0 after media that have fewer positions than tokens.
        """
        ids, positions = torch.from_numpy(np.asarray(token_ids, np.int64)).to(self.device), None
        if not media:
            return self._forward(module, ids, torch.arange(len(ids)), attention(*cache)), 0
        if self._media is None:
            reject_media("hf", media)
        assert self._media is not None
        positions = self._media.compute_positions(token_ids, media)
        rotary = torch.arange(len(ids)) if positions is None else torch.from_numpy(positions)
        images = self._media.find_bidirectional_images(token_ids, media)
        how = attention(*cache, images=None if images is None else torch.from_numpy(images).to(self.device))
        with self._media.insert_features(token_ids, media, self.device, self.model.dtype):
            output = self._forward(module, ids, rotary, how)
        return output, rotary.max().item() + 1 - len(ids)

    def _ends_with_image(self, row: BatchRow) -> bool:
        return self._media is not None and self._media.ends_with_feature(row.tokens[: row.length], row.request.media)

    def _embed_last_images(self) -> AbstractContextManager[None]:
        """Return a context in which a new token that ends an image is embedded as the last feature of this image."""
        slots = [slot for slot, row in enumerate(self.rows) if self._ends_with_image(row)]
        if not slots or self._media is None:
            return nullcontext()
        ended = [self.rows[slot].request.media[-1] for slot in slots]
        count = round_up(len(self.rows), ROW_MULTIPLE)
        return self._media.insert_last_features(slots, ended, count, self.device, self.model.dtype)

    def _build_rotary_ids(self, positions: Tensor) -> Tensor:
        """Return the rotary positions, [B] or [3, B], of new tokens at indices `positions` [B]."""
        offsets = torch.tensor([row.position_offset for row in self.rows])
        if not offsets.any():
            return positions
        found = positions.to(torch.promote_types(positions.dtype, offsets.dtype), copy=True)
        found[: len(offsets)] += offsets
        ended = {slot: row for slot, row in enumerate(self.rows) if self._ends_with_image(row)}
        if ended and self._media is not None:
            found = found.expand(3, -1).clone()
            for slot, row in ended.items():
                own = self._media.compute_positions(row.tokens[: row.length], row.request.media)
                found[:, slot] = torch.from_numpy(own[:, -1]) if own is not None else found[:, slot]
        return found

    def _compute_hidden_states(self, token_ids: IntArray, media: Sequence[MediaSpan]) -> Tensor:
        """Return the hidden states [L - 1, H] after the last norm for all tokens of a sequence except the last."""
        return self._run(get_decoder(self.model), token_ids, media, CausalPass)[0].last_hidden_state[0, :-1]

    def _compute_logits(self, ids: Tensor, positions: Tensor, attention: CausalPass | DecodePass) -> Tensor:
        """Return the logits [N, V] of a flat input [N]."""
        return self._forward(self.model, ids, positions, attention).logits[0]

    def _forward(self, module: Any, ids: Tensor, positions: Tensor, attention: CausalPass | DecodePass) -> Any:
        return module(
            input_ids=ids[None],
            position_ids=positions.to(self.device).unsqueeze(-2),  # [1, N] or [3, 1, N]
            use_cache=False,
            attention_pass=attention,
        )


def check_decoding(model: PreTrainedModel, logits: Callable[..., Tensor]) -> None:
    """Compare the logits of prefill and decoding with those of the model's original attention, on a few tokens.

    This rejects models whose attention has features that this engine does not support, instead of sampling from wrong
    distributions.

    Raises:
        ModelError: the logits differ, or the model cannot run in this engine.
    """
    device = model.device
    ids = (torch.arange(11, device=device) * 7919 + 13) % min(model.config.get_text_config().vocab_size, 250)
    positions = torch.arange(len(ids))
    try:
        # Routers choose experts only in the first pass: in bfloat16, correct passes sometimes choose different experts,
        # which changes the logits as much as a real error.
        with torch.inference_mode(), reuse_first_pass(model):
            set_attention(model, "eager")  # the model's own formula; its sdpa ignores soft caps
            expected = model(input_ids=ids[None], position_ids=positions.to(device)[None], use_cache=False).logits[0]
            set_attention(model, ATTENTION_NAME)
            cache = KVCache()
            cache.reserve(1, 32, 0)
            logits(ids[:-1], positions[:-1], CausalPass(cache, 0))
            decoded = logits(ids[-1:], positions[-1:], DecodePass(cache, positions[-1:].to(device)))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ModelError(
            f"model type '{model.config.model_type}' cannot run in the hf engine ({error}): use inference.engine=vllm."
        ) from error
    difference = float((decoded[-1].float() - expected[-1].float()).abs().max() / expected[-1].float().std())
    if not difference < (1e-2 if model.dtype == torch.float32 else 0.3):
        raise ModelError(
            f"model type '{model.config.model_type}' decodes differently in the hf engine than in transformers (by "
            f"{difference:.3g} standard deviations of its logits): use inference.engine=vllm."
        )
