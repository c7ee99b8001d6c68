"""Sampling: sessions that name what to sample from, and requests for several sequences of one prompt.

If the engine dies, a request continues on another one, or on the same one after its restart: sequences that are
complete are kept, and the others are sampled again with the same seeds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from roll.serving import wire
from roll.serving.engine_calls import EngineCalls
from roll.serving.engines import ServedEngines, find_engine_death
from roll.serving.failures import ApiError, RequestFailure
from roll.serving.requests import Sample, SamplingSettings
from roll.serving.snapshot_cache import SnapshotId
from roll.serving.submissions import Result
from roll.types import FloatArray, Generation, GenerationRequest, IntArray, SamplingParams

__all__ = ["FIRST_SLICE", "MAX_DEATHS", "MIN_TEMPERATURE", "Sampler", "SamplingSession"]

FIRST_SLICE = 32
"""The number of tokens after which the text is first searched for stop strings. The search is repeated each time the
number of tokens doubles.
"""

MIN_TEMPERATURE = 1e-4
"""The lowest temperature other than 0: logits are divided by it in float32, and must not overflow."""


MAX_DEATHS = 3
"""A request fails when engines have died this many times while they ran it, because it may be the cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSession:
    """The weights that the requests of a session sample from."""

    session_id: str
    owner: str
    path: str | None = None
    """The path of a snapshot; `None` for the base model."""
    saved_by: str = ""
    """The request that has saved the snapshot: when a snapshot has expired, its path can be used again."""

    @property
    def snapshot(self) -> SnapshotId | None:
        """The ID of the snapshot; `None` for the base model."""
        return None if self.path is None else SnapshotId(self.path, self.saved_by)


@dataclass(kw_only=True, slots=True)
class _Sequence:
    """A sequence that is being sampled."""

    seed: int
    tokens: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    stop_reason: str = ""
    """`length` or `stop`; empty until the sequence is complete."""

    def add(self, found: Generation) -> None:
        """Append generated tokens and their log-probs."""
        self.tokens = np.concatenate([self.tokens, found.token_ids]).astype(np.int32)
        self.logprobs = np.concatenate([self.logprobs, found.logprobs]).astype(np.float32)

    def finish(self, stop_reason: str, length: int | None = None) -> None:
        """Mark the sequence as complete, truncated to `length` tokens if given."""
        self.tokens, self.logprobs, self.stop_reason = self.tokens[:length], self.logprobs[:length], stop_reason


class Sampler:
    """Samples with engines.

    Args:
        engines: The engines.
        max_context: The largest number of tokens of a prompt with its answer.
        vocab_size: The number of tokens in the vocabulary.
        end_token_ids: The tokens that end an answer by default.
        tokenizer: The tokenizer of the base model, for stop strings.
    """

    def __init__(
        self,
        engines: ServedEngines,
        *,
        max_context: int,
        vocab_size: int,
        end_token_ids: Sequence[int],
        tokenizer: object,
    ) -> None:
        self._engines = engines
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._end_token_ids = tuple(end_token_ids)
        self._tokenizer = tokenizer
        self._numbers = itertools.count()

    def check(self, request: Sample) -> IntArray:
        """Check a request against the limits of the model, and return the tokens of its prompt.

        Raises:
            ApiError: The prompt is empty, too long, or has tokens outside the vocabulary, or a setting is out of range.
        """
        tokens = np.array([token for chunk in request.prompt.chunks for token in chunk.tokens], np.int32)
        wrong = np.flatnonzero(tokens >= self._vocab_size)
        if len(wrong):
            problem = f"token {tokens[wrong[0]]} is not in the vocabulary of {self._vocab_size} tokens."
            raise ApiError(400, problem, field="prompt")
        if len(tokens) == 0:
            raise ApiError(400, "the prompt must have at least one token.", field="prompt")
        settings = request.sampling_params
        room = self._max_context - len(tokens)
        if room < (settings.max_tokens or 1):
            asked = f" and max_tokens is {settings.max_tokens}" if settings.max_tokens else ""
            problem = (
                f"the prompt has {len(tokens)} tokens{asked}, but the limit for both together is {self._max_context}."
            )
            raise ApiError(400, problem, field="sampling_params.max_tokens")
        if 0 < settings.temperature < MIN_TEMPERATURE:
            problem = f"must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, got {settings.temperature:g}."
            raise ApiError(400, problem, field="sampling_params.temperature")
        if settings.top_k == 0:
            raise ApiError(400, "must be -1 (no limit) or at least 1, got 0.", field="sampling_params.top_k")
        if isinstance(settings.stop, list) and any(
            isinstance(token, int) and token >= self._vocab_size for token in settings.stop
        ):
            raise ApiError(400, f"tokens must be below {self._vocab_size}.", field="sampling_params.stop")
        if request.prompt_logprobs_last_n is not None:
            if not request.prompt_logprobs:
                raise ApiError(400, "it needs prompt_logprobs.", field="prompt_logprobs_last_n")
            if request.prompt_logprobs_last_n >= len(tokens):
                problem = f"must be below the {len(tokens)} tokens of the prompt, got {request.prompt_logprobs_last_n}."
                raise ApiError(400, problem, field="prompt_logprobs_last_n")
        return tokens

    async def sample(self, session: SamplingSession, request: Sample, tokens: IntArray, seed: int) -> Result:
        """Sample the sequences of a request.

        Args:
            session: The weights to sample from.
            request: The request.
            tokens: The tokens of the prompt.
            seed: The seed of a request without one.

        Raises:
            RequestFailure: The engine died several times, or cannot be restarted.
        """
        settings = request.sampling_params
        seed = seed if settings.seed is None else settings.seed % 2**63
        seeds = np.random.SeedSequence(seed).generate_state(request.num_samples, np.uint64)
        sequences = [_Sequence(seed=int(own) >> 1) for own in seeds]
        num_deaths = 0
        while True:
            try:
                scores = await self._run(session, request, tokens, sequences)
            except Exception as error:
                if (death := find_engine_death(error)) is None:
                    raise
                num_deaths += 1
                if num_deaths == MAX_DEATHS:
                    raise RequestFailure(
                        f"an engine died {num_deaths} times during this request, the last time because {death.cause}. "
                        "Send the request again.",
                        "server",
                    ) from error
                continue
            content = [(each.tokens, each.logprobs, each.stop_reason) for each in sequences]
            return Result(body=wire.encode_samples(content, scores), content_type=wire.CONTENT_TYPE)

    async def _run(
        self, session: SamplingSession, request: Sample, prompt: IntArray, sequences: Sequence[_Sequence]
    ) -> FloatArray | None:
        """Complete the sequences on one engine, and return the log-probs of the prompt if they are requested."""
        waiting = [each for each in sequences if not each.stop_reason]
        served = self._engines.choose(session.snapshot)
        async with served.use(session.snapshot, len(waiting)) as (engine, adapter), asyncio.TaskGroup() as group:
            for each in waiting:
                group.create_task(self._complete(engine, adapter, prompt, request.sampling_params, each))
            scoring = group.create_task(self._score(engine, adapter, request, prompt))
        return scoring.result()

    async def _complete(
        self,
        engine: EngineCalls,
        adapter: str | None,
        prompt: IntArray,
        settings: SamplingSettings,
        sequence: _Sequence,
    ) -> None:
        """Sample the rest of a sequence.

        With stop strings, the answer is generated in slices, and cut after the token that completes a stop string.
        """
        limit = min(settings.max_tokens or self._max_context, self._max_context - len(prompt))
        strings, stop_ids = self._read_stop(settings)
        while True:
            done = len(sequence.tokens)
            size = max(FIRST_SLICE, done) if strings else limit
            params = SamplingParams(
                max_new_tokens=min(size, limit - done),
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=max(settings.top_k, 0),
                stop_token_ids=stop_ids,
                seed=sequence.seed,
                position=done,
            )
            name = f"sample-{next(self._numbers)}"
            context = np.concatenate([prompt, sequence.tokens])
            found = await engine.generate(
                GenerationRequest(request_id=name, token_ids=context, sampling=params, adapter=adapter)
            )
            if found.finish_reason == "abort":
                raise RequestFailure("the engine aborted the request.", "server")
            sequence.add(found)
            end = self._find_end(sequence.tokens, done, strings)
            if end is not None:
                return sequence.finish("stop", end)
            if found.finish_reason != "length" or len(sequence.tokens) >= limit:
                return sequence.finish("length" if found.finish_reason == "length" else "stop")

    def _read_stop(self, settings: SamplingSettings) -> tuple[list[str], tuple[int, ...]]:
        """Return the strings and the tokens that end an answer."""
        stop = settings.stop
        if stop is None:
            return [], self._end_token_ids
        if isinstance(stop, str):
            return [stop], self._end_token_ids
        strings = [each for each in stop if isinstance(each, str)]
        if strings:
            return strings, self._end_token_ids
        return [], tuple(each for each in stop if isinstance(each, int))

    def _find_end(self, tokens: IntArray, start: int, strings: Sequence[str]) -> int | None:
        """Return the number of tokens up to the first one, after `start`, that completes a stop string."""
        if not strings or not any(each in self._decode(tokens) for each in strings):
            return None
        low, high = start, len(tokens)  # the text of `low` tokens has no stop string, that of `high` tokens has one
        while high - low > 1:
            middle = (low + high) // 2
            if any(each in self._decode(tokens[:middle]) for each in strings):
                high = middle
            else:
                low = middle
        return high

    def _decode(self, tokens: IntArray) -> str:
        return self._tokenizer.decode(tokens.tolist())  # type: ignore[attr-defined]

    async def _score(
        self, engine: EngineCalls, adapter: str | None, request: Sample, tokens: IntArray
    ) -> FloatArray | None:
        """Return the log-probs of the prompt, NaN where they are not requested."""
        if not request.prompt_logprobs:
            return None
        scored = (await engine.score(tokens, adapter)).astype(np.float32)
        first = 1 if request.prompt_logprobs_last_n is None else len(tokens) - request.prompt_logprobs_last_n
        scored[:first] = np.nan
        return scored
