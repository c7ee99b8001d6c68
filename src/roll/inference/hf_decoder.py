"""The computation of the `hf` engine: a model, its KV cache, and the rows that are being decoded.

All code here is synchronous and runs in the engine's one worker thread; it does not depend on asyncio, time or order of
arrival. A row's state is its tokens: the cache holds all of them but the last, which the next step processes.

    admit     rows join; a prompt that several of them share is computed once
    step      one token for every row; rows that ended are removed, and the last row takes the place of each
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from roll.errors import ModelError
from roll.inference.hf_attention import (
    ATTENTION_NAME,
    WIDTH_MULTIPLE,
    CausalPass,
    DecodePass,
    KVCache,
    mix_in_passes,
    register_attention,
    round_up,
)
from roll.inference.hf_requests import Row, prefill_key
from roll.inference.hf_routing import RoutingRecord, reuse_first_pass
from roll.inference.hf_sampling import Sampler
from roll.inference.hf_weights import apply_update
from roll.inference.spec import EngineSpec, refuse_media
from roll.models import describe_model, find_mixers, load_causal_lm
from roll.openmp import start_spin_control
from roll.types import FloatArray, IntArray, SequenceMedia, WeightUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Decoder"]

logger = logging.getLogger(__name__)

ROW_MULTIPLE = 8
"""Rows of a step are rounded up to this, so that the CPU's matrix kernels compute the same bits for a row in any
batch."""
CPU_CACHE_BYTES = 256 * 2**20
LOGITS_CHUNK = 256
"""Number of positions whose float32 log-probs are computed at a time."""


class Decoder:
    """A loaded model with its running rows."""

    def __init__(self, spec: EngineSpec, device: torch.device) -> None:
        """Load the model and check that decoding agrees with the model's own attention.

        Raises:
            ModelError: the model cannot be loaded or decoded here, or the cache cannot hold one request.
        """
        start_spin_control()
        register_attention()
        self.device = device
        self.model: PreTrainedModel = load_causal_lm(
            spec.model_path, spec.dtype, attention=ATTENTION_NAME, trust_remote_code=spec.trust_remote_code
        )
        torch.nn.Module.to(self.model, device)
        self.model.requires_grad_(False)
        self.rows: list[Row] = []
        self.policy_version = 0
        self.vocab_size = len(self.model.get_input_embeddings().weight)  # type: ignore[arg-type]
        self._body = self.model.base_model if self.model.base_model is not self.model else self.model
        self._shapes: list[tuple[torch.nn.Parameter, torch.Size]] = []
        self._cache = KVCache()
        self._sampler = Sampler()
        self._max_rows = spec.max_num_seqs
        self.capacity_tokens = self._plan_cache(spec)
        self._mix()
        self._routing = RoutingRecord(self.model, spec) if spec.records_experts else None
        check_decoding(self.model, self._logits)

    def _mix(self) -> None:
        """Prepare recurrent modules, which carry a state from token to token."""
        text, attention = torch.arange(4, 12, device=self.device), CausalPass()
        try:
            found = find_mixers(
                self.model,
                lambda: self._forward(self._body, text, torch.arange(len(text)), attention),
                lambda: attention.num_calls,
            )
        except (TypeError, ValueError, AttributeError, RuntimeError):
            return  # the model cannot run here; `check_decoding` raises the error
        if found:
            mix_in_passes(self.model, found)

    def _plan_cache(self, spec: EngineSpec) -> int:
        """Return the number of positions that the cache may hold over all rows."""
        element_bytes = torch.finfo(self.model.dtype).bits // 8
        token_bytes = describe_model(spec.model_path).kv_bytes_per_token(element_bytes)
        budget = spec.kv_cache_bytes or _default_cache_bytes(self.device)
        needed = round_up(spec.max_context, WIDTH_MULTIPLE) * token_bytes
        if needed > budget:
            raise ModelError(
                f"one request of max_context={spec.max_context} tokens needs {needed} bytes of key-value cache, "
                f"there are {budget}: raise inference.kv_cache_bytes or lower inference.max_context."
            )
        return budget // token_bytes

    def can_join(self, row: Row, joining: Sequence[Row] = ()) -> bool:
        """Return whether the row can join the running and the joining rows."""
        company = [*self.rows, *joining, row]
        widest, rows = max(other.capacity for other in company), len(company)
        return rows <= self._max_rows and rows * round_up(widest, WIDTH_MULTIPLE) <= self.capacity_tokens

    @property
    def used_share(self) -> float:
        """The share of the cache that running rows have reserved."""
        return sum(round_up(row.capacity, WIDTH_MULTIPLE) for row in self.rows) / self.capacity_tokens

    @torch.inference_mode()
    def admit(self, rows: Sequence[Row]) -> None:
        """Add rows, which must fit: store the keys and values of all their tokens but the last."""
        width = round_up(max(row.capacity for row in [*self.rows, *rows]), WIDTH_MULTIPLE)
        count = max(len(self.rows) + len(rows), min(self._max_rows, self.capacity_tokens // width))
        self._cache.reserve(count, width, len(self.rows))
        computed: dict[bytes, int] = {}
        for row in rows:
            slot, past = len(self.rows), row.tokens[: row.length - 1]
            self.rows.append(row)
            if len(past) == 0:
                continue
            source = computed.setdefault(prefill_key(row), slot)
            if source != slot:
                self._cache.copy_row(source, slot, len(past))
                known = self.rows[source].experts
                row.store_experts(0, None if known is None else known[: len(past)])
                continue
            ids = torch.from_numpy(past).to(self.device)
            self._forward(self._body, ids, torch.arange(len(past)), CausalPass(self._cache, slot))
            if self._routing is not None:
                row.store_experts(0, self._routing.chosen())

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Generate one token for every row; remove and return the rows that ended."""
        count = len(self.rows)
        ids = torch.zeros(round_up(count, ROW_MULTIPLE), dtype=torch.int64)
        positions = torch.zeros_like(ids)
        for slot, row in enumerate(self.rows):
            ids[slot], positions[slot] = int(row.tokens[row.length - 1]), row.length - 1
        attention = DecodePass(self._cache, positions[:count].to(self.device))
        logits = self._logits(ids.to(self.device), positions, attention)
        if self._routing is not None:
            for row, chosen in zip(self.rows, self._routing.chosen(), strict=False):
                row.store_experts(row.length - 1, chosen[None])
        uniforms = np.array([row.uniforms[row.generated] for row in self.rows])
        draw = self._sampler.sample(logits, [row.request.sampling for row in self.rows], uniforms)
        ended = [
            row
            for slot, (row, token, logprob) in enumerate(zip(self.rows, draw.tokens, draw.logprobs, strict=True))
            if row.append(int(token), float(logprob), self.policy_version, draw.choices.get(slot))
        ]
        self.remove(ended)
        return ended

    @torch.inference_mode()
    def remove(self, rows: Sequence[Row]) -> None:
        """Remove rows; the last row moves into each gap."""
        for row in rows:
            slot, last = self.rows.index(row), self.rows.pop()
            if last is not row:
                self.rows[slot] = last
                self._cache.copy_row(len(self.rows), slot, last.length - 1)

    @torch.inference_mode()
    def logprobs(self, sequences: Sequence[IntArray], media: SequenceMedia = ()) -> list[FloatArray]:
        """Return the log-probs [L] of each sequence's tokens given their prefix, at temperature 1; entry 0 is 0."""
        refuse_media("hf", *media)
        results = []
        for sequence in sequences:
            ids = torch.from_numpy(np.asarray(sequence, np.int64)).to(self.device)
            result = torch.zeros(len(ids))
            if len(ids) > 1:
                logits = self._logits(ids[:-1], torch.arange(len(ids) - 1), CausalPass())
                for start in range(0, len(logits), LOGITS_CHUNK):
                    chunk = logits[start : start + LOGITS_CHUNK].float()
                    chosen = ids[1 + start : 1 + start + len(chunk), None]
                    result[1 + start : 1 + start + len(chunk)] = chunk.log_softmax(-1).gather(-1, chosen)[:, 0].cpu()
            results.append(result.numpy())
        return results

    def update_weights(self, update: WeightUpdate) -> Mapping[str, int]:
        """Apply new weights; running rows keep their cache and continue under the new version. See `apply_update`."""
        checksums = apply_update(self.model, update)
        self.policy_version = update.policy_version
        return checksums

    @property
    def is_released(self) -> bool:
        """Whether the memory has been released."""
        return bool(self._shapes)

    def release(self) -> list[Row]:
        """Free weights and cache; return the running rows, which must be admitted again later."""
        rows, self.rows = self.rows, []
        self._cache.clear()
        self._sampler = Sampler()
        self._shapes = [(parameter, parameter.shape) for parameter in self.model.parameters()]
        for parameter, _ in self._shapes:
            parameter.data = parameter.data.new_empty(0)
        if self.device.type != "cpu":  # other processes share the device
            torch.get_device_module(self.device).empty_cache()
        return rows

    def reclaim(self) -> None:
        """Allocate the weights again; their values are undefined until the next update."""
        for parameter, shape in self._shapes:
            parameter.data = parameter.data.new_zeros(shape)
        self._shapes = []

    def _logits(self, ids: Tensor, positions: Tensor, attention: CausalPass | DecodePass) -> Tensor:
        """Return the logits [N, V] of a flat input [N]."""
        return self._forward(self.model, ids, positions, attention).logits[0]

    def _forward(self, module: Any, ids: Tensor, positions: Tensor, attention: CausalPass | DecodePass) -> Any:
        return module(
            input_ids=ids[None],
            position_ids=positions.to(self.device)[None],
            use_cache=False,
            attention_pass=attention,
        )


def check_decoding(model: PreTrainedModel, logits: Callable[..., Tensor]) -> None:
    """Compare prefill and decoding with the model's own attention on a few tokens.

    This rejects models whose attention has features that this engine does not support, instead of sampling from wrong
    distributions. Routers choose experts only once: in bfloat16 correct passes sometimes differ in a choice, which
    changes logits as much as a mistake does.

    Raises:
        ModelError: the results differ, or the model cannot run this way.
    """
    device = model.device
    ids = (torch.arange(11, device=device) * 7919 + 13) % min(model.config.get_text_config().vocab_size, 250)
    positions = torch.arange(len(ids))
    try:
        with torch.inference_mode(), reuse_first_pass(model):
            model.set_attn_implementation("eager")  # the model's own formula; its sdpa ignores soft caps
            expected = model(input_ids=ids[None], position_ids=positions.to(device)[None], use_cache=False).logits[0]
            model.set_attn_implementation(ATTENTION_NAME)
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


def _default_cache_bytes(device: torch.device) -> int:
    """Return the default cache size: 256 MiB on a CPU, a third of the free memory elsewhere."""
    if device.type == "cpu":
        return CPU_CACHE_BYTES
    free, _ = torch.accelerator.get_memory_info(device)
    return free // 3
