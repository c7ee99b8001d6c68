"""The run's own judge: a language model on engines of this run, tokens in, tokens out.

    ask ──► messages as tokens ──► for each field of the schema: generate text ────────────────► {"reasoning": "…",
                                                                 score the verdicts ───────────►  "score": 7.2, …}

A reply always has the required format, whatever the model: ROLL writes the JSON between the fields, and a verdict is
chosen among those that the schema permits, by the probability of their tokens. So a model that cannot write JSON can
judge, and no verdict needs a retry. The probability-weighted mean over verdicts is that of G-Eval (Liu et al., arXiv
2303.16634, equation 1). A grammar for the whole reply would instead need a tokenizer inside the engine.

Invariants: equal requests get equal replies (a request's seed is a digest of its content); a request that does not fit
the context is rejected, never truncated; every failure of the engines is an `InfraError`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np

from roll.config.rewards import JudgeReward
from roll.data import ChatRenderer
from roll.errors import DataError, ModelError, UnscorableError
from roll.rewards.control_tokens import defuser
from roll.rewards.judge.cache import content_key
from roll.types import Generation, GenerationRequest, Message, SamplingParams

__all__ = ["EngineChat", "JudgeModel", "JudgeUsage", "Verdicts", "verdict_tree"]

LEAST_SHARE = 1e-3
"""Verdicts whose common tokens have a lower probability than this share it equally."""


_TEXT = re.compile(r'(?:[^"\\]|\\.?)*+', re.DOTALL)
_numbers = itertools.count()
"""Numbers of requests: all rewards of a process use the same engines."""


@dataclass(slots=True)
class JudgeUsage:
    """Counts of a run's verdicts."""

    num_asked: int = 0
    num_kept: int = 0
    """Number of verdicts that the cache answered."""


@dataclass(eq=False)
class JudgeModel:
    """The judge model: its engines with its tokenizer."""

    _: KW_ONLY
    name: str
    """Name for messages."""
    identity: str
    """Identifies the model's weights; part of the cache key of replies."""
    tokenizer: Any
    """The model's tokenizer."""
    stop_token_ids: Sequence[int]
    """Tokens that end an answer of the model."""
    max_context: int
    """Longest request plus reply, in tokens."""
    generate: Callable[[GenerationRequest, float], Awaitable[Generation]]
    """Sends a request to an engine, with a timeout in seconds from its start; raises `InfraError`."""
    usage: JudgeUsage = field(init=False, default_factory=JudgeUsage)

    def __post_init__(self) -> None:
        self._renderer = ChatRenderer(self.tokenizer)
        self._defused = defuser(self.tokenizer)
        self._has_system = self._accepts_system()
        tokens = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        quotes = [i for i, token in enumerate(tokens) if _ends(token)]
        self.text_ends = tuple(sorted({*self.stop_token_ids, *quotes}))
        """Tokens that end a text between quotation marks."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Return the token IDs of the conversation, up to the start of the model's answer.

        Raises:
            DataError: The model's chat template rejects the conversation.
        """
        harmless: list[Message] = [
            Message(role=message.role, content=self._defused(message.text)) for message in messages
        ]
        return self._renderer.render(harmless if self._has_system else _without_system(harmless)).tolist()

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a text inside an answer."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token IDs."""
        return self._renderer.decode(np.asarray(token_ids, np.int32))

    def _accepts_system(self) -> bool:
        try:
            self._renderer.render([Message(role="system", content="a"), Message(role="user", content="b")])
        except DataError:
            return False
        return True


def _ends(token: str | None) -> bool:
    """Return whether a token holds an unescaped quotation mark."""
    return token is not None and '"' in token.replace('\\"', "")


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Merge the system messages into the first other message, for a chat template without a system role."""
    said = "\n\n".join(message.text for message in messages if message.role == "system")
    others = [message for message in messages if message.role != "system"]
    if said and others:
        others[0] = Message(role=others[0].role, content=f"{said}\n\n{others[0].text}")
    return others


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdicts:
    """A node of the prefix tree of the verdicts' token sequences."""

    prefix: tuple[int, ...]
    """Tokens since the parent node."""
    leaf: int | None = None
    """The verdict, if only one is left."""
    branches: Mapping[int, Verdicts] = field(default_factory=dict)
    """Child nodes by next token."""


def verdict_tree(sequences: Mapping[int, Sequence[int]]) -> Verdicts:
    """Build a prefix tree of token sequences, with verdicts as leaves; no sequence may be a prefix of another.

    Raises:
        ModelError: Two verdicts have the same tokens.
    """
    if len(sequences) == 1:
        ((leaf, _),) = sequences.items()
        return Verdicts(prefix=(), leaf=leaf)
    shared = 0
    shortest = min(map(len, sequences.values()))
    while shared < shortest and len({sequence[shared] for sequence in sequences.values()}) == 1:
        shared += 1
    if shared == shortest:
        raise ModelError("the judge's tokenizer writes two verdicts alike: choose another model, or another scale.")
    parts: dict[int, dict[int, Sequence[int]]] = {}
    for verdict, sequence in sequences.items():
        parts.setdefault(sequence[shared], {})[verdict] = sequence[shared + 1 :]
    prefix = tuple(next(iter(sequences.values()))[:shared])
    return Verdicts(prefix=prefix, branches={token: verdict_tree(part) for token, part in parts.items()})


class EngineChat:
    """The run's own judge for one reward; implements `Chat`.

    Args:
        config: The reward's settings.
        model: The judge model.
    """

    def __init__(self, config: JudgeReward, model: JudgeModel) -> None:
        self._config = config
        self._model = model
        self.name = model.name
        self.identity = [model.identity, config.verdict]

    async def ask(self, messages: Sequence[Message], schema: Mapping[str, Any]) -> str:
        """Generate every field of the schema in turn; see `Chat.ask`.

        Raises:
            UnscorableError: The request does not fit the judge's context.
        """
        head = self._model.render(messages)
        found: dict[str, Any] = {}
        written = "{"
        for name, kind in schema["properties"].items():
            written += f"{json.dumps(name)}: "
            if kind["type"] == "string" and "enum" not in kind:
                found[name] = await self._text(head, written)
            else:
                values = kind["enum"] if "enum" in kind else list(range(kind["minimum"], kind["maximum"] + 1))
                weights = await self._weighed(head, written, values)
                found |= self._verdict(name, values, weights)
            written += f"{json.dumps(found[name], ensure_ascii=False)}, "
        return json.dumps(found, ensure_ascii=False)

    async def _text(self, head: Sequence[int], written: str) -> str:
        """Generate the text of a string field, up to its closing quotation mark."""
        tokens = [*head, *self._model.encode(f'{written}"')]
        generation = await self._generate(
            tokens,
            SamplingParams(
                max_new_tokens=self._config.max_reply_tokens,
                temperature=self._config.temperature,
                stop_token_ids=self._model.text_ends,
            ),
        )
        text = _up_to_quote(self._model.decode(generation.token_ids.tolist()))
        try:
            return str(json.loads(f'"{text}"', strict=False))
        except ValueError:  # an invalid JSON escape
            return text

    async def _weighed(self, head: Sequence[int], written: str, values: Sequence[Any]) -> list[float]:
        """Compute the probability of each permitted value."""
        tree = verdict_tree({i: self._model.encode(f"{written}{json.dumps(v)}}}") for i, v in enumerate(values)})
        weights = [0.0] * len(values)
        pending: list[tuple[Verdicts, list[int], float]] = [(tree, list(head), 1.0)]
        while pending:
            node, before, share = pending.pop()
            if node.leaf is not None:
                weights[node.leaf] += share
                continue
            if share < LEAST_SHARE:
                leaves = list(_leaves(node))
                for leaf in leaves:
                    weights[leaf] += share / len(leaves)
                continue
            tokens = [*before, *node.prefix]
            choices = tuple(node.branches)
            generation = await self._generate(
                tokens, SamplingParams(max_new_tokens=1, temperature=0.0, choices=choices)
            )
            assert generation.choice_logprobs is not None
            for token, logprob in zip(choices, generation.choice_logprobs[0], strict=True):
                pending.append((node.branches[token], [*tokens, token], share * math.exp(logprob)))
        return weights

    def _verdict(self, name: str, values: Sequence[Any], weights: Sequence[float]) -> dict[str, Any]:
        most_likely = values[max(range(len(values)), key=weights.__getitem__)]
        if self._config.verdict == "most_likely":
            return {name: most_likely}
        if all(isinstance(value, int) for value in values):
            mean = math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / math.fsum(weights)
            return {name: round(min(max(mean, min(values)), max(values)), 6)}
        probabilities = {str(v): round(w / math.fsum(weights), 6) for v, w in zip(values, weights, strict=True)}
        return {name: most_likely, "probabilities": probabilities}

    async def _generate(self, tokens: Sequence[int], sampling: SamplingParams) -> Generation:
        needed, there = len(tokens) + sampling.max_new_tokens, self._model.max_context
        if needed > there:
            raise UnscorableError(
                f"the judge '{self.name}' would need {needed} tokens for this answer and has {there}: raise "
                "judge.max_context, or lower max_answer_chars or max_reply_tokens of the reward 'judge'"
            )
        seed = int(content_key(list(tokens), sampling.max_new_tokens)[:7], 16)
        request = GenerationRequest(
            request_id=f"judge-{next(_numbers)}",
            token_ids=np.asarray(tokens, np.int32),
            sampling=replace(sampling, seed=seed),
        )
        return await self._model.generate(request, self._config.time_limit_s)

    async def close(self) -> None:
        """Do nothing: the judge model belongs to the run."""


def _leaves(node: Verdicts) -> list[int]:
    if node.leaf is not None:
        return [node.leaf]
    return [leaf for branch in node.branches.values() for leaf in _leaves(branch)]


def _up_to_quote(text: str) -> str:
    """Return the text before the first unescaped quotation mark."""
    return _TEXT.findall(text)[0]
