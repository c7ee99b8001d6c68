"""Requests of the `hf` engine: validation, state and scheduling order. Does not import torch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from roll.errors import ConfigError, DataError, UserError
from roll.inference.spec import EngineSpec, reject_adapter
from roll.registry import did_you_mean
from roll.types import FinishReason, Generation, GenerationRequest, build_sequence_key

__all__ = [
    "Arrivals",
    "BatchRow",
    "RequestQueue",
    "build_prefill_key",
    "check_adapter",
    "check_options",
    "check_request",
    "create_row",
    "draw_uniforms",
]

OPTIONS: dict[str, tuple[str, ...] | None] = {"admission": ("wave", "continuous"), "device": None}
"""Supported keys of `inference.options`, with their possible values; `None`: any value."""

SETTLE_ITERATIONS = 3
"""Number of event loop iterations without a new request after which a wave begins."""


def build_prefill_key(row: BatchRow, count: int) -> bytes:
    """Return a key that identifies the first `count` tokens of a row, including their media, and the adapter."""
    tokens = build_sequence_key(row.tokens[: row.length], row.request.media)[:count].tobytes()
    return tokens if row.request.adapter is None else tokens + b"/" + row.request.adapter.encode()


class BatchRow:
    """A request in progress: its tokens so far and its random numbers."""

    def __init__(self, request: GenerationRequest, order: int, seed: int) -> None:
        sampling = request.sampling
        self.request = request
        self.order = order
        """The index of the request in the order of arrival."""
        self.prompt_length = len(request.token_ids)
        self.capacity = self.prompt_length + sampling.max_new_tokens
        self.tokens = np.zeros(self.capacity, np.int64)
        self.tokens[: self.prompt_length] = request.token_ids
        self.length = self.prompt_length
        self.uniforms = draw_uniforms(seed, sampling.position + sampling.max_new_tokens)[sampling.position :]
        self.logprobs = np.zeros(sampling.max_new_tokens, np.float32)
        self.versions = np.zeros(sampling.max_new_tokens, np.int32)
        self.stop = frozenset(sampling.stop_token_ids)
        self.choice_logprobs = np.zeros((sampling.max_new_tokens if sampling.choices else 0, len(sampling.choices)))
        self.position_offset: float = 0
        """The position of a generated token minus its index: with M-RoPE, an image has fewer positions than tokens."""
        self.experts: np.ndarray | None = None
        """The experts that routers chose for each token [capacity, layers, k]; -1 where not computed yet."""

    @property
    def num_generated(self) -> int:
        """The number of tokens generated so far."""
        return self.length - self.prompt_length

    def append(self, token: int, logprob: float, version: int, choices: np.ndarray | None = None) -> bool:
        """Append the next token; return whether it ends the request."""
        index = self.num_generated
        if choices is not None:
            self.choice_logprobs[index] = choices
        self.tokens[self.length], self.logprobs[index], self.versions[index] = token, logprob, version
        self.length += 1
        return token in self.stop or self.length == self.capacity

    def store_experts(self, start: int, chosen: np.ndarray | None) -> None:
        """Store the experts [N, layers, k] chosen for N tokens from index `start`; stored entries are not changed."""
        if chosen is None:
            return
        if self.experts is None:
            self.experts = np.full((self.capacity, *chosen.shape[1:]), -1, chosen.dtype)
        # A token keeps the experts of the pass that first computed it, even if its keys and values are recomputed.
        known = self.experts[start : start + len(chosen)]
        np.copyto(known, chosen, where=known < 0)

    def build_result(self, engine_id: str, aborted: bool = False) -> Generation:
        """Return the request's result with its tokens so far."""
        count = self.num_generated
        stopped = count > 0 and int(self.tokens[self.length - 1]) in self.stop
        reason: FinishReason = "abort" if aborted else "stop" if stopped else "length"
        return Generation(
            request_id=self.request.request_id,
            token_ids=self.tokens[self.prompt_length : self.length].astype(np.int32),
            logprobs=self.logprobs[:count].copy(),
            policy_versions=self.versions[:count].copy(),
            finish_reason=reason,
            engine_id=engine_id,
            choice_logprobs=self.choice_logprobs[:count].astype(np.float32) if self.request.sampling.choices else None,
            experts=None if self.experts is None else self.experts[: self.length].copy(),
        )


class Arrivals:
    """Counts the requests that arrive, and waits until no more requests arrive."""

    def __init__(self) -> None:
        self._num_requests = self._num_expected = 0
        self._changed = asyncio.Event()

    def add(self) -> int:
        """Count a request, and return its index in the order of arrival."""
        self._num_requests += 1
        return self._num_requests - 1

    @contextmanager
    def expect_request(self) -> Iterator[None]:
        """Make `wait_until_they_stop` wait for the end of this context, in which a thread reads a request's media.

        Otherwise, the wave that a request joins would depend on how long the thread takes.
        """
        self._num_expected += 1
        try:
            yield
        finally:
            self._num_expected -= 1
            self._changed.set()

    async def wait_until_they_stop(self) -> None:
        """Wait until no request is expected, and none has arrived for `SETTLE_ITERATIONS` event loop iterations."""
        seen, quiet = -1, 0
        while quiet < SETTLE_ITERATIONS:
            while self._num_expected:
                self._changed.clear()
                await self._changed.wait()
                quiet = 0
            quiet = quiet + 1 if seen == self._num_requests else 0
            seen = self._num_requests
            await asyncio.sleep(0)


class RequestQueue:
    """The waiting requests: a *wave* of requests that may join the decoder, and requests that arrived later."""

    def __init__(self) -> None:
        self._arrivals: list[BatchRow] = []
        self._wave: deque[BatchRow] = deque()

    def __len__(self) -> int:
        return len(self._arrivals) + len(self._wave)

    @property
    def num_in_wave(self) -> int:
        """The number of requests in the wave that have not joined the decoder yet."""
        return len(self._wave)

    def add(self, row: BatchRow) -> None:
        """Add a request to the arrivals."""
        self._arrivals.append(row)

    def begin_wave(self) -> None:
        """Move all arrivals into the wave, and sort the wave by priority, then by order of arrival."""
        order = sorted([*self._wave, *self._arrivals], key=lambda row: (row.request.priority, row.order))
        self._wave, self._arrivals = deque(order), []

    def requeue(self, rows: Iterable[BatchRow]) -> None:
        """Insert requests that have already started at the front of the wave."""
        rows = list(rows)
        for row in rows:
            # A request without new tokens starts over, perhaps with other weights, which may choose other experts.
            if not row.num_generated:
                row.experts = None
        self._wave.extendleft(reversed(rows))

    def pop_admissible(self, can_admit: Callable[[BatchRow, list[BatchRow]], bool]) -> list[BatchRow]:
        """Remove and return rows from the front of the wave while `can_admit(row, rows removed so far)` is true."""
        taken: list[BatchRow] = []
        while self._wave and can_admit(self._wave[0], taken):
            taken.append(self._wave.popleft())
        return taken

    def remove(self, request_ids: Collection[str]) -> list[BatchRow]:
        """Remove and return the waiting requests with the ids `request_ids`; ignore unknown ids."""
        removed = [row for row in (*self._wave, *self._arrivals) if row.request.request_id in request_ids]
        self._wave = deque(row for row in self._wave if row.request.request_id not in request_ids)
        self._arrivals = [row for row in self._arrivals if row.request.request_id not in request_ids]
        return removed


def draw_uniforms(seed: int, count: int) -> np.ndarray:
    """Return the first `count` random numbers of a seed, float64 in [0, 1); a larger `count` only appends numbers."""
    return np.random.Generator(np.random.PCG64(seed % 2**64)).random(count)


def create_row(request: GenerationRequest, order: int, engine_seed: int) -> BatchRow:
    """Create the row of a request. If it has no seed, one is derived from the engine's seed and `order`."""
    seed = request.sampling.seed
    if seed is None:
        seed = int(np.random.SeedSequence([engine_seed % 2**64, order]).generate_state(1, np.uint64)[0])
    return BatchRow(request, order, seed)


def check_request(request: GenerationRequest, max_context: int, vocab_size: int) -> None:
    """Reject a request that cannot be served.

    Raises:
        UserError: the request is empty or too long, or has tokens outside the vocabulary.
    """
    name, prompt, new = request.request_id, len(request.token_ids), request.sampling.max_new_tokens
    if prompt < 1 or new < 1:
        raise UserError(f"request {name} has {prompt} prompt tokens and max_new_tokens={new}; both must be at least 1.")
    if prompt + new > max_context:
        raise UserError(
            f"request {name} requires {prompt} + {new} tokens, which exceeds the engine's context length "
            f"{max_context}: raise inference.max_context, or lower max_new_tokens."
        )
    tokens = np.concatenate([request.token_ids, np.asarray(request.sampling.choices, request.token_ids.dtype)])
    lowest, highest = int(np.min(tokens)), int(np.max(tokens))
    if lowest < 0 or highest >= vocab_size:
        raise UserError(
            f"request {name} has token id {lowest if lowest < 0 else highest}, which is out of range for the "
            f"vocabulary size {vocab_size}: use the model's tokenizer."
        )


def check_adapter(request_id: str, adapter: str | None, adapters: Container[str | None] | None) -> None:
    """Reject a request that names an adapter which the engine does not have.

    Args:
        request_id: The ID of the request, for messages.
        adapter: The name of the adapter.
        adapters: The names of the engine's adapters; `None` if the engine supports none.

    Raises:
        UnsupportedError: the engine has no adapters.
        DataError: there is no adapter of this name.
    """
    if adapters is None:
        reject_adapter("hf", adapter)
    elif adapter is not None and adapter not in adapters:
        raise DataError(
            f"request {request_id} names the adapter '{adapter}', which the engine has not received: sync it first."
        )


def check_options(spec: EngineSpec) -> None:
    """Reject settings that this engine does not support.

    Raises:
        ConfigError: an option is unknown or its value is not allowed.
    """
    for key, value in spec.options.items():
        if key not in OPTIONS:
            raise ConfigError(
                f"the hf engine has no option '{key}' (inference.options).{did_you_mean(key, list(OPTIONS))} "
                f"Known: {', '.join(OPTIONS)}."
            )
        choices = OPTIONS[key]
        if choices is not None and value not in choices:
            raise ConfigError(f"inference.options.{key} must be one of {', '.join(choices)}, got '{value}'.")
