"""The run's judge: a language model on engines of this run.

    messages ──► tokens ──► for each field of the schema: generate text ────────────────► {"reasoning": "…",
                                                                 score the verdicts ───────────►  "score": 7.2, …}

A reply always has the required format: ROLL inserts the JSON between the fields, and chooses a verdict among those that
the schema permits, by the probability of their tokens. Therefore even a model that cannot generate JSON can be a judge,
and no verdict needs a retry. The probability-weighted mean over verdicts follows G-Eval (Liu et al., arXiv 2303.16634,
equation 1). A grammar for the whole reply would instead need a tokenizer inside the engine.

Invariants: identical requests get identical replies (a request's seed is a digest of its content); a request that does
not fit the context is rejected, never truncated; every failure of the engines raises an `InfraError`.
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
from roll.rewards.control_tokens import make_escaper
from roll.rewards.reply_cache import compute_content_key
from roll.types import Generation, GenerationRequest, Message, SamplingParams

__all__ = ["EngineChat", "JudgeModel", "JudgeUsage", "VerdictNode", "build_verdict_tree"]

MIN_PROBABILITY_MASS = 1e-3
"""If the common prefix of several verdicts has a lower probability than this, the probability is split equally among
the verdicts."""


_STRING_CONTENT_PATTERN = re.compile(r'(?:[^"\\]|\\.?)*+', re.DOTALL)
_request_numbers = itertools.count()
"""Counter for request ids, shared by all rewards of a process, because they use the same engines."""


@dataclass(slots=True)
class JudgeUsage:
    """Counts of the verdicts in a run."""

    num_verdicts: int = 0
    num_cached: int = 0
    """Number of verdicts that came from the cache."""


@dataclass(eq=False)
class JudgeModel:
    """The run's judge model: access to its engines, and its tokenizer."""

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
    """Maximum length of a request plus its reply, in tokens."""
    generate: Callable[[GenerationRequest, float], Awaitable[Generation]]
    """Sends a request to an engine, with a timeout in seconds from its start; raises `InfraError`."""
    usage: JudgeUsage = field(init=False, default_factory=JudgeUsage)

    def __post_init__(self) -> None:
        self._renderer = ChatRenderer(self.tokenizer)
        self._defused = make_escaper(self.tokenizer)
        self._has_system = self._has_system_role()
        tokens = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        quotes = [i for i, token in enumerate(tokens) if _contains_quote(token)]
        self.text_ends = tuple(sorted({*self.stop_token_ids, *quotes}))
        """Tokens that end a string: stop tokens, and tokens with a quotation mark."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Return the token IDs of the conversation, up to the start of the model's answer.

        Raises:
            DataError: The model's chat template rejects the conversation.
        """
        harmless: list[Message] = [
            Message(role=message.role, content=self._defused(message.text)) for message in messages
        ]
        return self._renderer.render(harmless if self._has_system else _merge_system_messages(harmless)).tolist()

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a text, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token IDs."""
        return self._renderer.decode(np.asarray(token_ids, np.int32))

    def _has_system_role(self) -> bool:
        try:
            self._renderer.render([Message(role="system", content="a"), Message(role="user", content="b")])
        except DataError:
            return False
        return True


def _contains_quote(token: str | None) -> bool:
    """Return whether a token contains an unescaped quotation mark."""
    return token is not None and '"' in token.replace('\\"', "")


def _merge_system_messages(messages: Sequence[Message]) -> list[Message]:
    """Merge system messages into the first message of another role, for a chat template without a system role."""
    system_text = "\n\n".join(message.text for message in messages if message.role == "system")
    others = [message for message in messages if message.role != "system"]
    if system_text and others:
        others[0] = Message(role=others[0].role, content=f"{system_text}\n\n{others[0].text}")
    return others


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictNode:
    """A node of the prefix tree of the verdicts' token sequences."""

    prefix: tuple[int, ...]
    """Tokens since the parent node."""
    leaf: int | None = None
    """The verdict, if the node is a leaf."""
    branches: Mapping[int, VerdictNode] = field(default_factory=dict)
    """Child nodes by next token."""


def build_verdict_tree(sequences: Mapping[int, Sequence[int]]) -> VerdictNode:
    """Build a prefix tree of token sequences, with verdicts as leaves; no sequence may be a prefix of another.

    Raises:
        ModelError: Two verdicts have the same tokens.
    """
    if len(sequences) == 1:
        ((leaf, _),) = sequences.items()
        return VerdictNode(prefix=(), leaf=leaf)
    shared = 0
    shortest = min(map(len, sequences.values()))
    while shared < shortest and len({sequence[shared] for sequence in sequences.values()}) == 1:
        shared += 1
    if shared == shortest:
        raise ModelError(
            "the judge's tokenizer encodes two verdicts as the same tokens: choose another model, or another scale."
        )
    parts: dict[int, dict[int, Sequence[int]]] = {}
    for verdict, sequence in sequences.items():
        parts.setdefault(sequence[shared], {})[verdict] = sequence[shared + 1 :]
    prefix = tuple(next(iter(sequences.values()))[:shared])
    return VerdictNode(prefix=prefix, branches={token: build_verdict_tree(part) for token, part in parts.items()})


class EngineChat:
    """Requests replies for one reward from the run's judge model; implements `Chat`.

    Args:
        config: The reward's settings.
        model: The judge model.
    """

    def __init__(self, config: JudgeReward, model: JudgeModel) -> None:
        self._config = config
        self._model = model
        self.name = model.name
        self.identity = [model.identity, config.verdict]

    async def generate_reply(self, messages: Sequence[Message], schema: Mapping[str, Any]) -> str:
        """Generate the fields of the schema one after another, and return the reply as JSON.

        Raises:
            UnscorableError: The request does not fit the judge's context.
        """
        prompt_ids = self._model.render(messages)
        reply: dict[str, Any] = {}
        partial_reply = "{"
        for name, kind in schema["properties"].items():
            partial_reply += f"{json.dumps(name)}: "
            if kind["type"] == "string" and "enum" not in kind:
                reply[name] = await self._generate_text(prompt_ids, partial_reply)
            else:
                values = kind["enum"] if "enum" in kind else list(range(kind["minimum"], kind["maximum"] + 1))
                weights = await self._compute_probabilities(prompt_ids, partial_reply, values)
                reply |= self._make_verdict(name, values, weights)
            partial_reply += f"{json.dumps(reply[name], ensure_ascii=False)}, "
        return json.dumps(reply, ensure_ascii=False)

    async def _generate_text(self, prompt_ids: Sequence[int], partial_reply: str) -> str:
        """Generate the text of a JSON string field, without its closing quotation mark.

        Args:
            prompt_ids: Token IDs of the prompt.
            partial_reply: The reply so far, up to this field.
        """
        tokens = [*prompt_ids, *self._model.encode(f'{partial_reply}"')]
        generation = await self._generate(
            tokens,
            SamplingParams(
                max_new_tokens=self._config.max_reply_tokens,
                temperature=self._config.temperature,
                stop_token_ids=self._model.text_ends,
            ),
        )
        text = _cut_at_quote(self._model.decode(generation.token_ids.tolist()))
        try:
            return str(json.loads(f'"{text}"', strict=False))
        except ValueError:  # an invalid JSON escape
            return text

    async def _compute_probabilities(
        self, prompt_ids: Sequence[int], partial_reply: str, values: Sequence[Any]
    ) -> list[float]:
        """Compute the probability that the judge continues its reply with each of `values`.

        Args:
            prompt_ids: Token IDs of the prompt.
            partial_reply: The reply so far, up to the value.
            values: The permitted values.
        """
        # The closing brace is included, so that no verdict is a prefix of another, as `1` would be of `10`.
        tree = build_verdict_tree(
            {i: self._model.encode(f"{partial_reply}{json.dumps(v)}}}") for i, v in enumerate(values)}
        )
        weights = [0.0] * len(values)
        pending: list[tuple[VerdictNode, list[int], float]] = [(tree, list(prompt_ids), 1.0)]
        while pending:
            node, before, share = pending.pop()
            if node.leaf is not None:
                weights[node.leaf] += share
                continue
            if share < MIN_PROBABILITY_MASS:
                leaves = list(_list_leaves(node))
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

    def _make_verdict(self, name: str, values: Sequence[Any], weights: Sequence[float]) -> dict[str, Any]:
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
                f"the judge '{self.name}' requires {needed} tokens for this answer, but its context length is "
                f"{there}: raise judge.max_context, or lower max_answer_chars or max_reply_tokens of the reward "
                "'judge'"
            )
        seed = int(compute_content_key(list(tokens), sampling.max_new_tokens)[:7], 16)
        request = GenerationRequest(
            request_id=f"judge-{next(_request_numbers)}",
            token_ids=np.asarray(tokens, np.int32),
            sampling=replace(sampling, seed=seed),
        )
        return await self._model.generate(request, self._config.time_limit_s)

    async def close(self) -> None:
        """Do nothing, because the run closes the judge model."""


def _list_leaves(node: VerdictNode) -> list[int]:
    if node.leaf is not None:
        return [node.leaf]
    return [leaf for branch in node.branches.values() for leaf in _list_leaves(branch)]


def _cut_at_quote(text: str) -> str:
    """Return the text before the first unescaped quotation mark; without such a mark, return the whole text."""
    return _STRING_CONTENT_PATTERN.findall(text)[0]
