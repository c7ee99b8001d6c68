"""Router replay: records the experts that vLLM's routers choose, in the worker of its CPU build.

    forward pass ─ capture, layer by layer ─► [tokens, layers, k] ─► by request and position, and by KV cache slot
                                                                       └─ for a cached prefix: the record of its slots

vLLM records routing only in its second model runner, which needs Triton; the CPU build uses the first one. A KV cache
slot stores one token, so requests that share cached blocks also share the experts recorded for these blocks. If tokens
are recomputed, the record still contains the experts of the first pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from roll.errors import UnsupportedError
from roll.inference.spec import get_expert_dtype

__all__ = ["RoutingRecorder", "find_moe_layers"]

SCORING_PREFIX = "logprobs-"
"""Prefix of the names of requests that only compute log-probs; their experts are not recorded."""
NAME_SUFFIX_LENGTH = 9
"""Number of characters that vLLM appends to a request's name."""
MAX_FINISHED_PER_ROW = 4
"""Number of stored records of finished requests per concurrent request; the oldest are dropped."""


def find_moe_layers(model: torch.nn.Module) -> dict[int, Any]:
    """Return the MoE layers by layer index, ascending.

    Raises:
        UnsupportedError: the model has no routers, or a router does not report the chosen experts.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    found = {int(module.layer_id): module for module in model.modules() if isinstance(module, MoERunner)}
    if not found or not all(isinstance(module.router, BaseRouter) for module in found.values()):
        raise UnsupportedError("vLLM's model has no MoE router that reports its experts")
    return dict(sorted(found.items()))


class RoutingRecorder:
    """Records the experts chosen in every forward pass of a model runner.

    Args:
        runner: vLLM's first model runner, whose `execute_model` is wrapped.
        max_rows: The maximum number of concurrent requests.

    Raises:
        UnsupportedError: the model's routers or its cache are not supported.
    """

    def __init__(self, runner: Any, max_rows: int) -> None:
        layers = find_moe_layers(runner.get_model())
        tables = runner.input_batch.block_table.block_tables
        if len(tables) != 1 or any(module._quant_method.is_monolithic for module in layers.values()):
            raise UnsupportedError(
                "vLLM cannot report the chosen experts, because the model has several KV cache groups or a monolithic "
                "MoE kernel"
            )
        self._runner = runner
        self._max_records = MAX_FINISHED_PER_ROW * max_rows
        self._latest: list[np.ndarray | None] = [None] * len(layers)
        self._slots = np.zeros((0, 0, 0), np.int8)
        self._records: dict[str, np.ndarray] = {}
        self._dtype = get_expert_dtype(max(int(module.router.global_num_experts) for module in layers.values()))
        for i, module in enumerate(layers.values()):
            module.router.set_capture_fn(partial(self._capture, i))
        plain = runner.execute_model

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            output = plain(scheduled, *args, **kwargs)
            if scheduled.total_num_scheduled_tokens:
                self._record(scheduled)
            return output

        runner.execute_model = execute_model

    def pop_experts(self, name: str) -> np.ndarray | None:
        """Remove and return the experts [n, layers, k] of a request's first n tokens; `None` for an unknown request."""
        size = len(name) + NAME_SUFFIX_LENGTH
        key = next((x for x in self._records if x == name or (len(x) == size and x.startswith(f"{name}-"))), None)
        return None if key is None else self._records.pop(key)

    def _capture(self, layer: int, chosen: torch.Tensor) -> None:
        self._latest[layer] = chosen.cpu().numpy().astype(self._dtype)

    def _record(self, scheduled: Any) -> None:
        """Store the experts of a forward pass for each request; the tokens of a batch are ordered by request."""
        layers = [layer for layer in self._latest if layer is not None]
        if len(layers) != len(self._latest):
            raise RuntimeError("a vLLM router did not report its experts")
        chosen = np.stack([layer[: scheduled.total_num_scheduled_tokens] for layer in layers], axis=1)
        self._latest = [None] * len(layers)
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        known = scheduled.scheduled_cached_reqs
        starts |= dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
        batch, first = self._runner.input_batch, 0
        for row, name in enumerate(batch.req_ids):
            count = scheduled.num_scheduled_tokens.get(name, 0)
            if count:
                slots = self._compute_slots(row, starts[name] + count, chosen)
                self._slots[slots[starts[name] :]] = chosen[first : first + count]
                if not name.startswith(SCORING_PREFIX):
                    self._append_experts(name, slots)
            first += count
        # The record of a request is read after the request has finished, so it is kept for a while.
        gone = [name for name in self._records if name not in self._runner.requests]
        for name in gone[: max(len(gone) - self._max_records, 0)]:
            del self._records[name]

    def _compute_slots(self, row: int, length: int, chosen: np.ndarray) -> np.ndarray:
        """Return the KV cache slots of a row's first `length` tokens.

        The array that stores the chosen experts of every slot is enlarged if needed.
        """
        table = self._runner.input_batch.block_table.block_tables[0]
        size = int(table.block_size)
        blocks = table.block_table.np[row, : -(-length // size)].astype(np.int64)
        missing = (int(blocks.max()) + 1) * size - len(self._slots)
        if missing > 0:
            more = np.full((max(missing, len(self._slots)), *chosen.shape[1:]), -1, self._dtype)
            self._slots = np.concatenate([self._slots, more]) if len(self._slots) else more
        return (blocks[:, None] * size + np.arange(size)).reshape(-1)[:length]

    def _append_experts(self, name: str, slots: np.ndarray) -> None:
        """Append the experts of a request's new tokens to its record; `slots` are the cache slots of all its tokens."""
        record = self._records.get(name)
        before = 0 if record is None else len(record)
        if len(slots) > before:
            grown = np.full((len(slots), *self._slots.shape[1:]), -1, self._dtype)
            if record is not None:
                grown[:before] = record
            grown[before:] = self._slots[slots[before:]]
            self._records[name] = grown
